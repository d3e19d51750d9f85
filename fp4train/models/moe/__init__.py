"""Mixtures of experts with Llama's attention."""

from fp4train.models.common import Balance, ExpertShape
from fp4train.models.moe.model import MixtureModel, MixtureOfExperts

__all__ = ["Balance", "ExpertShape", "MixtureModel", "MixtureOfExperts"]
