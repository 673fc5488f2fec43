"""The dashboard asks for figures that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dcdm.serving.monitoring import Metrics, ModelMetrics

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
