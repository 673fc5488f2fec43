"""Lanes as people see them: in a terminal, colours on a page, a picture and a replay."""

import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

import dcdm
import tiny
from browser import CHROMIUM, Page, artefacts, chromium, dumped
from dcdm.cli import main
from dcdm.commands.sample import _Stream
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.lanes.likelihood import forwards_along
from dcdm.lanes.masks import lane_partition
from dcdm.viewing.chunks import TokenWindows, view, window_of
from dcdm.viewing.filling import Filling, filling_of
from dcdm.viewing.pages import chunks_page, replay_page
from dcdm.viewing.terminal import coloured_text, numbered_lines

TEXT = "if x:\n    y = 1\n"  # 16 bytes


def model():
    return tiny.model("mdlm", 257, kind="lanes", lanes=(1, 2, 4))


def seen(lanes=3, **more):
    window, _ = window_of(TEXT, byte_tokenizer(), 128)
    return view(model(), window, lanes=lanes, name="m", **more)


# --- the view ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3, 4, 40])
def test_a_view_has_the_decoders_lanes_and_each_forward_writes_one_token_of_each(lanes):
    found, network = seen(lanes), model()
    window, _ = window_of(TEXT, byte_tokenizer(), 128)
    positions = network.position_masks(window.tokens[None])
    ids, lane = lane_partition(network.config, positions.free, positions.real, lanes)
    assert found.lanes == lane[0].tolist()
    assert found.num_lanes == min(lanes, 16)
    assert found.frames[-1].ids == ids[0].tolist()
    drawn = dcdm.generate(network, [[]], max_new_tokens=16, lanes=lanes).history
    assert len(found.frames) == len(drawn)
    for number, event in enumerate(drawn, start=1):
        frame = seen(lanes, round=number)
        assert [at for at, head in enumerate(frame.heads) if head] == event.positions
        assert [frame.lanes[at] for at in event.positions] == event.lanes
        assert [not hidden for hidden in frame.hidden] == [chunk <= number for chunk in ids[0].tolist()]
        assert sum(frame.sizes) == sum(len(each.positions) for each in drawn[:number])


def test_the_default_number_is_the_models_and_others_have_none():
    assert seen(None).num_lanes == 4
    window, _ = window_of(TEXT, byte_tokenizer(), 128)
    with pytest.raises(ConfigError, match="lanes=2 does not fit a model of kind bdlm"):
        view(tiny.model("bdlm", 257), window, lanes=2)
    with pytest.raises(ConfigError, match="lanes=0 must be at least 1"):
        seen(0)


def test_kinds_are_counted_by_lane_over_the_text_or_a_corpus():
    window, _ = window_of(TEXT, byte_tokenizer(), 128)
    ((one,),) = seen(3).held.frames
    assert [sum(row) for row in one.kinds] == [6, 5, 5]
    tokens = window.tokens[None].repeat(3, 1)
    index = tokens[:, 0] * 0
    corpus = TokenWindows("rows", tokens, tokens < 0, index, [window.pieces] * 3)
    ((many,),) = view(model(), window, lanes=3, corpus=corpus).held.frames
    assert many.kinds == [[3 * count for count in row] for row in one.kinds]


def test_with_drafts_a_forward_writes_as_far_as_drafts_are_accepted():
    network = tiny.model("mdlm", 257, kind="lanes", lanes=(1, 2, 4), drafts=3)
    window, _ = window_of(TEXT, byte_tokenizer(), 128)
    found = view(network, window, lanes=2, drafts=3, name="m")
    came = forwards_along(network, window.tokens[None], lanes=2, drafts=3)[0].tolist()
    assert found.frames[-1].ids == came
    assert found.num_chunks == max(came) < 8
    assert "as far as its draft tokens are accepted" in found.rule
    with pytest.raises(ConfigError, match="draft head"):
        seen(drafts=2)


# --- the terminal ------------------------------------------------------------------------------------------------


def test_without_colour_the_lane_and_the_forward_pass_stand_below_each_token():
    assert list(numbered_lines(seen(round=2), 80))[5:] == [
        "text       y = 1↵",
        "lane   2222233333",
        "pass   1234512345",
        "mask     ###  ###",
        "",
    ]


