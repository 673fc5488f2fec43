"""The playground in a real browser, against the real server.

Pictures go to the folder that DCDM_ARTEFACTS names, for people to look at.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex

import pytest
import torch

import tiny
from dcdm.cli import main
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding.engine import generate
from dcdm.serving import answers
from dcdm.serving.schemas import queue_full
from live import live, slow_down, until

PROMPT = "def f([[9]]):\n    [[7]] x\n"
BLANKS = 16
LONG = {"prompt": "x = ", "length": 1000, "eos": 0, "a_commit": "position"}
NARROW = 360


def model_of(name: str):
    return tiny.model(name, symbols=257, scale=4.0).float(), byte_tokenizer()


@pytest.fixture(scope="module")
def server():
    with live(model=model_of("causal")) as server:
        yield server


@pytest.fixture
def app(server):
    return server.app


@pytest.fixture
def address(server):
    return server.url


def expected(app, prompt: str = PROMPT, **settings):
    """What the library does with the same request."""
    served = app.state.served
    return generate(served.model, [prompt], tokenizer=served.tokenizer, **settings)


def forwards_of(result) -> dict[int, tuple[int, int]]:
    """Chunk and forward of every position that was filled."""
    return {at: (event.chunk, event.forward) for event in result.history for at in event.positions}


def filled(cells) -> dict[int, tuple[int, int]]:
    """The same, as the page shows it."""
    return {at: (cell["chunk"], cell["forward"]) for at, cell in enumerate(cells) if cell["forward"]}


# --- generating and watching -------------------------------------------------------------------------------------

WATCH = """
window.seen = [];
const look = () => {
  const cells = document.querySelectorAll("#runs .token");
  if (cells.length) seen.push(document.querySelectorAll("#runs .token.masked").length);
  requestAnimationFrame(look);
};
look();
"""


def test_a_text_is_filled_in_before_ones_eyes_and_is_the_librarys(page, app, address):
    page.open(address, prompt=PROMPT, a_commit="position")
    page.driver.execute_script(WATCH)
    page.fill("prompt", PROMPT)
    page.generate()
    page.until("document.querySelector('.play').title === 'Play'", "the canvas to be full")
    seen = page.js("seen")
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > BLANKS // 2
    result = expected(app, commit="position")
    assert filled(page.cells()) == forwards_of(result)
    assert f"{BLANKS} tokens in {BLANKS} forward passes" in page.text("status")
    page.click("#languages label:last-child")
    assert page.text("code") == result.texts[0]
    page.shot("generated")


def test_the_slider_shows_what_every_forward_filled(page, app, address):
    page.open(address, prompt=PROMPT, a_commit="steps:3")
    page.generate()
    steps = [event.positions for event in expected(app, commit="steps:3").history]
    assert page.js("Number(document.querySelector('#player input').max)") == len(steps)
    for step in (0, 1, len(steps) // 2, len(steps) - 1):
        page.scrub(step)
        cells = page.cells()
        assert sum("masked" in cell["look"] for cell in cells) == BLANKS - sum(map(len, steps[:step]))
        fresh = [at for at, cell in enumerate(cells) if "fresh" in cell["look"]]
        assert fresh == (sorted(steps[step - 1]) if step else [])
    page.shot("scrubbed")
    page.click("[title='One forward pass on']")
    assert page.masked() == 0
    page.click("[title='One forward pass back']")
    assert page.masked() == len(steps[-1])


def test_pausing_holds_the_canvas_while_the_text_comes_and_stopping_ends_it(page, server, address, monkeypatch):
    slow_down(monkeypatch)
    cancelled = 'dcdm_texts_total{ended="cancelled"}'
    before = server.figure(cancelled)
    page.open(address, **LONG)
    page.click("#generate")
    page.until("document.querySelectorAll('#runs .token').length > 100", "the canvas")
    page.click(".play")
    assert page.js("document.querySelector('.play').title") == "Play"
    held, come = page.masked(), page.js("Number(document.querySelector('#player input').max)")
    page.until(f"Number(document.querySelector('#player input').max) > {come}", "more forwards")
    assert page.masked() == held
    page.shot("paused")
    page.click("#stop")
    page.finished()
    assert page.text("status") == "Stopped."
    until(lambda: server.figure(cancelled) > before)
    assert page.masked() == held
    page.click(".play")
    page.until(f"document.querySelectorAll('#runs .token.masked').length < {held}", "the replay to go on")
    page.click(".play")


# --- comparing ---------------------------------------------------------------------------------------------------


def test_two_decoders_stand_side_by_side_with_their_figures(page, app, address):
    page.open(address, prompt=PROMPT, a_commit="position")
    page.click("#compare")
    page.fill("b-commit", "chunk")
    page.generate()
    page.click(".play")
    for run, commit in enumerate(("position", "chunk")):
        result = expected(app, commit=commit)
        page.scrub(BLANKS)
        assert filled(page.cells(run)) == forwards_of(result)
        told = page.js("document.querySelectorAll('.figures')[arguments[0]].textContent", run)
        assert f"forward passes{int(result.forwards[0])}" in told
        for name in ("tokens/s", "tokens/forward pass", "computed", "reused", "seconds"):
            assert name in told
    assert f"where A took {BLANKS}" in page.text("verdict")
    page.click("#which label:last-child")
    assert "--commit chunk" in page.text("code")
    page.scrub(2)
    assert page.masked(0) == BLANKS - 2
    page.shot("compared")


# --- copying -----------------------------------------------------------------------------------------------------


def test_what_is_copied_gives_the_same_text_elsewhere(page, app, address, tmp_path, monkeypatch):
    prompt = '-x it\'s "$HOME" `x` \\n [[4]]\n! <b>&amp;</b>\tü€😀'
    folder = tmp_path / "a folder's name"
    tiny.exported("causal", folder, scale=4.0)
    monkeypatch.setitem(vars(app.state.served), "folder", str(folder))
    settings = {"temperature": "0.7", "top_k": "20", "top_p": "0.9", "cache": "none"}
    page.open(address, prompt=prompt, seed=5, length=6, a_commit="steps:2",
              **{f"a_{name.replace('_', '.')}": value for name, value in settings.items()})  # fmt: skip
    for name, value in settings.items():
        page.fill(f"a-{name}", value)
    page.generate()
    page.click("#languages label:last-child")
    text = page.text("code")

    page.click("#languages label:nth-of-type(1)")
    command = page.text("code")
    words = shlex.split(command.replace("\\\n", ""))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*words[1:], "--json"])
    assert json.loads(out.getvalue())["completion"] == text

    page.click("#languages label:nth-of-type(2)")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(page.text("code"), {})
    assert out.getvalue().startswith(text)

    page.click("#languages label:nth-of-type(4)")
    words = shlex.split(page.text("code").replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1])["prompt"] == prompt


def test_the_openai_client_fills_the_same_blank(page, app, address):
    pytest.importorskip("openai")
    page.open(address, prompt="x = [[5]] + 'y'\n", seed=2, a_commit="chunk")
    page.click("#languages label:nth-of-type(3)")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(page.text("code"), {})
    text = expected(app, "x = [[5]] + 'y'\n", seed=2, commit="chunk").texts[0]
    assert text == f"x = {out.getvalue()[:-1]} + 'y'\n"


def test_settings_live_in_the_address(page, address):
    page.open(address, prompt=PROMPT, seed=3, compare=1, b_commit="factor:2", b_temperature="0.5", colour="order")
    assert page.js("document.getElementById('compare').checked")
    assert page.js("document.getElementById('b-commit').value") == "factor"
    page.fill("seed", "11")
    page.until("location.hash.includes('seed=11')", "the address")
    page.driver.refresh()
    page.until("document.querySelectorAll('.decoder').length === 2", "the page")
    assert page.js("document.getElementById('seed').value") == "11"
    assert page.js("document.getElementById('b-temperature').value") == "0.5"
    assert page.js("document.querySelector('#colours input:checked').value") == "order"
    page.open(address, prompt="x", a_commit="nonsense:1", b_routing="blocks:x", seed="<b>", colour="red", compare=7)
    assert page.js("document.getElementById('a-commit').value") == "threshold"


# --- what is shown -----------------------------------------------------------------------------------------------


def test_colours_tell_chunk_confidence_or_order_and_a_token_tells_where_it_came_from(page, app, address):
    page.open(address, prompt=PROMPT, a_commit="chunk")
    page.generate()
    page.scrub(BLANKS)
    result = expected(app, commit="chunk")
    cells = page.cells()
    for at, (chunk, _) in forwards_of(result).items():
        assert f"chunk-{chunk}" in cells[at]["look"]
    page.click("#colours label:nth-of-type(2)")
    cells = page.cells()
    bounds = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    for event in result.history:
        for at, log_p in zip(event.positions, event.log_p, strict=True):
            sure = 1 + int(torch.searchsorted(bounds, torch.tensor(log_p).double().exp(), right=True))
            assert f"sure-{sure}" in cells[at]["look"]
    assert "90 % and over" in page.text("legend")
    page.click("#colours label:nth-of-type(3)")
    orders = [int(look[6:]) for cell in page.cells() for look in cell["look"] if look.startswith("order-")]
    assert len(orders) == BLANKS
    assert max(orders) == 8
    at, (chunk, forward) = next(iter(forwards_of(result).items()))
    page.driver.find_elements("css selector", "#runs .token")[at].click()
    told = page.text("token")
    assert f"position {at} · chunk {chunk} · forward pass {forward} · probability" in told


def test_invisible_characters_are_shown_and_markup_stays_text(page, address):
    page.open(address, prompt="<img src=x onerror=alert(1)>\t\u200b\u00a0\x01 [[2]]\n")
    page.generate()
    shown = "".join(cell["text"] for cell in page.cells())
    assert shown.startswith("BOS<img·src=x·onerror=alert(1)>→")
    assert "␁" in shown
    assert "↵" in shown
    assert page.js("document.querySelectorAll('main img').length") == 0


# --- errors ------------------------------------------------------------------------------------------------------


def test_errors_are_shown_kindly_beside_what_caused_them(page, app, address, monkeypatch):
    page.open(address, prompt=PROMPT)
    page.fill("prompt", "long " * 40)
    page.generate()
    assert "tokens" in page.text("prompt-error")
    assert page.js("document.activeElement.id") == "prompt"
    page.shot("prompt-too-long")

    page.fill("prompt", PROMPT)
    assert page.js("document.getElementById('prompt-error').hidden")
    page.fill("a-temperature", "-1")
    page.click("#generate")
    assert page.text("a-temperature-error") == "This must be between 0 and 100."
    assert page.js("document.activeElement.id") == "a-temperature"
    page.fill("a-temperature", "1")
    page.fill("a-top_p", "0")  # within the field's bounds, refused by the server
    page.generate()
    assert "top_p" in page.text("a-top_p-error")
    page.fill("a-top_p", "")

    def full(*_, **__):
        raise queue_full()

    with monkeypatch.context() as patched:
        patched.setattr(app.state.scheduler, "submit", full)
        page.generate()
        assert "Too many requests" in page.text("problem")
    page.shot("busy")
    page.until("!document.querySelector('#problem button').disabled", "the pause to end")
    page.click("#problem button")
    page.finished()
    assert "16 tokens" in page.text("status")

    page.offline(True)
    try:
        page.generate()
        assert "does not answer" in page.text("problem")
        page.shot("server-gone")
    finally:
        page.offline(False)
    page.generate()
    assert page.js("document.getElementById('problem').hidden")


def cut_short(whole):
    """A stream that ends after its first four events."""

    async def cut(*arguments):
        number = 0
        async for event in whole(*arguments):
            if number < 4:
                yield event
            number += 1

    return cut


def test_a_stream_that_breaks_off_keeps_what_had_come(page, address, monkeypatch):
    monkeypatch.setattr(answers, "stream_denoising", cut_short(answers.stream_denoising))
    page.open(address, prompt=PROMPT, a_commit="position")
    page.generate()
    assert "stopped in the middle" in page.text("problem")
    assert page.text("status") == "Not finished."
    page.scrub(3)
    assert page.masked() == BLANKS - 3


def test_the_page_works_behind_a_key(page):
    with live(model=model_of("causal"), api_key="opensesame") as server:
        page.open(server.url.replace("//", "//me:opensesame@"), prompt=PROMPT)
        page.generate()
        assert "16 tokens" in page.text("status")


# --- everyone's screens, keys and eyes ---------------------------------------------------------------------------


def test_a_phones_width_needs_no_scrolling_sideways(page, address):
    page.open(address, width=NARROW, height=740, prompt=PROMPT + "y" * 20, compare=1)
    assert page.overflow() == 0
    page.generate()
    for selector in ("#colours label:nth-of-type(2)", "#languages label:nth-of-type(4)", ".keys summary"):
        page.click(selector)
        assert page.overflow() == 0
    page.driver.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert page.overflow() == 0
    page.shot("phone")
    page.fill("prompt", "long" * 50)
    page.generate()
    assert page.overflow() == 0


FOCUS = """
const at = document.activeElement;
const shape = at.type === "radio" ? at.nextElementSibling : at;
const style = getComputedStyle(shape);
const visible = style.outlineStyle !== "none" && style.outlineWidth !== "0px";
return [at.id || at.className || at.name || at.tagName, visible];
"""


def test_the_keyboard_alone_is_enough(page, address, monkeypatch):
    from selenium.webdriver.common.keys import Keys

    page.open(address, prompt=PROMPT, a_commit="position", eos=0)
    stops = []
    while "generate" not in stops:
        page.keys(Keys.TAB)
        name, visible = page.driver.execute_script(FOCUS)
        assert visible, name
        assert len(stops) < 20, stops
        stops.append(name)
    assert stops.index("prompt") < stops.index("max_tokens") < stops.index("seed") < stops.index("generate")
    page.keys(Keys.ENTER)
    page.finished()
    assert page.js("document.activeElement.id") == "generate"
    page.until("document.querySelector('.play').title === 'Play'", "the canvas to be full")

    while not page.js("document.activeElement.classList.contains('token')"):
        page.keys(Keys.TAB)
        name, visible = page.driver.execute_script(FOCUS)
        assert visible, name
        assert name != "BODY"
    page.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert "position" in page.text("token")
    page.keys(Keys.HOME)
    assert page.text("token") == "BOS · position 0 · given"
    page.keys(",")
    assert page.masked() == 1
    page.keys(".")
    assert page.masked() == 0
    page.keys(Keys.SPACE)
    page.until("document.querySelector('.play').title === 'Pause'", "the replay")
    page.keys(Keys.SPACE)
    assert page.js("document.querySelector('.play').title") == "Play"

    while page.js("document.activeElement.type") != "range":
        page.keys(Keys.TAB)
    page.keys(Keys.HOME)
    assert page.masked() == BLANKS
    page.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    assert page.masked() == BLANKS - 1
    page.keys(Keys.END)
    assert page.masked() == 0

    for _ in range(30):
        page.keys(Keys.TAB)
        if page.js("document.activeElement === document.body"):
            break
    else:
        raise AssertionError("the focus never leaves the page")
    page.fill("max_tokens", "1000")
    page.keys(Keys.TAB, Keys.TAB)
    slow_down(monkeypatch)
    page.chord(Keys.CONTROL, Keys.ENTER)
    page.until("document.getElementById('runs').ariaBusy === 'true'", "the run to begin")
    page.keys(Keys.ESCAPE)
    page.finished()


def test_reduced_motion_shows_results_without_moving(page, address):
    page.open(address, still=True, prompt=PROMPT, compare=1)
    page.generate()
    assert page.js("document.querySelector('.play').title") == "Play"
    assert page.masked(0) == page.masked(1) == 0
    page.scrub(2)
    moves = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).animationName !== 'none').length"
    assert page.js("document.querySelectorAll('.fresh').length") > 0
    assert page.js(moves) == 0


CONTRAST = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const [r, g, b, a = 1] = channels(getComputedStyle(at).backgroundColor);
    if (a > 0.99) return [r, g, b];
  }
  return [255, 255, 255];
};
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const element = walk.currentNode.parentElement;
  const style = getComputedStyle(element);
  if (!walk.currentNode.data.trim() || element.closest("[aria-disabled=true], .masked, .skip")) continue;
  if (!element.checkVisibility({ visibilityProperty: true })) continue;
  const [light, dark] = [luminance(channels(style.color)), luminance(ground(element))].sort((a, b) => b - a);
  const ratio = (light + 0.05) / (dark + 0.05);
  if (ratio < 4.5) found.push(`${walk.currentNode.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return found;
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read_on_its_ground(page, address, dark):
    page.open(address, dark=dark, prompt=PROMPT, compare=1)
    page.fill("a-temperature", "-1")
    page.click("#generate")
    assert page.driver.execute_script(CONTRAST) == []
    page.fill("a-temperature", "1")
    page.generate()
    page.scrub(BLANKS)
    for number in (1, 2, 3):
        page.click(f"#colours label:nth-of-type({number})")
        assert page.driver.execute_script(CONTRAST) == []
    page.shot(f"wide-{'dark' if dark else 'light'}")
