"""Names that are neither here nor, for want of a network, anywhere else."""

import socket
import time

import pytest

from dcdm.config import DataError
from dcdm.data import network
from dcdm.data.settings import DataConfig
from dcdm.data.sources import resolve
from dcdm.data.tokenizers import load_tokenizer


@pytest.fixture
def no_network(monkeypatch):
    """Every name of a host is unknown."""

    def unknown(*_args, **_named):
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    network.hub_answers.cache_clear()
    yield
    network.hub_answers.cache_clear()
    assert waited == [], "a library tried again"


def test_a_misspelt_source_fails_at_once_with_what_may_be_meant(no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    with pytest.raises(DataError, match="cannot be reached; did you mean stdlib"):
        resolve("stdlb", DataConfig())
    with pytest.raises(DataError, match="did you mean corpora"):
        resolve("corpra", DataConfig())


def test_a_misspelt_tokenizer_fails_at_once(no_network):
    with pytest.raises(DataError, match="the hub cannot be reached"):
        load_tokenizer("byts")


def test_the_libraries_ask_the_hub_again_afterwards(no_network):
    import huggingface_hub.constants

    before = huggingface_hub.constants.HF_HUB_OFFLINE
    with network.quick_hub() as answers:
        assert not answers
        assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert before == huggingface_hub.constants.HF_HUB_OFFLINE
