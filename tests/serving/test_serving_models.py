"""Several models behind one address, and prompts that were read before."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import dcdm
from dcdm.cli import main
from dcdm.config import ConfigError
from dcdm.serving.app import create_app_for
from dcdm.serving.served import ServedModel
from dcdm.serving.settings import Settings
from live import Live, live, tiny_model

BODY = {"prompt": "a", "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def server():
    made = {"causal": tiny_model("causal"), "org/ar": tiny_model("ar")}
    running = Live(create_app_for([ServedModel(*pair, name, Settings()) for name, pair in made.items()]))
    yield running
    running.stop()


def test_each_model_answers_by_its_name_and_the_first_without_one(server):
    with ThreadPoolExecutor(8) as pool:
        asked = [{**BODY, "model": name} for name in ("causal", "org/ar")] * 4 + [BODY]
        answers = [answer.json() for answer in pool.map(lambda body: server.post("/v1/completions", body), asked)]
    right = {}
    for name, entry in server.app.state.models.schedulers.items():
        served = entry.served
        right[name] = dcdm.generate(
            served.model, ["a"], tokenizer=served.tokenizer, max_new_tokens=12, seed=3
        ).texts[0]
    assert len(set(right.values())) == 2
    for body, answer in zip(asked, answers, strict=True):
        name = body.get("model", "causal")
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == right[name]
    denoised = server.post("/v1/denoise", {**BODY, "model": "org/ar"}).text
    assert '"kind":"ar"' in denoised


def test_the_list_names_all_and_another_name_is_a_404_that_does_too(server):
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["causal", "org/ar"]
    for path in ("/v1/models/org/ar", "/v1/models/org%2Far"):
        assert server.get(path).json()["dcdm"]["kind"] == "ar"
    for path in ("/v1/completions", "/v1/denoise"):
        answer = server.post(path, {**BODY, "model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert "'causal', 'org/ar'" in answer.json()["error"]["message"]
    assert server.figure('dcdm_new_tokens_total{model="org/ar"}') > 0


def test_two_models_of_one_name_and_models_without_one_are_refused(capsys):
    for words in (
        ["one", "two", "--name", "a"], ["one", "two", "--name", "a,a"], ["x/one", "y/one"], ["one", "--name", ""],
        ["one", "two", "--name", "a,"],
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["serve", *words])
        assert re.search("a name of its own|1 names to 2", capsys.readouterr().err)
    for names in (["a", "a"], [""]):
        with pytest.raises(ConfigError, match="a name of its own"):
            create_app_for([ServedModel(*tiny_model(), name, Settings()) for name in names])


@pytest.mark.parametrize("kind", ["ar", "causal"])
def test_a_prompt_that_was_read_before_is_not_read_again_and_gives_the_same_text(kind):
    body = {**BODY, "prompt": "You are a helpful assistant. Say:", "stop_at_eos": False}
    with live(model=tiny_model(kind, context_length=128)) as server:
        first, second, other = (server.post("/v1/completions", {**body, "seed": seed}).json() for seed in (3, 3, 4))
        assert first["choices"] == second["choices"] != other["choices"]
        taken = 32 if kind == "ar" else 34
        assert first["dcdm"] == second["dcdm"], "no answer tells what others sent before"
        assert (server.scheduler.prefixes.found, server.scheduler.prefixes.tokens) == (2 * taken, taken)
    with live(model=tiny_model(kind, context_length=128), prefix_tokens=0) as server:
        for _ in range(2):
            assert server.post("/v1/completions", {**body, "seed": 3}).json()["dcdm"] == first["dcdm"]
        assert server.scheduler.prefixes.found == 0


def test_no_figure_tells_a_caller_whether_a_prompt_was_sent_before():
    def counted(prompt):
        before = figures()
        server.post("/v1/completions", {**BODY, "prompt": prompt, "stop_at_eos": False})
        return {name: value - before.get(name, 0) for name, value in figures().items()}

    def figures():
        """By model, without times and what is counted after the answer."""
        pairs = (line.rsplit(" ", 1) for line in server.get("/metrics").text.splitlines() if 'model="' in line)
        return {name: float(value) for name, value in pairs if not re.search("seconds|created|batch", name)}

    with live(model=tiny_model("ar", context_length=128)) as server:
        counted("x" * 40)
        assert counted("x" * 40) == counted("y" * 40)
        assert server.scheduler.prefixes.found == 32


def test_an_imported_diffusion_model_is_served_as_it_samples_and_shares_whole_blocks_of_prompts():
    habits = {"prompts": "ordinary", "shift": True, "hidden_token": ord("b"), "family": "fast-dllm-v2"}
    pair = tiny_model("bdlm", block_size=4, context_length=96, **habits)
    with live(model=pair) as server:
        (card,) = server.get("/v1/models").json()["data"]
        dials = {dial["name"]: dial["means"] for dial in card["dcdm"]["settings"]}
        assert (dials["commit"], dials["routing"]) == ("threshold:0.9", "sub-blocks:8")
        prompt = "one prompt of more than thirty-two letters, "
        for words in ("here", "there", "here"):
            body = {"prompt": prompt + words, "max_tokens": 12, "seed": 3, "stop_at_eos": False}
            answer = server.post("/v1/completions", body).json()
            options = {"tokenizer": pair[1], "max_new_tokens": 12, "seed": 3, "eos_id": -1}
            assert answer["choices"][0]["text"] == dcdm.generate(pair[0], [prompt + words], **options).texts[0]
        assert server.scheduler.prefixes.found == 2 * 32
        assert '"kind":"bdlm"' in server.post("/v1/denoise", {"prompt": "a [[4]] c", "max_tokens": 0}).text
