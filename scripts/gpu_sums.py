"""Whether this GPU's tensor cores sum products of codes as is known of them, in every bit:

    python scripts/gpu_sums.py --out NAME-sums.json [--dry-run]

FP8 with one scale in both accumulators, and on Blackwell MXFP8 and NVFP4, are multiplied by torch's scaled products
into BF16. Of each product, large enough that K need not be split, some rows and columns are compared with
`fp4train.backends.tensor_cores`, which says how each GPU sums and whose findings that are.

Scales of tensors are powers of two, so that a difference is one of sums. Rows with arbitrary scales show the order in
which these are applied. A row that differs says how many results do, shows the first one, its place and both values,
and names what equals the GPU's results instead: the other accumulator, sums over parts of K, another unit, or the exact
sum rounded once. Products that this torch is too old for are left out, and said. Exit
code 0: all are equal; 1: one is not, or failed; 3: there is no GPU, or how it sums is not known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpu_results
import gpu_stand_ins
import torch
from torch import Tensor

from fp4train.backends import native, tensor_cores
from fp4train.backends.native import FAST, NATIVE
from fp4train.backends.tensor_cores import TensorCore
from fp4train.quantize import Quantized, QuantSpec, quantizer

E4M3 = QuantSpec(element="e4m3", block=(None, None), scale="pow2", global_scale=None)
E5M2 = QuantSpec(element="e5m2", block=(None, None), scale="pow2", global_scale=None)
SCALED_E4M3 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)
MX_E4M3 = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
NVFP4 = QuantSpec()
AMAX = 448 * 6 / 256
"""The amax that NVFP4's global scale is taken from: the scale is a power of two then."""
SIZE = 2048
SAMPLED = 32
"""Rows and columns of a product, and how many of each are compared."""
TINY = 16
"""Rows and columns of a dry run, all of which are compared."""
DEPTHS = (512, 4096, 8192)
MOST_SPLITS = 8
"""Parts of K that are tried where a product differs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product: the specs of its operands [M, K] and [N, K], the accumulator, and K.

    arbitrary: whether scales of tensors are any float32 numbers, so that the order in which they
        are applied counts.
    """

    first: QuantSpec
    second: QuantSpec
    fast: bool
    depth: int
    arbitrary: bool = False

    @property
    def name(self) -> str:
        elements = f"{title(self.first)}·{title(self.second)}"
        accumulator = ""
        if self.first.block == (None, None):
            accumulator = ", fast accumulator" if self.fast else ", split accumulator"
        scales = ", arbitrary scales" if self.arbitrary else ""
        return f"{elements}{accumulator}{scales}, K {self.depth}"


def title(spec: QuantSpec) -> str:
    """The name of a format: "E4M3", "MXFP8 E4M3", "NVFP4"."""
    if spec.element == "e2m1":
        return "NVFP4"
    element = spec.element.upper()
    return f"MXFP8 {element}" if spec.scale == "e8m0" else element


def cases(capability: tuple[int, int]) -> Iterator[Case]:
    """The products that a GPU makes of codes: as in fprop, and as with gradients in E5M2."""
    blackwell = capability[0] == 10
    for depth in DEPTHS:
        for spec_of_x in (E4M3, E5M2):
            for fast in (True, False):
                yield Case(first=spec_of_x, second=E4M3, fast=fast, depth=depth)
        if blackwell:
            for spec in (MX_E4M3, NVFP4):
                yield Case(first=spec, second=spec, fast=False, depth=depth)
    yield Case(first=SCALED_E4M3, second=SCALED_E4M3, fast=False, depth=DEPTHS[0], arbitrary=True)
    if blackwell:
        yield Case(first=NVFP4, second=NVFP4, fast=False, depth=DEPTHS[0], arbitrary=True)


def operands(case: Case, size: int, device: str) -> tuple[Quantized, Quantized]:
    """Both operands, correlated as weights and activations are, so that sums do not cancel."""
    generator = torch.Generator().manual_seed(case.depth)
    common = torch.randn(case.depth, generator=generator)
    tensors = []
    for spec in (case.first, case.second):
        x = 0.5 * common + torch.randn(size, case.depth, generator=generator)
        amax = torch.tensor(AMAX) if spec == NVFP4 and not case.arbitrary else None
        tensors.append(quantizer(spec, "cpu").codes(x.bfloat16(), None, amax))
    left, right = (moved(tensor, device) for tensor in tensors)
    return left, right


