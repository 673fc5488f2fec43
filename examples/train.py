"""Train: python examples/train.py [RUN_FOLDER]. The same command again resumes, or finds the run finished."""

import sys
from pathlib import Path

import dcdm


def train(folder: Path) -> None:
    settings = {  # `dcdm train --show-settings` lists all of them
        "train.batch_size": 4,
        "objective.full_mask_share": 1.0,  # every chunk fully masked
        "model.prior": "strided",
        "model.prior_weight": float("inf"),
    }
    # data: or files, patterns, a hub data set
    dcdm.train("dcdm-debug-causal", folder, data="stdlib", steps=20, settings=settings)


def given_or_trained() -> Path:
    """The model named on the command line, or a small one, for the other examples."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    train(Path("runs/example"))
    return Path("runs/example")


if __name__ == "__main__":
    train(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/example"))
