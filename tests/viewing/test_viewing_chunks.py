import io
import json
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

import dcdm
import tiny
from browser import CHROMIUM, Page, artefacts, chromium, dumped
from dcdm.cli import main
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.viewing import palette
from dcdm.viewing.chunks import (
    LEVELS,
    ChunkView,
    Frame,
    Held,
    TextWindow,
    Token,
    TokenWindows,
    view,
    window_of,
)
from dcdm.viewing.pages import chunks_page, page_data
from dcdm.viewing.terminal import coloured_text, headline, numbered_lines, show

LENGTH = 14
NASTY = "</script><script>alert('&')</script> <b>x</b> \u2028"


def window(length: int = LENGTH, seed: int = 0) -> TextWindow:
    tokens = tiny.tokens(1, length, seed=seed)[0]
    pieces = [b"" if token == tiny.LETTERS else bytes([ord("a") + token]) for token in tokens.tolist()]
    return TextWindow(tokens, pieces, ["<bos>"] + [None] * (length - 1))


def byte_window(text: str) -> TextWindow:
    return window_of(text, byte_tokenizer(), 128)[0]


def byte_model(name: str, **changes):
    return tiny.model(name, symbols=257, **changes)


# --- the data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.VALID)
def test_rounds_end_with_the_models_own_partition_and_its_scores(name):
    model, row = tiny.model(name), window()
    found = view(model, row)
    partition = model.partition(row.tokens[None])
    ids = partition.ids[0]
    assert found.axis == "round"
    assert found.frames[-1].ids == ids.tolist()
    for k, frame in enumerate(found.frames, start=1):
        assert frame.ids == torch.where(ids <= k, ids, -1).tolist()
        assert frame.hidden == (ids >= k).tolist()
        assert frame.sizes == [int((ids == j).sum()) if j <= k else 0 for j in range(1, found.num_chunks + 1)]
    if partition.scores is None:
        assert not any(any(frame.scores) for frame in found.frames)
    else:
        assert found.frames[-1].scores[0] == []
        scores = torch.tensor(found.frames[-1].scores[1:], dtype=torch.float64)
        torch.testing.assert_close(scores, partition.scores[0, 1:])


@pytest.mark.parametrize("name", tiny.PAPER)
def test_noise_frames_are_what_the_model_decides_under_that_noise(name):
    model, row = tiny.model(name), window()
    found = view(model, row, noise=0.35)
    assert [frame.at for frame in found.frames] == sorted({*LEVELS, 0.35})
    assert found.frame.at == 0.35
    assert len({tuple(frame.ids) for frame in found.frames}) > 1
    for frame in found.frames:
        out = model(row.tokens[None], torch.tensor([frame.hidden]))
        assert frame.ids == out.chunk_ids[0].tolist()
        torch.testing.assert_close(torch.tensor([frame.scores], dtype=torch.float64), out.router_scores)
        assert sum(frame.sizes) == LENGTH - 1


def test_masks_are_nested_over_noise_levels_and_follow_the_seed():
    model = tiny.model("paper")
    hidden = torch.tensor([frame.hidden for frame in view(model, window(60)).frames])
    assert not bool((hidden[:-1] & ~hidden[1:]).any())
    assert not bool(hidden[0].any())
    assert bool(hidden[-1, 1:].all())
    assert not bool(hidden[:, 0].any())
    other = torch.tensor([frame.hidden for frame in view(model, window(60), seed=1).frames])
    assert not torch.equal(hidden, other)


@pytest.mark.parametrize("name", ["paper", "causal", "strided"])
def test_a_text_shorter_than_the_number_of_chunks_has_empty_chunks(name):
    found = view(tiny.model(name, num_chunks=5), window(3))
    assert sum(found.frames[-1].sizes) == 2
    assert len(found.frames[-1].sizes) == 5


@pytest.mark.parametrize(
    ("name", "asked", "why"),
    [
        ("ar", {}, "has no chunks"),
        ("causal", {"noise": 0.5}, "do not depend on noise"),
        ("paper", {"noise": 1.5}, "between 0 and 1"),
    ],
)
def test_ar_and_settings_that_do_not_fit_are_refused(name, asked, why):
    with pytest.raises(ConfigError, match=why):
        view(tiny.model(name), window(), **asked)


