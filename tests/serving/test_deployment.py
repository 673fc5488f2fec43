"""What ships beside the package for operators: the Dockerfile, judged without Docker, and the dashboard."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from dcdm.commands.serve import serve
from dcdm.serving.monitoring import Metrics, ModelMetrics

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^\s*{name} (.+)$", DOCKERFILE, re.MULTILINE)


def test_all_that_is_copied_is_there_and_nothing_else_is_sent_to_the_builder():
    copied = [source for line in instructions("COPY") for source in line.split()[:-1]]
    ignore = (ROOT / ".dockerignore").read_text().split()
    assert all((ROOT / source).exists() for source in copied)
    assert ignore[0] == "*"
    assert sorted(line[1:] for line in ignore if line.startswith("!")) == sorted(copied)


def test_the_server_is_started_with_flags_that_it_has_as_a_user_without_rights():
    (entry,) = instructions("ENTRYPOINT")
    program, verb, model, *flags = json.loads(entry)
    assert (program, verb, model) == ("dcdm", "serve", "/model")
    options = inspect.signature(serve).parameters
    assert all(flag.removeprefix("--").replace("-", "_") in options for flag in flags[::2])
    assert instructions("USER") == ["dcdm"]
    port = dict(zip(flags[::2], flags[1::2], strict=True))["--port"]
    assert instructions("EXPOSE") == [port]
    health = json.loads(re.search(r"CMD (\[.*\])", instructions("HEALTHCHECK")[0])[1])
    assert f":{port}/healthz" in health[-1]
    compile(health[-1], "health check", "exec")


def test_every_figure_of_the_dashboard_exists_and_every_figure_of_the_server_is_shown():
    metrics = Metrics()
    ModelMetrics(metrics, "m").ended("stop")
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.seconds.labels("/v1/completions").observe(1)
    told = set(re.findall(r"^(dcdm_\w+?|process_\w+)(?:\{.*\})? ", metrics.text().decode(), re.MULTILINE))
    board = json.loads((ROOT / "examples" / "monitoring" / "grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"]
             for name in re.findall(r"\b(?:dcdm|process)_\w+", target["expr"])}  # fmt: skip
    assert asked <= told
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in told if name.startswith("dcdm")}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert families - shown == {"dcdm_forwards"}, "tokens per second say it better"
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
