"""Layers that follow the autocast context."""

from fp4train.nn.convert import convert
from fp4train.nn.linear import Linear

__all__ = ["Linear", "convert"]