@pytest.mark.parametrize("name", ["paper", "causal", "random"])
def test_contents_over_a_corpus_are_those_of_the_models_own_chunks(name):
    model, rows = tiny.model(name), [window(seed=seed) for seed in range(11)]
    tokens = torch.stack([row.tokens for row in rows])
    index = torch.arange(len(rows))
    corpus = TokenWindows(
        "rows", tokens, torch.zeros_like(tokens, dtype=torch.bool), index, [row.pieces for row in rows]
    )
    found = view(model, rows[0], corpus=corpus)
    held = found.held
    assert held.tokens == 11 * (LENGTH - 1)
    assert all(frame[0].tokens == held.tokens for frame in held.frames)
    if name == "paper":
        assert len(held.frames) == len(LEVELS)
        assert [[one.which for one in held.frames[at]] for at in (0, 5, -1)] == [
            ["all", "visible"], ["all", "visible", "masked"], ["all", "masked"],
        ]  # fmt: skip
        half = held.frames[5]
        assert half[1].tokens + half[2].tokens == held.tokens
        ids = model(tokens, torch.zeros_like(tokens, dtype=torch.bool)).chunk_ids
        held.frames[1:] = []
    else:
        ids = model.partition(tokens, index=index).ids
    sizes = [int((ids[:, 1:] == k).sum()) for k in range(1, found.num_chunks + 1)]
    assert [one[0].sizes for one in held.frames] == [sizes]


# --- tokens as text ----------------------------------------------------------------------------------------------


def test_of_a_long_text_the_first_window_is_shown_and_an_empty_one_is_refused():
    assert byte_window("aé\n").labels == ["<|bos|>", "a", "\\xc3", "\\xa9", "\n"]
    tokenizer = byte_tokenizer()
    first, note = window_of("abcdefg", tokenizer, 4)
    assert b"".join(first.pieces) == b"abc"
    assert note == "The first 3 of 7 tokens: the model's context holds no more."
    assert window_of("abc", tokenizer, 4)[1] == ""
    with pytest.raises(ConfigError, match="empty"):
        window_of("", tokenizer, 4)


# --- the terminal ------------------------------------------------------------------------------------------------


def test_numbers_stand_under_their_tokens():
    found = view(byte_model("paper"), byte_window("if x:\n    y = [1]\n"), noise=0.3)
    lines = list(numbered_lines(found, width=80))
    text, chunk, mask = (
        "".join(line[7:].ljust(width) for line, width in zip(rows, (13, 12), strict=True))
        for rows in ((lines[0], lines[4]), (lines[1], lines[5]), (lines[2], lines[6]))
    )
    assert text == "<|bos|>if x:↵    y = [1]↵"
    assert [int(number) for number in chunk.replace(" ", "")] == found.frame.ids
    assert mask.count("#") == sum(found.frame.hidden)


@pytest.mark.parametrize("width", [30, 80])
def test_long_lines_are_wrapped_and_nothing_is_lost(width):
    found = view(byte_model("bdlm"), byte_window("x" * 100))
    lines = list(numbered_lines(found, width))
    assert max(map(len, lines)) <= width
    numbers = " ".join(line[7:] for line in lines if line.startswith("chunk")).split()
    assert list(map(int, numbers)) == found.frame.ids


def test_colours_need_a_terminal_and_control_characters_do_not_reach_it():
    found = view(byte_model("causal"), byte_window("a\x1b[31m [red]\n"))
    piped = Console(file=io.StringIO(), width=80, force_terminal=False)
    terminal = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor", no_color=False)
    show(found, piped)
    show(found, terminal)
    assert "\x1b" not in piped.file.getvalue()
    assert "[red]" in piped.file.getvalue()
    assert "\x1b[31m" not in terminal.file.getvalue()
    assert "48;2;0;114;178" in terminal.file.getvalue()
    assert coloured_text(found).plain == "<|bos|>a␛[31m [red]↵\n"


def test_inks_are_readable_on_every_colour():
    for ground in (*palette.CHUNKS, palette.VISIBLE):
        low, high = sorted((palette.luminance(ground), palette.luminance(palette.ink(ground))))
        assert (high + 0.05) / (low + 0.05) > 4.5


