"""`dcdm chat`, and `/v1/chat/completions` of an imported model: templates, lanes, streaming, long conversations."""

from __future__ import annotations

import io
import sys

import pytest

import dcdm
import pretrained
from dcdm.cli import main
from dcdm.commands.chat import Conversation
from dcdm.config import ConfigError
from dcdm.data.chats import ChatTemplate
from dcdm.decoding.config import DecodingConfig
from dcdm.io.pretrained import import_model
from dcdm.kinds import build
from live import live


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    place = tmp_path_factory.mktemp("chat")
    import_model(str(pretrained.saved(place / "source", initializer_range=0.4)), place / "base")
    return place / "base"


@pytest.fixture(scope="module")
def in_lanes(base):
    ar, _ = dcdm.load(base)
    settings = {**ar.config.to_dict(), "kind": "lanes", "lanes": (1, 2, 4)}
    del settings["hide_specials"]
    model = build(dcdm.ModelConfig.from_dict(settings)).eval()
    model.load_state_dict(ar.state_dict())
    return model


def said(lines: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        main(["chat", *arguments])


def rendered(*turns: str, system: str | None = None) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [
        {"role": "assistant" if at % 2 else "user", "content": content} for at, content in enumerate(turns)
    ]
    return pretrained.tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_every_line_of_a_pipe_is_answered_given_the_conversation_so_far(base, capsys):
    said("Hi\n\nAnd you?\n", str(base), "--length", "12", "--temperature", "0", "--system", "Be kind.")
    out = capsys.readouterr().out
    model, tokenizer = dcdm.load(base)

    def answer(*turns: str) -> str:
        ids = tokenizer.encode_chat(rendered(*turns, system="Be kind."))
        return dcdm.generate(model, [ids], tokenizer=tokenizer, max_new_tokens=12, temperature=0.0).texts[0]

    first = answer("Hi")
    assert out == f"{first}\n{answer('Hi', first, 'And you?')}\n"
    said("Hi\n/new\nHi\n", str(base), "--length", "12", "--temperature", "0", "--system", "Be kind.")
    assert capsys.readouterr().out == f"{first}\n{first}\n"


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_text_that_streams_is_the_answer_in_any_number_of_lanes(base, in_lanes, lanes):
    tokenizer = dcdm.load(base)[1]
    decoding = DecodingConfig.of(lanes=lanes, temperature=0.9).resolve(in_lanes.config, tokenizer)
    pieces: list[str] = []
    conversation = Conversation(in_lanes, tokenizer, ChatTemplate(tokenizer), decoding, None, 24, seed=3)
    result = conversation.answer("What is that?", pieces.append)
    assert "".join(pieces) == result.texts[0]
    assert conversation.turns[-1] == {"role": "assistant", "content": result.texts[0]}
    if result.finished == ["length"]:
        assert int(result.forwards) <= 24 // lanes + 1
    assert lanes > 1 or len(pieces) > 3


def test_a_long_conversation_forgets_its_oldest_turns_and_a_long_message_is_refused(base, in_lanes):
    tokenizer = dcdm.load(base)[1]
    decoding = DecodingConfig.of(lanes=4, temperature=0.0).resolve(in_lanes.config, tokenizer)
    conversation = Conversation(in_lanes, tokenizer, ChatTemplate(tokenizer), decoding, "Be kind.", 16)
    for number in range(6):
        conversation.answer(f"{number} " + "word " * 8)
    assert conversation.turns[0]["content"].startswith(("2", "3", "4", "5"))
    assert conversation.turns[-2]["content"].startswith("5")
    assert conversation.answers == 6  # each draws by its number, whatever is forgotten
    before = conversation.turns
    with pytest.raises(ConfigError, match="there is room for 239; shorten it, or lower --length"):
        conversation.answer("word " * 100)
    assert conversation.turns == before


def test_neither_a_message_that_is_too_long_nor_bytes_that_are_not_utf8_end_the_chat_at_a_terminal(
    base, monkeypatch, capsys
):
    lines = io.TextIOWrapper(io.BytesIO(b"word " * 100 + b"\ncaf\xe9\n"))
    monkeypatch.setattr(lines, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", lines)
    main(["chat", str(base), "--length", "8"])
    said = capsys.readouterr().err
    assert "shorten it" in said
    assert said.count("tokens in") == 1


def test_wrong_use_is_refused(base, tmp_path, capsys):
    source = tmp_path / "source"
    pretrained.network().save_pretrained(source)
    pretrained.tokenizer(chat_template=None).save_pretrained(source)
    import_model(str(source), tmp_path / "plain")
    for arguments, message in (
        ([str(tmp_path / "plain")], "has no chat template; use `dcdm sample"),
        ([str(base), "--length", "255"], "--length 255 leaves no room"),
        ([str(base), "--length", "0"], "--length 0"),
        ([str(base), "--lanes", "4"], "lanes=4 does not fit a model of kind ar"),
    ):
        with pytest.raises(SystemExit) as left:
            said("Hi\n", *arguments)
        assert left.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("lanes", [None, 1, 4])
def test_an_imported_model_answers_chats_over_http_with_lanes_as_a_setting(base, in_lanes, lanes):
    tokenizer = dcdm.load(base)[1]
    request = {
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16, "temperature": 0, "seed": 1,
        **({} if lanes is None else {"lanes": lanes}),
    }  # fmt: skip
    with live(model=(in_lanes, tokenizer)) as server:
        answer = server.post("/v1/chat/completions", request).json()
    ids = tokenizer.encode_chat(rendered("Hi"))
    expected = dcdm.generate(
        in_lanes, [ids], tokenizer=tokenizer, max_new_tokens=16, temperature=0.0, lanes=lanes, seed=1
    )
    assert answer["choices"][0]["message"]["content"] == expected.texts[0]
    assert answer["usage"]["prompt_tokens"] == len(ids)
