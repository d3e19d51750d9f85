"""Llama and related models with grouped-query attention."""

from fp4train.models.llama.model import Llama, LlamaModel

__all__ = ["Llama", "LlamaModel"]