def test_a_line_end_with_its_indentation_begins_a_line():
    tokens = [Token(0, text, True) for text in ("if", " x", ":", "\n    ", " y", "\n")]
    frame = Frame(1, [1, 1, 2, 2, 1, 1], [False] * 6, [[]] * 6, [4, 2])
    found = ChunkView("m", "bdlm", "", "", "round", 2, tokens, [frame], 0, [], Held("", 1, 0, []))
    assert coloured_text(found).plain == "if x:\n↵     y↵\n"
    rows = [line for line in numbered_lines(found, 80) if line.startswith("text")]
    assert rows == ["text   if x:", "text   ↵     y↵"]


# --- the page ----------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][1].get("id") == "data":
            self.data += data


@pytest.mark.parametrize("name", ["bdlm", "paper", "causal"])
def test_the_page_holds_the_views_data_whatever_the_text(name):
    found = view(byte_model(name), byte_window(NASTY), name="<img src=x onerror=alert(1)>")
    elements = Elements()
    elements.feed(chunks_page(found))
    assert json.loads(elements.data) == json.loads(json.dumps(page_data(found)))
    assert [tag for tag, _ in elements.found].count("script") == 2
    assert not {"img", "b"} & {tag for tag, _ in elements.found}


ASK = """
<pre id="answers"></pre><script>
const answers = { frames: [], errors: [] };
addEventListener("error", (event) => answers.errors.push(event.message));
frames.forEach((_, number) => {
  byId("slider").value = number;
  byId("slider").dispatchEvent(new Event("input"));
  const all = tokens.map((_, at) => at);
  const places = [...document.querySelectorAll("#tokens .token")];
  const told = {};
  for (const name of ["chunk", "noise"]) {
    told[name] = all.map((q) => all.map((k) => Number(mayAttend[name](frame, q, k))));
  }
  told.ids = places.map((place) => Number(place.dataset.chunk === "·" ? -1 : place.dataset.chunk));
  told.masked = places.map((place) => place.classList.contains("masked"));
  told.sizes = [...document.querySelectorAll(".size")].map((row) => row.getAttribute("aria-label"));
  told.note = byId("mask-note").textContent;
  answers.frames.push(told);
});
const last = [...document.querySelectorAll("#tokens .token")].at(-1);
last.focus();
answers.letters = [...document.querySelectorAll("#tokens .letters")].map((place) => place.textContent).join("");
answers.token = byId("token-name").textContent;
answers.bars = document.querySelectorAll("#token-scores .track").length;
byId("sorted").click();
answers.order = maskOrder();
answers.pressed = [...document.querySelectorAll(".size")].map((row) => {
  row.click();
  return document.querySelectorAll("#tokens .chosen").length;
});
answers.wide = document.documentElement.scrollWidth > innerWidth;
byId("answers").textContent = JSON.stringify(answers);
</script>
"""


