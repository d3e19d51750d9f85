"""Linear layers that follow the autocast context, and model conversion."""

from fp4train.nn.convert import convert as convert
from fp4train.nn.experts import Experts as Experts
from fp4train.nn.linear import Linear as Linear
