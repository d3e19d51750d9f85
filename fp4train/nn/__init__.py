"""Linear layers that follow the autocast context, and model conversion."""

from fp4train.nn.convert import convert
from fp4train.nn.linear import Linear

__all__ = ["Linear", "convert"]
