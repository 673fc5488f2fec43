import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # some virtual machines announce AMX and die of it
os.environ["DCDM_CACHE"] = tempfile.mkdtemp(prefix="dcdm-cache-")  # what a user keeps does not serve tests

import pytest
import torch
from hypothesis import settings

from dcdm.cli import main

torch.set_num_threads(1)
for profile, examples in (("repeatable", 30), ("thorough", 120)):
    settings.register_profile(profile, derandomize=True, deadline=None, max_examples=examples, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def one_thread():
    """Commands may have set another number in this process; two are far slower where both cores are busy."""
    torch.set_num_threads(1)


@pytest.fixture
def refused(capsys):
    """Runs a command that must end with code 2; what it said on standard error."""

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main([*words])
        assert left.value.code == 2
        return capsys.readouterr().err

    return run
