"""The lm-evaluation-harness's own command line, with the model `dcdm` known to it.

    python -m dcdm.evaluation --model dcdm --model_args pretrained=RUN --tasks hellaswag

The harness has no hook by which an installed package could add a model to its `lm_eval` command.
"""

from __future__ import annotations

from dcdm.config import ConfigError

if __name__ == "__main__":
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise SystemExit("the lm-evaluation-harness is missing; pip install 'dcdm[eval]'") from error
    import dcdm.evaluation.registering  # noqa: F401

    try:
        cli_evaluate()
    except ConfigError as error:
        raise SystemExit(f"dcdm: {error}") from None
