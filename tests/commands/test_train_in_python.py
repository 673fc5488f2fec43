"""`dcdm.train`, as scripts, threads and notebooks call it."""

import signal
import threading

import pytest

import dcdm

SMALL = {
    "model.num_layers": 2, "model.hidden_size": 32, "model.context_length": 32, "train.batch_size": 4,
    "evaluate_sequences": 4, "evaluate_samples": 2, "tensorboard": False,
}  # fmt: skip


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("DCDM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"def f{n}(x):\n    return x + {n * n}\n\n" for n in range(200)))
    return path


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_run_from_python_is_loaded_by_its_folder(kind, corpus, tmp_path):
    run = dcdm.train("mdlm-debug", kind(tmp_path / "run"), data=kind(corpus), steps=2, settings=SMALL)
    assert run == tmp_path / "run"
    model, _ = dcdm.load(run)
    assert model.config.num_layers == 2
    tuned = dcdm.train(
        "mdlm-debug", kind(tmp_path / "tuned"), data=[kind(corpus)], steps=1, init=kind(run), settings=SMALL
    )
    assert (tuned / "checkpoints").is_dir()
    assert dcdm.train(run=kind(run)) == run, "a finished run is found finished"


def test_training_in_a_thread_leaves_signals_alone(corpus, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            dcdm.train("mdlm-debug", tmp_path / "run", data=corpus, steps=2, settings=SMALL)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_generations_and_chunk_views_show_themselves_in_a_notebook(corpus, tmp_path):
    from dcdm.viewing.chunks import view, window_of

    model, tokenizer = dcdm.load(dcdm.train("dcdm-debug", tmp_path / "run", data=corpus, steps=1, settings=SMALL))
    result = dcdm.generate(model, ["<b>[[4]]"], tokenizer=tokenizer, commit="chunk")
    shown = result._repr_html_()
    assert "&lt;" in shown
    assert "<b>[" not in shown
    assert shown.count('<b title="forward ') == 4
    assert "4 tokens in" in shown
    assert "3 </span>" in dcdm.generate(model, [[1, 2, 3]], max_new_tokens=2)._repr_html_(), "ids as numbers"
    window, _ = window_of("if x < 1: <script>", tokenizer, 32)
    drawn = view(model, window)._repr_html_()
    assert "<script>" not in drawn
    assert 'title="chunk ' in drawn
    assert drawn.count("<span") == 19
