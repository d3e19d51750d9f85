"""OLMo 2: norms behind attention and MLP, and of whole projections of queries and keys."""

from fp4train.models.olmo2.model import Olmo2, Olmo2Model

__all__ = ["Olmo2", "Olmo2Model"]
