"""What this GPU's memory and tensor cores reach, and the Triton kernels beside it:

    python scripts/gpu_bandwidth.py --out NAME-bandwidth.json [--size 16384] [--dry-run]

copy        GB/s of device-to-device copies, which read and write: torch's of 508 MiB by a graph and eagerly, Triton's,
            and torch's of 512 MiB by a graph, which PyTorch's issue 191284 says loses half its speed
product     TFLOP/s of torch's products: BF16 into BF16 and into float32; FP8 with one scale; NVFP4 and MXFP8 where
            tensor cores multiply them; and of emulation's, whose scales are applied in cuBLAS's product and in
            Triton's, each after products of integers that must be exact; `library` says which one ran
kernel      bytes that each kernel of a training step must move, divided by its time, as a share of the copy's GB/s;
            the target is 75 % of the fastest copy's

Times are medians of CUDA-graph replays, so that Python's launches do not count. Rows end with the GPU's clock and
power. They are written as they come, what is worth most first. Exit code 0: all were measured, whatever they reach; 1:
one failed; 3: there is no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import gpu_results
import gpu_stand_ins
import torch
from gpu_cases import KEY, SPECS
from torch import Tensor

from fp4train.backends.emulate import matmul
from fp4train.backends.native import NATIVE
from fp4train.backends.scaled import ScaledProducts
from fp4train.hardware import Device
from fp4train.precision import MXFP8, NVFP4, FP8Current, Recipe
from fp4train.precision.layers import Layer
from fp4train.quantize import Decoded, triton as kernels

TARGET = 0.75
SIZE = 16384
TINY = 64
"""Rows and columns of the timed tensors, and those of a dry run."""
LARGEST_PRODUCT = 8192
"""Rows and columns of the multiplied matrices, at most."""
REPLAYS = 30
FIRST = KEY.replace(row_offset=0, col_offset=0)
INTEGER_SIZES = (512, 512, 256), (301, 215, 137)
TINY_INTEGER_SIZES = (64, 64, 32), (33, 17, 40)
"""R, S and C of products of integers: whole tiles and others."""
INTEGERS = ("plain", "turned", "rows", "bias", "added")
"""Kinds of products of integers: of operands whose columns are contiguous; with a scale per row; with
a bias; added to a float32 sum.
"""


@dataclass(frozen=True)
class Form:
    """What a kernel writes: codes or values of x, or of x.T along its rows, by the name of a spec."""

    spec: str
    codes: bool = False

    def __str__(self) -> str:
        return f"{'codes' if self.codes else 'values'} of {self.spec}"

    def bytes(self, elements: int) -> float:
        """Bytes of codes and block scales, or of values in BF16."""
        if not self.codes:
            return 2 * elements
        spec = SPECS[self.spec]
        columns = spec.block[1]
        scale = 0.0 if columns is None else 1 / columns
        return elements * (spec.format.bits / 8 + scale)


@dataclass(frozen=True)
class Kernel:
    """A kernel of a training step, which makes one form of x, or both."""

    row: Form
    column: Form | None = None

    @property
    def name(self) -> str:
        if self.column is None:
            return str(self.row)
        return f"{self.row}, {self.column} of x.T"

    def call(self, x: Tensor) -> Callable[[], object]:
        quantizer = kernels.TritonQuantizer(SPECS[self.row.spec])
        if self.column is None:
            make = quantizer.codes if self.row.codes else quantizer.values
            return lambda: make(x, FIRST, None)
        column = kernels.TritonQuantizer(SPECS[self.column.spec])
        forms = (self.row.codes, self.column.codes)
        return lambda: quantizer.with_columns(column, x, (FIRST, FIRST), (None, None), forms)

    def bytes(self, elements: int) -> float:
        """Bytes that it must move: x is read twice where an amax comes first."""
        reads = 1 + SPECS[self.row.spec].has_outer_scale
        moved = 2 * elements * reads + self.row.bytes(elements)
        if self.column is not None:
            moved += self.column.bytes(elements)
        return moved


NVFP4_X = Form("nvfp4 hadamard", codes=True)
NVFP4_DY = Form("nvfp4 hadamard stochastic")
MXFP8_CODES = Form("mxfp8 e4m3", codes=True)
FP8_CODES = Form("fp8 tensor e4m3", codes=True)
KERNELS = (
    Kernel(Form("nvfp4"), NVFP4_X),
    Kernel(Form("nvfp4 stochastic"), NVFP4_DY),
    Kernel(Form("nvfp4 16x16")),
    Kernel(Form("mxfp8 e4m3")),
    Kernel(Form("nvfp4", codes=True), NVFP4_X),
    Kernel(Form("nvfp4 stochastic", codes=True), replace(NVFP4_DY, codes=True)),
    Kernel(MXFP8_CODES, MXFP8_CODES),
    Kernel(FP8_CODES, FP8_CODES),
)
"""Of emulation, and of products of codes."""


def microseconds(call: Callable[[], object]) -> float:
    """Median GPU time of a call, from replays of a CUDA graph of it; in a dry run that of one
    call.
    """
    if not torch.cuda.is_available():
        return 1e3 * gpu_results.milliseconds(call)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return 1e3 * gpu_results.milliseconds(graph.replay, REPLAYS)


def products(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of the products x·xᵀ that tensor cores of this GPU multiply."""
    yield "BF16", lambda: x @ x.T
    plain = Decoded(x, None)
    yield "BF16 into float32", lambda: matmul(plain, plain, out_dtype=torch.float32)
    device = Device.of(x.device)
    side = len(x)
    layer = Layer(name="layer", in_features=side, out_features=side, block=0, blocks=1)
    recipes: dict[str, Recipe] = {"FP8": FP8Current(), "MXFP8": MXFP8(), "NVFP4": NVFP4()}
    for name, recipe in recipes.items():
        table = recipe.table()
        if NATIVE.why_not(table, "fprop", layer, device) is not None:
            continue
        spec = table["fprop"].first
        assert spec is not None
        codes = kernels.TritonQuantizer(spec).in_tiles.codes(x)
        yield name, partial(NATIVE.product, codes, codes, out_dtype=torch.bfloat16)


