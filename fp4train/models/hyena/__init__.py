"""StripedHyena 2: short, medium and long gated convolutions, and attention, in any order."""

from fp4train.models.hyena.mixer import FilterShape
from fp4train.models.hyena.model import Hyena, HyenaModel

__all__ = ["FilterShape", "Hyena", "HyenaModel"]
