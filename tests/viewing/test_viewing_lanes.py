"""Lanes as people see them: live in a terminal, and as a replay."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

import dcdm
import tiny
from browser import CHROMIUM, Page, artefacts, chromium
from dcdm.cli import main
from dcdm.commands.sample import _Stream
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.viewing.chunks import view, window_of
from dcdm.viewing.pages import chunks_page


def model():
    return tiny.model("mdlm", 257, kind="lanes", lanes=(1, 2, 4))


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


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_page_of_many_chunks_fits_a_phone_in_the_dark(tmp_path):
    window, _ = window_of("def f(x):\n    return x\n" + "y" * 80, byte_tokenizer(), 128)
    many_scores = view(tiny.model("paper", 257, num_chunks=12), window)
    (tmp_path / "chunks-of-paper.html").write_text(chunks_page(many_scores), encoding="utf-8")
    with chromium(tmp_path / "profile") as driver:
        opened = Page(driver, artefacts(tmp_path / "pictures"))
        opened.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        opened.size(390, 844)
        driver.get((tmp_path / "chunks-of-paper.html").as_uri())
        assert opened.overflow() == 0
        opened.shot("chunks-of-paper-390-dark")
        assert opened.complaints() == []


# --- the commands ------------------------------------------------------------------------------------------------


def test_the_commands_show_lanes(tmp_path, capsys, monkeypatch):
    folder = tiny.exported("mdlm", tmp_path / "model", kind="lanes", lanes=(1, 2, 4))
    sample = ["sample", str(folder), "--prompt", "ab", "--length", "8", "--lanes", "2"]
    main([*sample, "--stream", "--set", "stop_at_eos=false"])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [event["lanes"] for event in told] == [[1, 2]] * 4
    other = tiny.exported("causal", tmp_path / "other")
    main(["sample", str(other), "--prompt", "a[[3]]", "--stream"])
    assert "lanes" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit):
        main(["chunks", str(folder), "x = 1"])
    assert "a model of kind lanes writes from left to right and has no chunks" in capsys.readouterr().err


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