@pytest.mark.parametrize("lanes", [1, 3])
def test_in_colour_a_background_is_a_lane_or_of_a_single_lane_a_forward_pass(lanes):
    found = seen(lanes, round=2)
    styles = [str(span.style) for span in coloured_text(found).spans]
    assert sum("reverse" in style for style in styles) == sum(found.heads) == lanes
    assert sum("underline" in style for style in styles) == sum(found.hidden) == 16 - 2 * lanes
    assert len({style.split()[-1] for style in styles if " on " in style}) == 1 + max(2, lanes)
    html = seen(round=2)._repr_html_()  # in a notebook
    assert html.count('title="lane 2"') == 5
    assert "outlined: not written yet" in html


def test_a_live_stream_colours_lanes_and_marks_their_heads(monkeypatch):
    network, tokenizer = model(), byte_tokenizer()
    with _Stream(tokenizer, ["ab"], True, True) as stream:
        shown = []

        class Live:
            def update(self, canvas, refresh):
                shown.append(canvas)

            def stop(self):
                pass

        stream.live = Live()
        done = dcdm.generate(
            network, ["ab"], tokenizer=tokenizer, max_new_tokens=6, lanes=2, eos_id=-1, on_event=stream.show
        )
    assert len(shown) == len(done.history) == 3
    assert [sum("reverse" in str(span.style) for span in canvas.spans) for canvas in shown] == [2, 2, 2]
    assert shown[0].plain.count("░") == 2  # between the two heads
    grounds = {str(span.style).split()[-1] for span in shown[-1].spans if "on" in str(span.style)}
    assert len(grounds) == 2


# --- the page ----------------------------------------------------------------------------------------------------

