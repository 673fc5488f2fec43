import dcdm.progress
from dcdm.progress import ConsoleProgress, Reporter


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(dcdm.progress, "PLAIN_EVERY", 0.0)
    with ConsoleProgress() as progress:
        progress.say("a [bold] sentence")
        progress.progress("tokenising", 2_500_000, 10_000_000, "bytes", "1.20M tokens/s")
        progress.progress("scoring [wiki]", 3, 1_200, "windows")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "a [bold] sentence",
        "tokenising: 2.5 of 10.0 MB, 1.20M tokens/s",
        "scoring [wiki]: 3 of 1,200 windows",
    ]


def test_short_work_gives_one_line_at_its_end(capsys):
    with ConsoleProgress() as progress:
        for done in range(1000):
            progress.progress("scoring", done + 1, 1000, "windows")
    assert capsys.readouterr().err == "scoring: 1,000 of 1,000 windows\n"


def test_on_a_terminal_the_bar_names_task_count_and_note(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with ConsoleProgress() as progress:
        progress.progress("tokenising", 500_000, 1_000_000, "bytes", "fast")
        progress.progress("scoring", 1, 2, "windows")
    shown = capsys.readouterr().err
    assert "scoring" in shown
    assert "1 of 2 windows" in shown


def test_what_is_not_shown_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(dcdm.progress, "PLAIN_EVERY", 0.0)
    reporter: Reporter = ConsoleProgress(shown=False)
    reporter.say("nothing")
    reporter.progress("tokenising", 1, 2, "bytes")
    assert capsys.readouterr() == ("", "")
