"""`DecodingConfig` is the only list of decoder settings: whatever takes or shows them is made from its fields."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

import tiny
from dcdm.cli import COMMANDS
from dcdm.config import ConfigError
from dcdm.data.tokenizers import byte_tokenizer
from dcdm.decoding.config import DecodingConfig, settings
from test_docs_names import flags_of

NAMES = [one.name for one in fields(DecodingConfig) if not one.metadata.get("derived")]


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_a_docstring_and_reaches_flags_schema_harness_and_page(name):
    from dcdm.evaluation.harness import HarnessModel
    from dcdm.serving.app import create_app

    setting = next(one for one in settings() if one.name == name)
    assert setting.about.endswith(".")
    for command in ("sample", "chat"):
        flags = flags_of(COMMANDS[command].run)
        assert "--set" in flags if setting.rare else f"--{name.replace('_', '-')}" in flags
    model, tokenizer = tiny.model("bdlm", 257), byte_tokenizer()
    app = create_app(model, tokenizer)
    bodies = app.openapi()["components"]["schemas"]
    for body in ("CompletionRequest", "ChatRequest", "DenoiseRequest"):
        assert bodies[body]["properties"][name]["description"] == setting.about
    shown = {one["name"]: one for one in json.loads(json.dumps(app.state.served.dials()))}
    if name in ("lanes", "drafts"):
        assert name not in shown, "it does not fit a BDLM"
        with pytest.raises(ConfigError, match=name):
            HarnessModel((model, tokenizer), samples=4, **{name: 2})
    else:
        assert shown[name]["about"] == setting.about
        HarnessModel((model, tokenizer), samples=4, **{name: setting.default})


def test_keywords_may_be_written_as_people_write_them():
    from dcdm.decoding.commits import Sampling

    one = DecodingConfig.of(delimiters=[".", "\n"], sampling=Sampling(0.5, top_k=3))
    assert (one.delimiters, one.temperature, one.top_k) == ((".", "\n"), 0.5, 3)
    with pytest.raises(ConfigError, match="temprature"):
        DecodingConfig.of(temprature=1)
