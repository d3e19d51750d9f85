"""Availability of Transformer Engine: its version here, and the formats of this GPU. Answers are
None or a reason.

NVFP4 with Hadamard transform or stochastic rounding needs compute capability 10.x: TE's check also
passes on 12.x, where those kernels fail or return zero gradients (TE issues 3062 and 3281). MXFP8
needs 10.x; FP8 per tensor 8.9; FP8 in blocks 9.0, from 10.0 on with power-of-two scales only,
because TE emulates it there with MXFP8.
"""

import contextlib
import functools
import importlib
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import ModuleType

from fp4train.backends.table import Table
from fp4train.backends.te.quantizers import family, forms, joint
from fp4train.hardware import Device
from fp4train.quantize import QuantSpec

OLDEST = (2, 9)
"""The first TE with `te.autocast` and the `is_…_available(return_reason=True)` functions."""


@functools.cache
def version() -> tuple[int, ...] | None:
    """Version of the installed TE, (2, 20, 2) say, or None where there is none.

    Read once in a process: each call of a layer asks, and metadata take about a millisecond.
    """
    try:
        text = metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def version_text() -> str:
    te_version = version()
    return "Transformer Engine" + (f" {'.'.join(map(str, te_version))}" if te_version else "")


@contextlib.contextmanager
def _without_core_library() -> Iterator[None]:
    """Let the pure-Python part of TE import where its CUDA library is not installed (TE's own build
    switch).
    """
    name = "NVTE_PROJECT_BUILDING"
    saved_value = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if saved_value is None:
            del os.environ[name]
        else:
            os.environ[name] = saved_value


def recipe_module() -> ModuleType:
    """`transformer_engine.common.recipe`, which needs neither GPU nor CUDA library.

    Raises:
        ValueError: TE is not installed, too old, or does not import.
    """
    name = "transformer_engine.common.recipe"
    with _refused("does not import"), warnings.catch_warnings():
        # TE warns that its PyTorch extension is missing; we ask for it separately.
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except RuntimeError:
            with _without_core_library():
                return importlib.import_module(name)


@functools.cache
def pytorch_module() -> ModuleType:
    """`transformer_engine.pytorch`, the kernels.

    Raises:
        ValueError: TE is not installed, too old, or does not load on this machine.
    """
    with _refused("is installed but does not load"):
        return importlib.import_module("transformer_engine.pytorch")


@contextlib.contextmanager
def _refused(how: str) -> Iterator[None]:
    """Make a ValueError of any failure to import TE."""
    te_version = version()
    if te_version is None:
        raise ValueError(
            "Transformer Engine is not installed (pip install --no-build-isolation "
            "'transformer_engine[pytorch]')"
        )
    if te_version < OLDEST:
        raise ValueError(
            f"{version_text()} is too old: fp4train needs {'.'.join(map(str, OLDEST))} or newer"
        )
    try:
        yield
    # a missing or foreign CUDA library shows as any of half a dozen exception types
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{version_text()} {how}: {reason}") from error


def why_not_device(table: Table, device: Device) -> str | None:
    """None where TE on `device` runs the table's formats; otherwise the reason and, on this
    machine, what runs instead.

    A table without quantised operands needs no TE: torch's own GEMM runs it. Of a GPU on another
        machine the compute
    capability decides, with the newest TE that fp4train knows.
    """
    if not table.quantised:
        return None
    if device.type != "cuda" or (device.capability is None and not device.here):
        return f"Transformer Engine needs an NVIDIA GPU, not {device}"
    if device.capability is None:
        return "Transformer Engine needs an NVIDIA GPU; torch sees none"
    families = _families(table)
    if not device.here:
        return _why_not_formats(None, families, device) or _why_not_columns(table, families, device)
    try:
        te = pytorch_module()
        reason = _why_not_formats(te, families, device) or _why_not_columns(table, families, device)
    except ValueError as error:
        reason = str(error)
    if reason is None:
        return None
    native = next((name for name in ("mxfp8", "fp8_current") if _available(name)), None)
    if native and native not in families.values():
        instead = f"; recipe={native} runs natively"
    else:
        instead = ""
    return f"{reason.rstrip('.')} ({_describe(device)}){instead}"


def _describe(device: Device) -> str:
    return f"{device}, compute capability {'.'.join(map(str, device.capability or ()))}"


def _families(table: Table) -> dict[QuantSpec, str]:
    """TE's family of each operand that has one; what TE cannot express at all is `translate`'s to
    say.
    """
    supported = {}
    for spec in table.specs():
        with contextlib.suppress(ValueError):
            supported[spec] = family(spec)
    return supported


def _available(kind: str) -> bool:
    try:
        return bool(getattr(pytorch_module(), _CHECKS[kind])())
    except ValueError:
        return False


_CHECKS = {
    "nvfp4": "is_nvfp4_available",
    "mxfp8": "is_mxfp8_available",
    "fp8_current": "is_fp8_available",
    "fp8_delayed": "is_fp8_available",
    "fp8_block": "is_fp8_block_scaling_available",
}

_LEAST = {
    "nvfp4": (10, 0),
    "mxfp8": (10, 0),
    "fp8_block": (9, 0),
    "fp8_current": (8, 9),
    "fp8_delayed": (8, 9),
}
"""Compute capability that each family needs."""


def _why_not_formats(
    te: ModuleType | None, families: Mapping[QuantSpec, str], device: Device
) -> str | None:
    """TE's own answer for each format, or, without TE, that of the compute capability; and what TE
    does not check.
    """
    capability = device.capability or (0, 0)
    for spec, kind in families.items():
        if te is not None:
            available, reason = getattr(te, _CHECKS[kind])(return_reason=True)
            if not available:
                return str(reason)
        elif capability < (least := _LEAST[kind]) or (kind == "mxfp8" and capability >= (12, 0)):
            have = ".".join(map(str, capability))
            return (
                f"{kind} on TE needs compute capability {least[0]}.{least[1]}, {device} has {have}"
            )
        if (
            kind == "nvfp4"
            and capability[0] > 10
            and (spec.hadamard or spec.rounding == "stochastic")
        ):
            return (
                "TE runs NVFP4's Hadamard transform and stochastic rounding on compute "
                "capability 10.x only "
                "(recipe.hadamard=false recipe.stochastic_rounding=false run here)"
            )
        if kind == "fp8_block" and capability >= (10, 0) and spec.scale == "fp32":
            return (
                "from compute capability 10.0 on, TE's FP8 blocks need power-of-two scales "
                "(recipe.power_of_two=true)"
            )
    return None


def _why_not_columns(table: Table, families: Mapping[QuantSpec, str], device: Device) -> str | None:
    """TE makes the column-wise form of FP8 per tensor out of the row-wise one wherever only x·wᵀ
    can be multiplied.

    That is everywhere but on compute capability 10.x, so a tensor cannot be FP8 in its column-wise
    form alone.
    """
    if (device.capability or (0, 0))[0] in (10, 11):
        return None
    for slot, (row, column) in forms(table).items():
        if column is not None and families.get(column) == "fp8_current" and not joint(row, column):
            return (
                f"TE quantises {slot} to FP8 per tensor for backward only where forward "
                "quantises it alike, except on "
                "compute capability 10.x"
            )
    return None
