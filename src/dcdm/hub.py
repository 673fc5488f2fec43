"""Models in the form that `transformers` loads: `AutoModelForMaskedLM`, and `AutoModelForCausalLM` for AR.

`import dcdm.hub` makes the Auto classes know them; exported folders name this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput, MaskedLMOutput

from dcdm.config import ModelConfig
from dcdm.decoding.routes import current_ids
from dcdm.kinds import network

IGNORED = -100  # label of a position that does not count, as everywhere in transformers


class DCDMConfig(PretrainedConfig):
    """A `ModelConfig` (under the name `dcdm`) and the sizes that `transformers` asks for by its own names."""

    model_type = "dcdm"

    def __init__(self, dcdm: dict[str, Any] | None = None, **more: Any) -> None:
        self.dcdm = dcdm
        if dcdm is not None:
            config = ModelConfig.from_dict(dcdm)
            sizes = {
                "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
                "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
                "max_position_embeddings": config.max_position, "bos_token_id": config.bos_id,
                "pad_token_id": config.pad_id, "tie_word_embeddings": False,
            }  # fmt: skip
            more = {**sizes, **more}
        super().__init__(**more)

    def model_config(self) -> ModelConfig:
        if self.dcdm is None:
            raise ValueError("DCDMConfig needs dcdm=ModelConfig(...).to_dict()")
        return ModelConfig.from_dict(self.dcdm)


@dataclass
class DiffusionOutput(MaskedLMOutput):
    """`MaskedLMOutput` with the chunks that the model formed."""

    chunk_ids: Tensor | None = None
    """(B, L): −1 padding, 0 always visible, 1…K."""
    router_scores: Tensor | None = None
    """r (B, L, K); None for kinds without chunking attention and for partitions that no router decides."""


class _Wrapped(PreTrainedModel):
    config_class = DCDMConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers' own form)

    def __init__(self, config: DCDMConfig) -> None:
        super().__init__(config)
        if getattr(config, "weights", None) == "int8":
            raise ValueError("this folder holds its weights in bytes, which dcdm.load reads; export it with fp32")
        self.model = network(config.model_config())
        self.model.init_weights()
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing is left to do: `transformers` asks only for modules that have parameters of their own."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed_tokens


class DCDMForMaskedLM(_Wrapped):
    """Diffusion kinds. `input_ids` hold MASK where something is to be predicted."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        **_: Any,
    ) -> DiffusionOutput:
        """Logits (B, L, V), and the chunks that the model formed.

        Without labels one stream runs under the decoding mask: logits are defined for the chunk that comes next
        (the lowest with MASKs in it) and equal the training pass's there. With labels, tokens are read from
        them where they are not −100, the training pass runs, and `loss` is the mean cross-entropy of the
        masked positions, 0 if there are none. `prompt_mask` marks tokens that are given, as BOS is.
        """
        model, config = self.model, self.model.config
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, config.pad_id)
        prompt = None if prompt_mask is None else prompt_mask.bool()
        if labels is None:
            ids, scores = current_ids(model, input_ids, prompt), None
            logits = model.head(model.denoise(input_ids, ids))
            if model.chunking is not None and config.routes_from_noise:
                real = input_ids != config.pad_id
                scores = model.router_scores(input_ids, real)
                ids = torch.where(real, model.chunking.assign(scores), -1)
            return DiffusionOutput(logits=logits, chunk_ids=ids, router_scores=scores)
        masked = input_ids == config.mask_id
        tokens = torch.where(masked & (labels != IGNORED), labels, input_ids)
        masked = masked & (labels != IGNORED)
        if (special := tokens[masked & (tokens >= config.bos_id)]).numel():
            raise ValueError(
                f"labels hold {int(special[0])} at a MASK; BOS, PAD and MASK, {config.bos_id} to {config.mask_id}, "
                f"are never predicted: set such labels to {IGNORED}"
            )
        if config.predicts_from_left:  # what is not masked is given
            given = ~masked & (tokens != config.pad_id)
            out = model(tokens, prompt=given if prompt is None else given | prompt)
        else:
            out = model(tokens, masked, prompt=prompt)
        logits = out.logits
        loss = F.cross_entropy(logits[masked], tokens[masked], reduction="sum") / masked.sum().clamp(min=1)
        return DiffusionOutput(loss, logits, chunk_ids=out.chunk_ids, router_scores=out.router_scores)


class DCDMForCausalLM(_Wrapped):
    """AR."""

    def __init__(self, config: DCDMConfig) -> None:
        if (kind := config.model_config().kind) != "ar":
            raise ValueError(f"AutoModelForCausalLM is for AR, this is {kind}: load it by AutoModelForMaskedLM")
        super().__init__(config)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        """Logits (B, L, V), position ℓ predicting ℓ+1; with labels also the mean cross-entropy."""
        if attention_mask is not None:
            input_ids = input_ids.masked_fill(attention_mask == 0, self.model.config.pad_id)
        logits = self.model(input_ids).logits
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return CausalLMOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


def register() -> None:
    """Make the Auto classes know these models."""
    AutoConfig.register(DCDMConfig.model_type, DCDMConfig, exist_ok=True)
    AutoModelForMaskedLM.register(DCDMConfig, DCDMForMaskedLM, exist_ok=True)
    AutoModelForCausalLM.register(DCDMConfig, DCDMForCausalLM, exist_ok=True)


register()
