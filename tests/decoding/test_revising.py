"""Drafts of which the least sure tokens are written again."""

from __future__ import annotations

import math
import re

import pytest
import torch

import dcdm
import tiny
from dcdm.config import ConfigError
from dcdm.decoding.config import DecodingConfig, Revise
from dcdm.decoding.revision import Revision
from dcdm.decoding.session import session_of
from live import events, live
from walks import model_of

KINDS = ["mdlm", "bdlm", "causal", "strided", "paper"]
DRAFT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def revision(model, settings, **options):
    decoding = DecodingConfig.of(revise=settings, **options).resolve(model.config)
    return Revision([model.config.bos_id, *DRAFT], 0, decoding, 64, 31, seed=3)


def run(model, *texts):
    session = session_of(model)
    for text in texts:
        session.add(text)
    while session.running:
        session.step()


def literal(model, groups):
    """log p of each token of the draft with its group hidden: by the decoder that fills a chunk per forward."""
    tokens = torch.tensor([[model.config.bos_id, *DRAFT]])
    found = {}
    for group in range(groups):
        hidden = torch.zeros_like(tokens, dtype=torch.bool)
        hidden[:, 1 + group :: groups] = True
        # likelihoods know another way to the same figures: the trajectory of true tokens
        nats = dcdm.score(model, tokens, "trajectory", prompt=~hidden, index=torch.tensor([0])).by_position[0]
        found |= {int(at): -float(nats[at]) for at in hidden[0].nonzero()}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_probable_share_is_written_again_and_nothing_else(kind):
    model = model_of(kind)
    text = revision(model, Revise(share=0.3, groups=3))
    run(model, text)
    sure = literal(model, 3)
    assert set(sure) == set(range(1, 13))
    lowest = sorted(sure, key=sure.get)[: math.ceil(0.3 * 12)]
    gap = sure[sorted(sure, key=sure.get)[4]] - sure[lowest[-1]]
    assert gap > 1e-9, "no tie decides"
    written = [at for at, token in enumerate(text.context) if token == model.config.mask_id]
    assert sorted(written) == sorted(lowest)
    kept = [at for at in range(13) if at not in lowest]
    assert [text.tokens[at] for at in kept] == [[model.config.bos_id, *DRAFT][at] for at in kept]
    assert model.config.mask_id not in text.tokens
    assert text.costs["new_tokens"] == 4
    result = dcdm.generate(model, [DRAFT], revise=Revise(share=0.3, groups=3), seed=3)
    assert result.completions[0] == text.completion(model.config.mask_id)
    assert {at for event in result.history for at in event.positions} == set(lowest)


def test_below_a_threshold_and_over_several_rounds():
    model = model_of("mdlm")
    sure = literal(model, 4)
    middle = sorted(math.exp(value) for value in sure.values())[5]
    below = [at for at, value in sure.items() if math.exp(value) < middle]
    text = revision(model, Revise(threshold=middle))
    run(model, text)
    assert sorted(below) == [at for at, token in enumerate(text.context) if token == model.config.mask_id]
    nothing = revision(model, Revise(threshold=1e-30))
    run(model, nothing)
    assert nothing.tokens[1:] == DRAFT
    assert nothing.costs["new_tokens"] == 0
    thrice = revision(model, Revise(share=0.5, rounds=3, groups=40))
    run(model, thrice)
    assert thrice.costs["new_tokens"] == 18


@pytest.mark.parametrize("kind", KINDS)
def test_revisions_in_company_are_what_each_is_alone(kind):
    model = model_of(kind)
    settings = {"commit": "steps:2", "temperature": 0.8}
    texts = [revision(model, Revise(share=share), **settings) for share in (0.25, 0.5, 1.0)]
    run(model, *texts)
    for text, share in zip(texts, (0.25, 0.5, 1.0), strict=True):
        alone = dcdm.generate(model, [DRAFT], revise=share, seed=3, **settings)
        assert text.completion(model.config.mask_id) == alone.completions[0]


def test_kinds_that_see_nothing_behind_a_token_and_likelihoods_refuse_it_by_name():
    with pytest.raises(ConfigError, match="revise does not fit AR"):
        dcdm.generate(model_of("ar"), [DRAFT], revise=0.2)
    lanes = tiny.model("mdlm", kind="lanes", lanes=(1, 2))
    with pytest.raises(ConfigError, match="revise does not fit lanes"):
        dcdm.generate(lanes, [DRAFT], revise=0.2)
    with pytest.raises(ConfigError, match="revise writes tokens again"):
        dcdm.score(model_of("mdlm"), tiny.tokens(1, 6), "trajectory", revise=0.2)


@pytest.mark.parametrize(
    ("prompt", "more", "said"),
    [
        (DRAFT, {"max_new_tokens": 3}, "neither blanks nor max_new_tokens"),
        ([1, 22, 2], {}, "neither blanks nor max_new_tokens"),
        ([], {}, "at least 1 and at most 63"),
        (DRAFT * 6, {}, "at least 1 and at most 63"),
        (DRAFT, {"revise": Revise(share=0.1), "window": 2}, "at most 1"),
        (DRAFT, {"revise": 1.5}, "share=1.5 must lie"),
    ],
)
def test_drafts_that_cannot_be_revised_are_refused_by_name(prompt, more, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        dcdm.generate(model_of("mdlm"), [prompt], **{"revise": 0.2, **more})
    with pytest.raises(ConfigError, match="one of them"):
        Revise(share=0.1, threshold=0.1)


def test_the_server_revises_a_draft_and_streams_what_it_replaces():
    with live("mdlm") as server:
        body = {"prompt": "def main(self):", "seed": 4, "commit": "chunk", "revise": {"share": 0.2}}
        *_, (last, done) = found = events(server.post("/v1/denoise", body).text)
        served = server.app.state.served
        same = dcdm.generate(
            served.model, [body["prompt"]], tokenizer=served.tokenizer, seed=4, commit="chunk", revise=0.2
        )
        assert (last, done["text"]) == ("done", same.texts[0])
        assert done["costs"]["new_tokens"] == 3
        replaced = {at for name, event in found if name == "commit" for at in event["positions"]}
        assert len(replaced) == 3
        for wrong, said in (
            ({"revise": {"share": 0.2, "threshold": 0.1}}, "one of them"),
            ({"revise": {}}, "one of them"),
            ({"prompt": "a[[3]]"}, "neither blanks"),
            ({"max_tokens": 4}, "neither blanks nor max_new_tokens"),
            ({"response_format": {"type": "regex", "regex": "a"}}, "no format"),
        ):
            answer = server.post("/v1/denoise", {**body, **wrong})
            assert answer.status_code == 400, wrong
            assert said in answer.json()["error"]["message"]
