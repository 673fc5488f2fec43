"""Chat templates: rendered as `transformers` does, within limits of time, memory and size."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcdm.config import DataConfig
from dcdm.data import chats
from dcdm.data.chats import ChatError, ChatTemplate, ExampleMaker
from dcdm.data.sources import BadRow
from dcdm.data.tokenizers import Tokenizer, byte_tokenizer

BYTES = byte_tokenizer()
CHAT = [{"role": "user", "content": "<b>1+1?</b> ä\n"}, {"role": "assistant", "content": "2 🙂"}]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(Tokenizer(BYTES.backend, BYTES.eos_id, text))


FAMILIAR = {
    "plain": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    "trimmed": "{%- for m in messages -%}\n  {% if loop.first %}\n [{{ m.role }}]\n  {% endif %}\n{%- endfor %}",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ tools }}|{{ documents is none }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = 1 %}x{% endgeneration %}{{ x }}{% endfor %}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "methods": "{{ messages[0].content.split('+')[0] }}{{ dict(a=1).items() | list }}{{ messages[1:] | length }}",
    "year": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", FAMILIAR)
def test_templates_give_what_transformers_gives(name):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=BYTES.backend, eos_token=BYTES.eos_token, chat_template=FAMILIAR[name]
    )
    made = template(FAMILIAR[name])
    for answering in (True, False):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=answering, bos_token="")
        assert made.render(CHAT, answering=answering) == expected


FAR = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
GREEDY = {
    "a long product": ("{{ 'x' * 20000000000 }}", "more than 512 MiB"),
    "a doubled list": (
        "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}", "512|longer"
    ),
    "endless loops": (FAR + "{% endfor %}" * 3, "took longer than"),
    "endless text": ("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 4,194,304 characters"),
    "a deep macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    "deep brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply|died"),
}  # fmt: skip


def largest_child() -> int:
    """KiB of memory that the largest process started from here ever had; other tests start larger ones."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_template_is_ended_and_the_next_chat_is_rendered(name, monkeypatch):
    monkeypatch.setattr(chats, "SECONDS", 1)
    text, said = GREEDY[name]
    greedy = template("{% if messages | length > 1 %}" + text + "{% endif %}done")
    largest_before = largest_child()
    with pytest.raises(ChatError, match=said):
        greedy.render(CHAT, answering=True)
    assert largest_child() <= max(700 << 10, largest_before)
    if name != "deep brackets":  # they cannot even be compiled
        assert greedy.render(CHAT[:1], answering=True) == "done"


def test_a_template_with_a_syntax_error_is_refused_with_it():
    with pytest.raises(ChatError, match="refuses it: Expected an expression"):
        template("{% if %}").render(CHAT, answering=True)


def test_a_template_that_writes_half_a_surrogate_pair_is_refused():
    with pytest.raises(ChatError, match="writes half a surrogate pair"):
        template("a \ud800 {{ 'b' }}").render(CHAT, answering=True)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_stays_in_its_sandbox(text):
    with pytest.raises(ChatError, match="refuses it"):
        template(text).render(CHAT, answering=True)


def test_the_renderer_sees_no_keys(monkeypatch):
    monkeypatch.setenv("DCDM_API_KEY", "a-key")
    made = template("x")
    made.render(CHAT, answering=True)
    with open(f"/proc/{made._process.pid}/environ", "rb") as file:
        assert b"a-key" not in file.read()


def test_one_template_serves_many_threads_and_outlives_its_process():
    made = template("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        texts = [f"chat {number} " + "x" * 100_000 for number in range(40)]
        asked = [[{"role": "user", "content": text}] for text in texts]
        assert list(pool.map(lambda chat: made.render(chat, answering=True), asked)) == texts
    made._process.kill()
    made._process.wait()
    assert made.render(CHAT, answering=True) == CHAT[0]["content"]


def test_nothing_is_left_running_behind_a_template():
    made = template("x")
    made.render(CHAT, answering=True)
    process = made._process
    del made
    assert process.returncode is not None


def test_a_row_on_which_the_template_takes_too_much_is_a_bad_row():
    tokenizer = Tokenizer(BYTES.backend, BYTES.eos_id, "{{ 'x' * 20000000000 }}")
    with pytest.raises(BadRow, match="512 MiB"):
        ExampleMaker(DataConfig(messages_field="m"), tokenizer).examples_of({"m": CHAT})
