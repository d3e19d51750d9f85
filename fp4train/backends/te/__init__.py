"""Transformer Engine (TE) as a backend: the only package that knows TE's API.

    availability   is TE installed, which version, what can this GPU do: reasons, never tracebacks
    quantizers     one quant spec → the TE quantiser that computes exactly it, and the factory for TE's `CustomRecipe`
    translate      a recipe's table of six operands → a TE recipe object, or why TE cannot run it
    executor       a layer's GEMMs on TE's kernels; `fp4train.nn.Linear` holds one

TE is imported when it is first needed, never by `import fp4train`.
"""

from fp4train.backends.te.availability import why_not_device
from fp4train.backends.te.executor import TEExecutor, region
from fp4train.backends.te.quantizers import QuantizerFactory
from fp4train.backends.te.translate import to_te, why_not

__all__ = [
    "QuantizerFactory",
    "TEExecutor",
    "region",
    "to_te",
    "why_not",
    "why_not_device",
]
