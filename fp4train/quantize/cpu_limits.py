"""What the C kernels know of transforms and of scales above block scales; for others `quantize.cpu`
gives the reason.
"""

from fp4train.kernels import cpu
from fp4train.quantize.rotation import Transform
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard

_GLOBAL_SCALES = (None, "tensor", "row", "block", "macro")
"""The names of scales above block scales that the kernels know."""


def why_not_outer(spec: QuantSpec) -> str | None:
    """Why the kernels have no scales above block scales as those of `spec`, or None."""
    if not isinstance(spec.global_scale, tuple) and spec.global_scale not in _GLOBAL_SCALES:
        return (
            f"global_scale={spec.global_scale!r} has no C kernel (known: "
            f"{', '.join(map(str, _GLOBAL_SCALES))} and tiles)"
        )
    if spec.outer is not None and not _is_known_tile(spec.outer):
        return (
            f"global_scale={spec.global_scale!r} has no C kernel: tiles have {cpu.OUTER_COLUMNS} "
            f"columns and a multiple of {cpu.TILE_MULTIPLE} rows"
        )
    cols = spec.block[1] or 0
    turned = spec.hadamard
    if spec.global_scale == "macro" and turned is not None and turned.size < cols:
        return (
            f"hadamard.size={turned.size} with global_scale='macro' has no C kernel for "
            f"blocks of {cols}: use a transform of {cols}"
        )
    return None


def _is_known_tile(outer: tuple[int, int]) -> bool:
    rows, columns = outer
    return columns == cpu.OUTER_COLUMNS and (rows == 1 or rows % cpu.TILE_MULTIPLE == 0)


def kernel_extent(spec: QuantSpec) -> str | None:
    """The name of `cpu.EXTENTS` for what shares a scale above block scales."""
    if spec.outer is not None:
        return "block" if spec.outer[0] == 1 else "tile"
    if spec.scaled_rows is not None:
        return "row"
    return "tensor" if spec.global_scale else None


def why_not_transform(transform: Hadamard | Transform) -> str | None:
    """Why the kernels cannot transform groups of columns so, or None."""
    if type(transform) is not Hadamard:
        return f"hadamard={transform!r} has no C kernel"
    if transform.size not in cpu.HADAMARD_SIZES:
        return (
            f"hadamard.size={transform.size}: the kernels transform "
            f"{', '.join(map(str, cpu.HADAMARD_SIZES))}"
        )
    if transform.signs == "random" and transform.size > cpu.REPEATED_SIGNS:
        return (
            f"hadamard.signs='random' with size={transform.size}: the kernels take "
            f"{cpu.REPEATED_SIGNS} such signs"
        )
    return None
