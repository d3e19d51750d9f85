"""Mamba-2, attention and MLP blocks in any order."""

from fp4train.models.common.scan import ScanShape
from fp4train.models.hybrid.model import Hybrid, HybridModel

__all__ = ["Hybrid", "HybridModel", "ScanShape"]
