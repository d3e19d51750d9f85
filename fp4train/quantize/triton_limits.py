"""What the Triton kernels know of a spec; for others `quantize.triton` gives the reason."""

from dataclasses import replace

from fp4train.formats import (
    SCALE_FORMATS,
    AdaptiveScale,
    ElementFormat,
    LevelledScale,
    ScaleFormat,
)
from fp4train.formats.element import check_element
from fp4train.formats.levels import HIF4_SCALE, IF4_SCALE
from fp4train.formats.scale import E8M0_SCALE, FP32_SCALE, POW2_SCALE
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard
from fp4train.quantize.triton_blocks import COLUMN_BLOCKS
from fp4train.quantize.triton_variant import ROUNDINGS

ROW_BLOCKS = (16, 32, 64, 128)
LARGEST_TRANSFORM = 32
"""Of 64 neighbours the compiler takes minutes."""
LARGEST_SCALE = 2.0**96
"""Block scales are rounded by adding 2^23 times their power of two at most, in float32."""

_KNOWN: dict[str, tuple[object, ...]] = {
    "scale_rounding": (None, "rceil", "floor", "even", "ceil"),
    "formula": ("te2.14", "te2.13"),
    "rounding": tuple(rounding.name for rounding in ROUNDINGS),
    "requantises": (None,),
    "global_scale": (None, "tensor", "row", "block", "macro"),
    "four_over_six": (None,),
    "chunks": (None,),
}
"""Field of a spec, besides the formats → its values that the kernels know, and of global_scale any
tile; any other has no kernel.
"""


def why_not_spec(spec: QuantSpec) -> str | None:
    """Why there is no kernel for the spec, whatever the device; None if there is one."""
    return (
        why_not_element(spec.format)
        or why_not_scale(spec.scale)
        or _why_not_options(spec)
        or why_not_blocks(spec)
    )


def why_not_element(fmt: ElementFormat) -> str | None:
    """Why the kernels have no such elements, or None: they know formats by their fields."""
    reason = f"its class is {type(fmt).__name__}"
    if type(fmt) is ElementFormat:
        try:
            check_element(replace(fmt, dtype=None, rate=None))
            return None
        except ValueError as error:
            reason = str(error)
    return f"element={fmt.name!r} has no Triton kernel: {reason}"


def why_not_scale(name: str) -> str | None:
    """Why the kernels have no such scales, or None: bytes with a mantissa they know by the fields
    of their element.
    """
    if name in SCALE_FORMATS.names and _is_known(SCALE_FORMATS.get(name)):
        return None
    return (
        f"scale={name!r} has no Triton kernel (known: e4m3, e8m0, fp32, pow2, hif4, if4, and bytes "
        "of exponent and mantissa up to 2^96, such as ue5m3)"
    )


def _is_known(fmt: ScaleFormat) -> bool:
    if fmt in (E8M0_SCALE, FP32_SCALE, POW2_SCALE, HIF4_SCALE, IF4_SCALE):
        return True
    return type(fmt) is ScaleFormat and fmt.rounds_to_nearest and fmt.max <= LARGEST_SCALE


def _why_not_options(spec: QuantSpec) -> str | None:
    for field, kernel_values in _KNOWN.items():
        value = getattr(spec, field)
        tile = field == "global_scale" and isinstance(value, tuple)
        if value not in kernel_values and not tile:
            known = ", ".join(map(str, kernel_values)) + (
                " and tiles" if field == "global_scale" else ""
            )
            return f"{field}={value!r} has no Triton kernel (known: {known})"
    if spec.global_scale not in (None, "macro") and spec.format.max < 1.0:
        return (
            f"element={spec.element!r} with global_scale={spec.global_scale!r} has no Triton "
            "kernel: its largest value is below 1, where products of scales overflow"
        )
    return None


def why_not_blocks(spec: QuantSpec) -> str | None:
    """Why the kernels have no such blocks, transformed so, or None."""
    rows, cols = spec.block
    if cols is None:
        if spec.scale_format.is_byte or spec.hadamard is not None or spec.format.packed:
            what = f"scale={spec.scale!r}, element={spec.element!r}, hadamard={spec.hadamard!r}"
            return f"block={spec.block!r} with {what} has no Triton kernel"
        return None
    if cols not in ROW_BLOCKS or rows not in (1, cols):
        return f"block={spec.block!r}: the kernels take 1xN and NxN, N = 16, 32, 64 or 128"
    chooses = isinstance(spec.scale_format, AdaptiveScale)
    if chooses and cols not in COLUMN_BLOCKS:
        return f"scale={spec.scale!r} with block={spec.block!r}: the kernels take N = 16 or 32"
    return None if spec.hadamard is None else _why_not_transform(spec)


def _why_not_transform(spec: QuantSpec) -> str | None:
    transform = spec.hadamard
    if type(transform) is not Hadamard:
        return f"hadamard={transform!r} has no Triton kernel"
    rows, cols = spec.block
    levels = isinstance(spec.scale_format, LevelledScale)
    if rows != 1 or (cols not in COLUMN_BLOCKS and not levels):
        return f"hadamard with block={spec.block!r}: the kernels take 1x16, 1x32 and hif4's blocks"
    if transform.size > LARGEST_TRANSFORM:
        return (
            f"hadamard size {transform.size}: the kernels take sizes up to {LARGEST_TRANSFORM}, the "
            "neighbours that a thread holds"
        )
    if transform.signs == "step" and spec.global_scale is not None:
        return (
            f"hadamard.signs='step' with global_scale={spec.global_scale!r} has no Triton kernel: "
            "that of the amax draws no signs"
        )
    if spec.outer is not None and spec.outer[1] % transform.size:
        return (
            f"hadamard size {transform.size} with global_scale={spec.global_scale!r}: a group of "
            "the transform spans several scales"
        )
    return None
