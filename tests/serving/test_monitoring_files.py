"""The dashboard asks for figures that the server has, and the picture of the schedules shows what it says."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from dcdm.serving.monitoring import Metrics, ModelMetrics
from dcdm.viewing.schedules import ROWS, TEXTS, by_batches, by_steps, draw_schedules

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"


def test_every_figure_of_the_dashboard_exists_and_every_figure_of_the_server_is_shown():
    metrics = Metrics()
    ModelMetrics(metrics, "m").ended("stop")
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.seconds.labels("/v1/completions").observe(1)
    told = set(re.findall(r"^(dcdm_\w+?|process_\w+)(?:\{.*\})? ", metrics.text().decode(), re.MULTILINE))
    board = json.loads((FOLDER / "grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"]
             for name in re.findall(r"\b(?:dcdm|process)_\w+", target["expr"])}  # fmt: skip
    assert asked <= told
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in told if name.startswith("dcdm")}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert families - shown == {"dcdm_forwards"}, "tokens per second say it better"
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("schedule", [by_batches, by_steps])
def test_the_picture_s_texts_neither_overlap_nor_begin_before_they_arrive(schedule, tmp_path):
    spans = schedule()
    assert [(span.arrives, span.ends - span.begins) for span in spans] == list(TEXTS)
    assert all(span.begins >= span.arrives for span in spans)
    for row in range(ROWS):
        own = sorted((span.begins, span.ends) for span in spans if span.row == row)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    assert Path(draw_schedules(str(tmp_path / "x.png"))).stat().st_size > 5000
