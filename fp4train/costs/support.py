"""What a named GPU runs on its low-precision tensor cores, and what it has to emulate.

Decided from the GPU's compute capability alone, so that a plan made on a laptop can be priced for a B200. The answers
are those that `precision/te/availability.py` and `gemm/native.py` give on the GPU itself, with a recent Transformer
Engine.
"""

from __future__ import annotations

from fp4train.backends import native as scaled_mm
from fp4train.backends.te.quantizers import family
from fp4train.backends.te.translate import ALIGNMENT
from fp4train.hardware import Gpu
from fp4train.precision.layers import Layer
from fp4train.precision.recipe import Operands, Recipe


def why_emulated(recipe: Recipe, gemm: str, gpu: Gpu, layer: Layer | None = None) -> str | None:
    """Why `gpu` cannot run this GEMM of `recipe` on its low-precision tensor cores, or None where it can.

    As at run time, Transformer Engine (TE) comes first, which runs a recipe's quantised GEMMs all or none; then torch's
    scaled_mm, GEMM by GEMM.
    """
    table = recipe.table()
    if not table[gemm].quantised:
        return None
    if gpu.capability < (8, 9):
        return f"{gpu} has no tensor cores below BF16"
    reason = next((why for pair in table.values() if (why := _why_not_te(pair, gpu, layer))), None)
    if reason is None:
        return None
    fits = layer is None or not (layer.in_features % 16 or layer.out_features % 16)
    return None if fits and scaled_mm.why_not(table[gemm].first, table[gemm].second, "cpu") is None else reason


def _why_not_te(operands: Operands, gpu: Gpu, layer: Layer | None) -> str | None:
    """Why TE cannot run a GEMM with such operands on `gpu`; the requirements are `te/availability.py`'s."""
    specs = [spec for spec in (operands.first, operands.second) if spec is not None]
    if not specs:
        return None
    try:
        families = {family(spec) for spec in specs}
    except ValueError as error:
        return str(error)
    if len(specs) == 1 or len(families) > 1:
        return "TE multiplies operands of one family only"
    (kind,) = families
    needs = {"nvfp4": (10, 0), "mxfp8": (10, 0), "fp8_block": (9, 0)}.get(kind, (8, 9))
    if gpu.capability < needs:
        return f"{kind} needs compute capability {needs[0]}.{needs[1]}, {gpu} has {'.'.join(map(str, gpu.capability))}"
    if kind == "fp8_block" and gpu.capability >= (10, 0) and any(spec.scale == "fp32" for spec in specs):
        return "from compute capability 10.0 on, TE's FP8 blocks need power-of-two scales"
    if layer is not None and (layer.in_features % ALIGNMENT[kind] or layer.out_features % ALIGNMENT[kind]):
        return f"{kind} on TE needs features divisible by {ALIGNMENT[kind]}, {layer.name} has not"
    return None
