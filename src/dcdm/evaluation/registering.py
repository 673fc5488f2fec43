"""Makes the lm-evaluation-harness know the model `dcdm`; imported as soon as both packages are there."""

from __future__ import annotations

import lm_eval.models  # noqa: F401 (an empty registry would be taken for one that is still to be filled)
from lm_eval.api.registry import model_registry

if "dcdm" not in model_registry:
    model_registry.register("dcdm", target="dcdm.evaluation.harness:HarnessModel")
