"""Mamba-2, attention and MLP blocks in any order."""

from fp4train.models.hybrid.model import Hybrid, HybridModel, ScanShape

__all__ = ["Hybrid", "HybridModel", "ScanShape"]
