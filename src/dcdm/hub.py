"""`import dcdm.hub` makes transformers' Auto classes know our models; exported folders name this module."""

from dcdm.io.hub import DCDMConfig, DCDMForCausalLM, DCDMForMaskedLM

__all__ = ["DCDMConfig", "DCDMForCausalLM", "DCDMForMaskedLM"]