def multiplied(scaled: ScaledProducts, x: Tensor) -> Tensor:
    """The product x·xᵀ with its scales, as emulation makes it."""
    operand = Decoded(x, torch.full((), 0.01, device=x.device))
    return scaled.product(operand, operand, out_dtype=torch.bfloat16)


def integers(rows: int, depth: int, factor: int, limit: int) -> Tensor:
    """[rows, depth] of integers from -limit to limit, without a pattern of tiles."""
    places = torch.arange(rows)[:, None] * factor + torch.arange(depth) * 53
    return places % (2 * limit + 1) - limit


def integer_product(
    scaled: ScaledProducts, kind: str, sizes: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """A product [R, S] of integers with sums over C, which are exact in float32, and what it must
    be; sizes: R, S, C.
    """
    rows, cols, depth = sizes
    dtype = torch.float16 if kind in ("turned", "rows") else torch.bfloat16
    a = integers(rows, depth, 37, 100)
    b = integers(cols, depth, 91, 64)
    scale = torch.tensor(0.5)
    if kind == "rows":
        scale = scale * torch.arange(1, rows + 1)[:, None]
    exact = (a.double() @ b.double().T).float() * scale * 0.25
    left = Decoded(placed(a, dtype, device, kind), scale.to(device))
    right = Decoded(placed(b, dtype, device, kind), torch.tensor(0.25, device=device))
    if kind == "added":
        total = integers(rows, cols, 1, 50).float()
        on_device = total.to(device, copy=True)
        scaled.add(on_device, left, right)
        return on_device, total + exact
    bias = None
    if kind == "bias":
        bias = integers(1, cols, 0, 6)[0].to(device, dtype)
        exact = exact + bias.cpu().float()
    product = scaled.product(left, right, out_dtype=dtype, bias=bias)
    return product, exact.to(dtype)


def placed(x: Tensor, dtype: torch.dtype, device: torch.device, kind: str) -> Tensor:
    """x on the device; "turned": its columns are contiguous."""
    if kind == "turned":
        return x.T.contiguous().to(device, dtype).T
    return x.to(device, dtype)


def scaled_row(way: Literal["cublas", "triton"], x: Tensor) -> dict[str, Any]:
    """The row of products whose scales one library applies.

    Raises:
        RuntimeError: it multiplies integers wrongly.
    """
    scaled = ScaledProducts(way)
    sizes = INTEGER_SIZES if x.is_cuda else TINY_INTEGER_SIZES
    for size, kind in product(sizes, INTEGERS):
        result, exact = integer_product(scaled, kind, size, x.device)
        wrong = int((result.cpu() != exact).sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {exact.numel()} products differ: {kind}, {size}")
    reason = scaled.why_triton(x.device)
    row = product_row(partial(multiplied, scaled, x), len(x))
    return row | {"library": "Triton" if reason else "cuBLAS", "why not cuBLAS": reason}


def product_row(call: Callable[[], object], side: int) -> dict[str, Any]:
    us = microseconds(call)
    return {"us": us, "TFLOP/s": 2 * side**3 / us / 1e6}


def copies(x: Tensor) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name of a row, what measures it), of copies of x, the last of all of it."""
    from gpu_copy import by_triton

    def by_torch(x: Tensor, y: Tensor) -> None:
        y.copy_(x)

    def eagerly(call: Callable[[], object]) -> float:
        return 1e3 * gpu_results.milliseconds(call, REPLAYS)

    flat = x.view(-1)
    part = flat[: len(flat) * 127 // 128]
    ways = {
        "graph": (microseconds, by_torch, part),
        "eager": (eagerly, by_torch, part),
        "Triton": (microseconds, by_triton, part),
        "graph, whole": (microseconds, by_torch, flat),
    }
    for name, (measure, copy, source) in ways.items():
        size = source.numel() * source.element_size() / 2**20
        yield f"copy {size:.0f} MiB, {name}", partial(copy_row, measure, copy, source)


def copy_row(
    measure: Callable[[Callable[[], object]], float],
    copy: Callable[[Tensor, Tensor], None],
    x: Tensor,
) -> dict[str, Any]:
    """measure: gives the microseconds of a call."""
    y = torch.empty_like(x)
    us = measure(lambda: copy(x, y))
    if not torch.equal(x, y):
        raise RuntimeError("the copy differs")
    return {"us": us, "GB/s": 2 * x.numel() * x.element_size() / us / 1e3}


def kernel_row(call: Callable[[], object], moved: float, copied: float) -> dict[str, Any]:
    """copied: GB/s of the fastest copy."""
    us = microseconds(call)
    rate = moved / us / 1e3
    share = rate / copied
    row = {"us": us, "bytes": moved, "GB/s": rate, "of copy": share}
    return row | {"below target": share < TARGET}


def measurements(
    x: Tensor, results: gpu_results.Results
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name of a row, what measures it): the copies first, of which the kernels are shares, in
    `results` by then.
    """
    yield from copies(x)
    measured = [row for row in results.rows if row["ok"] and row["name"].startswith("copy ")]
    copied = max((row["GB/s"] for row in measured), default=float("nan"))
    side = min(len(x), LARGEST_PRODUCT)
    square = x[:side, :side].contiguous()
    for name, call in products(square):
        yield f"product {name}", partial(product_row, call, side)
    yield "product BF16 with two scales, cublas", partial(scaled_row, "cublas", square)
    yield "product BF16 with two scales, triton", partial(scaled_row, "triton", square)
    amax = partial(kernels.TritonQuantizer(SPECS["nvfp4"]).amax, x)
    yield "kernel amax", partial(kernel_row, amax, 2 * x.numel(), copied)
    for kernel in KERNELS:
        moved = kernel.bytes(x.numel())
        yield f"kernel {kernel.name}", partial(kernel_row, kernel.call(x), moved, copied)


def main(words: list[str] | None = None) -> int:
    parser = gpu_results.options(__doc__)
    parser.add_argument("--size", type=int, default=SIZE, help="rows and columns of the tensors")
    options, results = gpu_results.begin(parser, words)
    if options.dry_run:
        gpu_stand_ins.interpret()
    size = options.size
    device = "cuda"
    if options.dry_run:
        size = TINY
        device = "cpu"
    x = torch.randn(size, size, device=device).bfloat16()
    for name, measure in measurements(x, results):
        results.measure(name, lambda: measure() | gpu_results.clock())  # noqa: B023
    return results.code


if __name__ == "__main__":
    sys.exit(main())
