"""What chunks hold: routers that one variable decides have all of their bits there, and a random one none."""

import pytest
import torch

from dcdm.viewing.contents import LEAST, contents

WINDOWS, LENGTH, CHUNKS, TYPES = 40, 65, 4, 30
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(TYPES, (WINDOWS, LENGTH), generator=GENERATOR).square() % TYPES  # some far more often
POSITION = torch.arange(LENGTH).expand(WINDOWS, -1)
ROUTERS = {
    "position": POSITION % CHUNKS,
    "token": TOKENS % CHUNKS,
    "left": TOKENS.roll(1, dims=1) % CHUNKS,  # context: the token before
    "window": torch.arange(WINDOWS)[:, None].expand(-1, LENGTH) % CHUNKS,
    "random": torch.randint(CHUNKS, (WINDOWS, LENGTH), generator=GENERATOR),
}


def measured(ids, tokens=TOKENS):
    counted = POSITION > 0
    names = {token: f"t{token}" for token in range(TYPES)}
    return contents(ids + 1, tokens, tokens, counted, CHUNKS, names)


@pytest.mark.parametrize("name", ROUTERS)
def test_bits_go_to_what_decides_and_to_nothing_else(name):
    found = measured(ROUTERS[name])
    bits = {"position": found.position.bits, "token": found.token.bits, "window": found.window.bits}
    bits["left"] = found.left
    own = "left" if name == "random" else name
    assert found.bits == pytest.approx(2, abs=0.15)
    assert bits.pop(own) == pytest.approx(found.bits, rel=0.02)
    assert max(bits.values()) < 0.02
    assert found.neighbour.bits == pytest.approx(found.bits if name == "left" else 0, abs=0.02)
    assert found.token.counted > 0.005, "chance is there, and is taken out"
    assert (found.constant == 1) == (name == "token")
    if name == "random":
        assert found.constant == pytest.approx(found.constant_by_chance, abs=0.02)


def test_half_of_the_tokens_routed_by_themselves_explain_a_part():
    own = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    found = measured(torch.where(own, ROUTERS["token"], ROUTERS["random"]))
    assert 0.3 < found.token.bits < found.left
    assert found.position.bits < 0.02


def test_windows_that_go_whole_into_one_chunk_are_not_explained_by_their_tokens():
    """Else a text's own vocabulary would pass for a rule of the router."""
    found = measured(ROUTERS["window"], TOKENS // 2 + ROUTERS["window"] * (TYPES // 8))
    assert found.token.counted > 0.1
    assert found.token.bits == pytest.approx(0, abs=1e-6)


def test_typical_tokens_are_frequent_and_go_to_their_chunk():
    found = measured(ROUTERS["token"])
    for k, words in enumerate(found.words):
        assert all(int(word.text[1:]) % CHUNKS == k and word.share == 1 and word.count >= LEAST for word in words)
        counts = [word.count for word in words]
        assert counts == sorted(counts, reverse=True), "of tokens that are always here, the frequent ones first"
    assert sum(found.sizes) == found.tokens == WINDOWS * (LENGTH - 1)