def moved(operand: Quantized, device: str) -> Quantized:
    """The operand on a device."""
    return operand._replace(
        codes=operand.codes.to(device),
        scales=operand.scales.to(device),
        amax=None if operand.amax is None else operand.amax.to(device),
    )


def rows_of(operand: Quantized, rows: Tensor) -> Quantized:
    """Some rows of an operand whose scales are those of the tensor or of blocks of one row."""
    scales = operand.scales if operand.spec.has_outer_scale else operand.scales[rows]
    return operand._replace(
        shape=(len(rows), operand.shape[1]), codes=operand.codes[rows], scales=scales
    )


def compare(case: Case, capability: tuple[int, int], size: int, device: str) -> dict[str, Any]:
    """The row of a product; "left out" says why this torch does not make it."""
    if (reason := why_left_out(case)) is not None and device == "cuda":
        return {"left out": reason}
    unit = tensor_cores.unit_for(capability, case.first.format)
    assert unit is not None
    left, right = operands(case, size, device)
    backend = FAST if case.fast else NATIVE
    measured = backend.product(left, right, out_dtype=torch.bfloat16)
    count = min(size, SAMPLED)
    rows = torch.linspace(0, size - 1, count, device=device).long()
    measured = measured[rows][:, rows]
    left = rows_of(left, rows)
    right = rows_of(right, rows)
    expected = tensor_cores.product(left, right, unit, fast=case.fast).bfloat16()
    differing = (measured.view(torch.int16) != expected.view(torch.int16)).nonzero()
    row: dict[str, Any] = {"ok": not len(differing), "differ": len(differing)}
    row["of"] = measured.numel()
    if len(differing):
        row_at, column_at = differing[0].tolist()
        row["first"] = {
            "row": int(rows[row_at]),
            "column": int(rows[column_at]),
            "measured": float(measured[row_at, column_at]),
            "expected": float(expected[row_at, column_at]),
        }
        row["equal to"] = equal_to(measured, left, right, unit, case)
    return row


def why_left_out(case: Case) -> str | None:
    """Why this torch does not multiply codes of the case, whatever the GPU; None: it does."""
    kind = native.scheme(case.first)
    built = native.cuda_version()
    if kind is None or built is None or built >= kind.cuda:
        return None
    needed, have = (".".join(map(str, version)) for version in (kind.cuda, built))
    return f"it needs CUDA {needed}, and this torch is built for {have}"


def equal_to(
    measured: Tensor, left: Quantized, right: Quantized, unit: TensorCore, case: Case
) -> list[str]:
    """What has the GPU's bits instead of what was expected."""
    sums: dict[str, Tensor] = {}
    sums["the exact sum, rounded once"] = tensor_cores.exact_product(left, right)
    product = tensor_cores.product
    sums["the other accumulator"] = product(left, right, unit, fast=not case.fast)
    for splits in range(2, MOST_SPLITS + 1):
        parts = product(left, right, unit, fast=case.fast, splits=splits)
        sums[f"sums over {splits} parts of K"] = parts
    for units in tensor_cores.UNITS.values():
        for other in units:
            if other is not unit and case.first.format in other.elements:
                sums[other.name] = product(left, right, other, fast=case.fast)
    return [name for name, values in sums.items() if torch.equal(values.bfloat16(), measured)]


def main(words: list[str] | None = None) -> int:
    options, results = gpu_results.begin(gpu_results.options(__doc__), words)
    if options.dry_run:
        with gpu_stand_ins.known_sums():
            for capability, blocks in (((9, 0), False), ((10, 0), True)):
                for case in cases(capability):
                    if case.depth == DEPTHS[0] and (case.first.block != (None, None)) == blocks:
                        row = partial(compare, case, capability, TINY, "cpu")
                        results.measure(case.name, row)
        return results.code
    capability = torch.cuda.get_device_capability()
    if tensor_cores.unit_for(capability, E4M3.format) is None:
        print(f"how GPUs of compute capability {capability} sum is not known here")
        return 3
    for case in cases(capability):
        results.measure(case.name, partial(compare, case, capability, SIZE, "cuda"))
    return results.code


if __name__ == "__main__":
    sys.exit(main())