def ask_browser(html: str, folder) -> dict:
    """What the page shows at every stop of its slider, asked by a script at its end."""
    path = folder / "page.html"
    path.write_text(html.replace("</body>", ASK + "</body>"), encoding="utf-8")
    told = re.search(r'<pre id="answers">(.*?)</pre>', dumped(path, folder / "profile"), re.DOTALL)
    assert told
    return json.loads(told[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("name", ["bdlm", "paper", "causal"])
def test_a_browser_shows_ids_masks_and_sizes_of_every_frame(name, tmp_path):
    text = "if x: <b>\n"
    found = view(byte_model(name), byte_window(text))
    told = ask_browser(chunks_page(found), tmp_path)
    assert told["errors"] == []
    assert told["letters"] == "<|bos|>if·x:·<b>↵"
    for frame, shown in zip(found.frames, told["frames"], strict=True):
        ids, hidden = torch.tensor(frame.ids), torch.tensor(frame.hidden)
        assert shown["ids"] == frame.ids
        assert torch.equal(torch.tensor(shown["chunk"]).bool(), dcdm.masks.chunk_causal_mask(ids))
        assert torch.equal(torch.tensor(shown["noise"]).bool(), dcdm.masks.noise_mask(hidden))
        assert shown["masked"] == (hidden | (ids < 0)).tolist()
        assert shown["sizes"] == [f"chunk {k}: {size} tokens" for k, size in enumerate(frame.sizes, start=1)]
        live = int(dcdm.masks.chunk_causal_mask(ids).sum())
        assert f"{live} of {len(ids) ** 2} pairs are live" in shown["note"]
    last = found.frames[-1]
    assert told["order"] == torch.tensor(last.ids).argsort(stable=True).tolist()
    assert told["token"].startswith(f'"\\n" at {len(text)}, in chunk {last.ids[-1]}')
    assert told["bars"] == len(last.scores[-1])
    assert told["pressed"] == [last.ids.count(k) for k in range(1, found.num_chunks + 1)]
    assert not told["wide"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_of_many_chunks_fits_a_phone_in_the_dark(tmp_path):
    window, _ = window_of("def f(x):\n    return x\n" + "y" * 80, byte_tokenizer(), 128)
    many_scores = view(byte_model("paper", num_chunks=12), window)
    (tmp_path / "chunks-of-paper.html").write_text(chunks_page(many_scores), encoding="utf-8")
    with chromium(tmp_path / "profile") as driver:
        opened = Page(driver, artefacts(tmp_path / "pictures"))
        opened.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        opened.size(390, 844)
        driver.get((tmp_path / "chunks-of-paper.html").as_uri())
        assert opened.overflow() == 0
        opened.shot("chunks-of-paper-390-dark")
        assert opened.complaints() == []


# --- the command -------------------------------------------------------------------------------------------------


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["chunks", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_the_command_reads_an_argument_or_standard_input(tmp_path, capsys, monkeypatch):
    folder = str(tiny.exported("causal", tmp_path / "model"))
    text = "def f(x):\n    return x"
    told = []
    for arguments in ([text], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode() + b"\n")))  # as `echo` ends it
        main(["chunks", folder, *arguments, "--json"])
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    main(["chunks", folder, "None", "--json"])
    shown = json.loads(capsys.readouterr().out)["tokens"]
    assert "".join(token["text"] for token in shown[1:]) == "None"
    model, _ = dcdm.load(folder)
    tokens = torch.tensor([[token["id"] for token in told[0]["tokens"]]])
    assert told[0]["frames"][-1]["ids"] == model.partition(tokens).ids[0].tolist()


def test_the_command_writes_a_page_and_counts_over_a_corpus(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    folder = str(tiny.exported("paper", tmp_path / "model"))
    corpus, html = tmp_path / "corpus.txt", tmp_path / "deep" / "page.html"
    corpus.write_text("for i in range(10):\n    print(i)\n" * 200)
    more = ["--corpus", str(corpus), "--windows", "3", "--noise", "0.2"]
    main(["chunks", folder, "x = 1", "--html", str(html), *more])
    assert "3 held-out windows" in html.read_text(encoding="utf-8")
    main(["chunks", folder, *more])
    shown = capsys.readouterr().out
    assert "The first of 3 held-out windows" in shown
    assert re.search(r"\n +0\.2 +\d+ visible +\d\.\d\d ", shown)
    main(["chunks", folder, "x = 1"])
    assert "noise level 0.5" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path, capsys, monkeypatch):
    folder = str(tiny.exported("causal", tmp_path / "model"))
    lanes = tiny.exported("mdlm", tmp_path / "lanes", kind="lanes", lanes=(1, 2, 4))
    for writer in (tiny.exported("ar", tmp_path / "ar"), lanes):
        assert "writes from left to right and has no chunks" in refused([str(writer), "text"], capsys)
    assert "empty" in refused([folder, ""], capsys)
    assert "do not depend on noise" in refused([folder, "text", "--noise", "0.5"], capsys)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "empty" in refused([folder], capsys)
    main(["chunks", folder, "x" * 200])
    assert "tokens: the model's context holds no more" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "says"), [("mdlm", ", 1 chunk, "), ("paper", ", 2 chunks, ")])
def test_the_headline_counts_in_words(kind, says):
    assert says in headline(view(byte_model(kind), byte_window("if x:\n")))
