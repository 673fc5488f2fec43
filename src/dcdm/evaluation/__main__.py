"""The lm-evaluation-harness's own command line, with the model `dcdm` known to it.

    python -m dcdm.evaluation --model dcdm --model_args pretrained=RUN --tasks hellaswag

The harness looks for no entry points of installed packages, so its plain `lm_eval` command cannot know the model.
"""

from __future__ import annotations

from dcdm.config import ConfigError

if __name__ == "__main__":
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        raise SystemExit("the lm-evaluation-harness is missing; pip install -e '.[eval]'") from error
    import dcdm.evaluation.harness  # noqa: F401 (registers the model)

    try:
        cli_evaluate()
    except ConfigError as error:
        raise SystemExit(f"dcdm: {error}") from None
