"""Precision as an object: recipes, the layer policy, phases, the plan, and the autocast context."""

from fp4train.backends.table import GEMMS, Operands, Table
from fp4train.precision.context import autocast, recompute, recompute_contexts
from fp4train.precision.phases import Phase, Swap, Timeline
from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import LossScaling, OutlierChannels, Recipe
from fp4train.precision.recipes import (
    BF16,
    FP16,
    FP32,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Custom,
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
    Mixed,
    QuartetII,
    TetraJetV2,
    TetraJetV2Outliers,
)

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "GEMMS",
    "MXFP4",
    "MXFP6",
    "MXFP8",
    "NVFP4",
    "Custom",
    "FP8Block",
    "FP8Current",
    "FP8Delayed",
    "FP8Row",
    "LayerPolicy",
    "LossScaling",
    "Mixed",
    "Operands",
    "OutlierChannels",
    "Phase",
    "QuartetII",
    "Recipe",
    "Swap",
    "Table",
    "TetraJetV2",
    "TetraJetV2Outliers",
    "Timeline",
    "autocast",
    "recompute",
    "recompute_contexts",
]
