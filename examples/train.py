"""Train: python examples/train.py [RUN_FOLDER]. The same command again resumes, or finds the run finished."""

import sys
from pathlib import Path

from dcdm.training.run import run_training


def train(folder: Path) -> None:
    changes = {
        "data.sources": ("stdlib",),  # or files, patterns, a hub data set
        "train.steps": 20,
        "train.batch_size": 4,
        "objective.full_mask_share": 1.0,  # every chunk fully masked
        "model.prior": "strided",
        "model.prior_weight": float("inf"),
    }
    if code := run_training("dcdm-debug-causal", folder, changes=changes):
        sys.exit(code)


def given_or_trained() -> Path:
    """The model named on the command line, or a small one, for the other examples."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    train(Path("runs/example"))
    return Path("runs/example")


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/example"))
