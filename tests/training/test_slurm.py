"""The job scripts: what they start, and when they queue themselves again. Slurm's commands are played."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from dcdm.commands.train import train
from test_docs_names import flags_of

SLURM = Path(__file__).parents[2] / "examples" / "slurm"
SRUN = '#!/bin/bash\necho "$@" >> "$TOLD"\nshift\nRANKS=yes SLURM_PROCID=3 SLURM_LOCALID=1 "$@"\nexit $CODE\n'
SCONTROL = '#!/bin/bash\n[ "$1" = show ] && echo first || echo "$@" >> "$TOLD"\n'
PYTHON = '#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $@" >> "$TOLD"\n'


@pytest.mark.parametrize("script", ["8-gpus.sbatch", "64-gpus.sbatch"])
@pytest.mark.parametrize(("code", "queued"), [(0, False), (1, False), (2, False), (130, True), (137, True)])
def test_a_job_starts_ranks_and_is_queued_again_only_if_it_was_stopped_or_killed(script, code, queued, tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    told = tmp_path / "told"
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(told), "CODE": str(code),
        "SLURM_JOB_NODELIST": "node[1-8]", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "64",
        "SLURM_SUBMIT_DIR": str(SLURM),
    }  # fmt: skip
    ended = subprocess.run(["bash", SLURM / script], env=given, timeout=20, check=False)
    assert ended.returncode == code
    _, rank, *requeued = told.read_text().splitlines()
    assert rank.startswith("3 1 64 first -m dcdm train --preset dcdm-")
    assert {word for word in shlex.split(rank) if word.startswith("--")} - {"--run-folder"} <= flags_of(train)
    assert requeued == (["requeue 77"] if queued else [])