ASK = """
<pre id="answers"></pre><script>
const answers = [];
frames.forEach((_, number) => {
  byId("slider").value = number;
  byId("slider").dispatchEvent(new Event("input"));
  const places = [...document.querySelectorAll("#tokens .token")];
  answers.push({
    lanes: places.map((place) => Number([...place.classList].find((name) => /^chunk-/.test(name)).slice(6))),
    numbers: places.map((place) => place.dataset.chunk),
    heads: places.map((place) => place.classList.contains("lane-head")),
    masked: places.map((place) => place.classList.contains("masked")),
    sizes: [...document.querySelectorAll(".size")].map((row) => row.getAttribute("aria-label")),
    said: ["title", "subtitle", "slider-name", "token-name"].map((name) => byId(name).textContent),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
});
byId("answers").textContent = JSON.stringify(answers);
</script></body>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_browser_shows_lanes_in_colour_with_their_heads(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(chunks_page(seen()).replace("</body>", ASK), encoding="utf-8")
    told = re.search(r'<pre id="answers">(.*?)</pre>', dumped(page, tmp_path / "profile"), re.DOTALL)
    assert told
    answers = json.loads(told[1])
    assert len(answers) == 6
    for number, shown in enumerate(answers, start=1):
        found = seen(round=number)
        assert shown["lanes"] == found.lanes
        assert shown["heads"] == found.heads
        assert shown["masked"] == found.hidden
        assert shown["numbers"] == ["·" if chunk < 0 else str(chunk) for chunk in found.frame.ids]
        assert shown["sizes"] == [f"lane {lane}: {size} tokens" for lane, size in enumerate(found.sizes, start=1)]
        assert shown["said"][:3] == [
            "Lanes of m",
            "Lanes · 16 tokens and BOS · 3 lanes · 6 forward passes",
            "Forward",
        ]
        assert shown["wide"] == 0
    assert "in lane 1, written by forward pass 6" in answers[-1]["said"][3]


# --- pictures and replays ----------------------------------------------------------------------------------------


def filling(prompt="ab", new=9, lanes=3, **more) -> Filling:
    tokenizer = byte_tokenizer()
    done = dcdm.generate(model(), [prompt], tokenizer=tokenizer, max_new_tokens=new, lanes=lanes, eos_id=-1, **more)
    return filling_of(done, tokenizer)


def test_a_filling_knows_its_lanes_and_others_have_none():
    found = filling("a[[3]]b", 3)
    assert found.lanes == [0, 0, 1, 1, 2, 0, 2, 3, 3]
    done = dcdm.generate(tiny.model("bdlm", 257), ["a[[3]]"], tokenizer=byte_tokenizer())
    assert filling_of(done, byte_tokenizer()).lanes == []
    drafting = tiny.model("mdlm", 257, kind="lanes", lanes=(1, 2), drafts=3)
    done = dcdm.generate(drafting, ["ab"], tokenizer=byte_tokenizer(), max_new_tokens=12, lanes=1, eos_id=-1)
    alone = filling_of(done, byte_tokenizer())
    assert (alone.lanes, alone.groups) == ([], alone.came), "one lane with drafts: coloured by forward passes"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_pages_and_a_replay_of_lanes_fit_a_phone_in_the_dark(tmp_path):
    found = filling("def f(", 60, 4)
    (tmp_path / "replay.html").write_text(replay_page(found, "A text", "<b>four</b> lanes"), encoding="utf-8")
    window, _ = window_of("def f(x):\n    return x\n" + "y" * 80, byte_tokenizer(), 128)
    many_scores = view(tiny.model("paper", 257, num_chunks=12), window)
    (tmp_path / "chunks-of-paper.html").write_text(chunks_page(many_scores), encoding="utf-8")
    (tmp_path / "chunks-of-lanes.html").write_text(chunks_page(seen()), encoding="utf-8")
    with chromium(tmp_path / "profile") as driver:
        page = Page(driver, artefacts(tmp_path / "pictures"))
        page.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.size(390, 844)
        for name in ("chunks-of-lanes", "chunks-of-paper"):
            driver.get((tmp_path / f"{name}.html").as_uri())
            assert page.overflow() == 0
            page.shot(f"{name}-390-dark")
        driver.get((tmp_path / "replay.html").as_uri())
        assert page.overflow() == 0
        driver.execute_script(
            "const s = document.querySelector('[type=range]'); s.value = 5; s.dispatchEvent(new Event('input'))"
        )
        page.shot("replay-of-lanes-390-dark")
        heads = page.js(
            "[...document.querySelectorAll('.token')].map((cell) => cell.classList.contains('lane-head'))"
        )
        assert [at for at, head in enumerate(heads) if head] == found.steps[4]
        colours = page.js(
            "[...document.querySelectorAll('.token')].map((c) => [...c.classList].find((n) => /^chunk/.test(n)))"
        )
        assert colours == [f"chunk-{lane}" for lane in found.lanes]
        assert page.complaints() == []


# --- the commands ------------------------------------------------------------------------------------------------


def test_the_commands_show_lanes_and_write_pictures_and_replays(tmp_path, capsys, monkeypatch):
    folder = tiny.exported("mdlm", tmp_path / "model", kind="lanes", lanes=(1, 2, 4))
    main(["chunks", str(folder), "x = 1", "--lanes", "2", "--round", "1"])
    assert "2 lanes, 5 tokens and BOS, forward 1 of 3" in capsys.readouterr().out
    page, sample = tmp_path / "deep" / "replay.html", ["sample", str(folder), "--prompt", "ab", "--length", "8"]
    sample += ["--lanes", "2"]
    main([*sample, "--picture", str(page)])
    assert '"lanes":[0,0,0,1' in page.read_text(encoding="utf-8")
    main([*sample, "--stream", "--set", "stop_at_eos=false"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [event["lanes"] for event in told] == [[1, 2]] * 4
    other = tiny.exported("causal", tmp_path / "other")
    main(["sample", str(other), "--prompt", "a[[3]]", "--stream", "--picture", str(page)])
    assert "lanes" not in capsys.readouterr().out
    assert "other: 3 tokens in" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit):
        main(["chunks", str(other), "x = 1", "--lanes", "2"])
    assert "lanes=2 does not fit a model of kind dcdm" in capsys.readouterr().err


def test_a_live_stream_ends_with_the_text_without_what_stood_behind_its_end():
    tokenizer, shown = byte_tokenizer(), []
    stream = _Stream(tokenizer, ["a"], True, True)
    stream.live = SimpleNamespace(update=lambda canvas, refresh: shown.append(canvas.plain), stop=lambda: None)
    first, eos = (tokenizer.encode(text)[0] for text in ("b", "c"))
    event = SimpleNamespace(row=0, positions=[2, 3, 4], tokens=[first, eos, first], lanes=[1, 1, 2], chunk=1)
    stream.show(event)
    assert shown[-1] == "abcb"
    stream.end([tokenizer.bos_id, tokenizer.encode("a")[0], first, eos, tokenizer.pad_id])
    assert shown[-1] == "abc"
