"""What this GPU's memory and tensor cores reach, and the Triton kernels beside it:

    python scripts/gpu_bandwidth.py --out NAME-bandwidth.json [--size 16384] [--dry-run]

copy        GB/s of a device-to-device copy, which reads and writes
product     TFLOP/s of torch's products: BF16 into BF16 and into float32; FP8 with one scale; NVFP4 and MXFP8 where
            tensor cores multiply them; and of emulation's, whose scales are applied in cuBLAS's product and in
            Triton's, each after products of integers that must be exact; `library` says which one ran
kernel      bytes that each kernel of a training step must move, divided by its time, as a share of the copy's GB/s;
            the target is 75 %

Times are medians of CUDA-graph replays, so that Python's launches do not count. Rows are written as they come, what is
worth most first. Exit code 0: all were measured, whatever they reach; 1: one failed; 3: there is no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from fp4train.quantize import Decoded, QuantSpec, triton as kernels

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
class Kernel:
    """A kernel of a training step: the amax of x or, by the names of specs, codes or values of x, of
    both forms where there is a `column`.
    """

    row: str
    codes: bool = False
    column: str = ""
    column_codes: bool = False

    @property
    def name(self) -> str:
        forms = ("codes" if self.codes else "values") + f" of {self.row}"
        if self.column:
            forms += f", {'codes' if self.column_codes else 'values'} of {self.column} of x.T"
        return forms

    def call(self, x: Tensor) -> Callable[[], object]:
        row = kernels.TritonQuantizer(SPECS[self.row])
        if self.column:
            column = kernels.TritonQuantizer(SPECS[self.column])
            forms = (self.codes, self.column_codes)
            return lambda: row.with_columns(column, x, (FIRST, FIRST), (None, None), forms)
        make = row.codes if self.codes else row.values
        return lambda: make(x, FIRST, None)

    def bytes(self, elements: int) -> float:
        """Bytes that it must move: x is read twice where an amax comes first."""
        spec = SPECS[self.row]
        moved = 2 * elements * (1 + spec.has_outer_scale) + written(spec, elements, self.codes)
        if self.column:
            moved += written(SPECS[self.column], elements, self.column_codes)
        return moved


KERNELS = (
    Kernel("nvfp4", False, "nvfp4 hadamard", True),
    Kernel("nvfp4 stochastic", False, "nvfp4 hadamard stochastic", False),
    Kernel("nvfp4 16x16"),
    Kernel("mxfp8 e4m3"),
    Kernel("nvfp4", True, "nvfp4 hadamard", True),
    Kernel("nvfp4 stochastic", True, "nvfp4 hadamard stochastic", True),
    Kernel("mxfp8 e4m3", True, "mxfp8 e4m3", True),
    Kernel("fp8 tensor e4m3", True, "fp8 tensor e4m3", True),
)
"""Of emulation, and of products of codes."""


def written(spec: QuantSpec, elements: int, codes: bool) -> float:
    """Bytes of codes and block scales, or of values in BF16."""
    if not codes:
        return 2 * elements
    columns = spec.block[1]
    return elements * (spec.format.bits / 8 + (0 if columns is None else 1 / columns))


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
    layer = Layer(name="layer", in_features=x.shape[1], out_features=x.shape[0], block=0, blocks=1)
    recipes: dict[str, Recipe] = {"FP8": FP8Current(), "MXFP8": MXFP8(), "NVFP4": NVFP4()}
    for name, recipe in recipes.items():
        table = recipe.table()
        if NATIVE.why_not(table, "fprop", layer, device) is None:
            spec = table["fprop"].first
            assert spec is not None
            codes = kernels.TritonQuantizer(spec).in_tiles.codes(x)
            yield name, partial(NATIVE.product, codes, codes, out_dtype=torch.bfloat16)


def multiplied(scaled: ScaledProducts, x: Tensor) -> Tensor:
    """The product x·xᵀ with its scales, as emulation makes it."""
    operand = Decoded(x, torch.full((), 0.01, device=x.device))
    return scaled.product(operand, operand, out_dtype=torch.bfloat16)


def integer_product(
    scaled: ScaledProducts, kind: str, sizes: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """A product [R, S] of integers with sums over C, which are exact in float32, and what it must
    be; sizes: R, S, C.
    """
    rows, cols, depth = sizes
    dtype = torch.float16 if kind in ("turned", "rows") else torch.bfloat16
    places = torch.arange(depth)
    a = ((torch.arange(rows)[:, None] * 37 + places * 53) % 201 - 100).to(dtype)
    b = ((torch.arange(cols)[:, None] * 91 + places * 17) % 129 - 64).to(dtype)
    sums = (a.double() @ b.double().T).float()
    first, second = torch.tensor([0.5, 0.25], dtype=torch.float32).unbind()
    if kind == "rows":
        first = first * (1 + torch.arange(rows, dtype=torch.float32)[:, None])
    exact = sums * first * second
    if kind == "turned":
        a = a.T.contiguous().T
        b = b.T.contiguous().T
    left = Decoded(placed(a, device), first.to(device))
    right = Decoded(placed(b, device), second.to(device))
    if kind == "added":
        total = (torch.arange(rows * cols) % 101 - 50.0).to(torch.float32).reshape(rows, cols)
        on_device = total.to(device, copy=True)
        scaled.add(on_device, left, right)
        return on_device, total + exact
    bias = (torch.arange(cols) % 13 - 6.0).to(dtype) if kind == "bias" else None
    given = None if bias is None else bias.to(device)
    product = scaled.product(left, right, out_dtype=dtype, bias=given)
    return product, (exact if bias is None else exact + bias.float()).to(dtype)


def placed(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, with its strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def scaled_row(way: str, x: Tensor) -> dict[str, Any]:
    """The row of products whose scales one library applies, or of integers that it multiplies
    wrongly.
    """
    scaled = ScaledProducts(way)  # type: ignore[arg-type]
    for sizes in INTEGER_SIZES if x.is_cuda else TINY_INTEGER_SIZES:
        for kind in INTEGERS:
            product, exact = integer_product(scaled, kind, sizes, x.device)
            if not torch.equal(product.cpu(), exact):
                wrong = int((product.cpu() != exact).sum())
                raise RuntimeError(f"{wrong} of {exact.numel()} products differ: {kind}, {sizes}")
    reason = scaled.why_triton(x.device)
    library = {"library": "cuBLAS" if reason is None else "Triton", "why not cuBLAS": reason}
    return product_row(partial(multiplied, scaled, x), len(x)) | library


def product_row(call: Callable[[], object], side: int) -> dict[str, Any]:
    us = microseconds(call)
    return {"us": us, "TFLOP/s": 2 * side**3 / us / 1e6}


def copy_row(x: Tensor, rates: dict[str, float]) -> dict[str, Any]:
    """The copy's row; its rate is kept for those of the kernels."""
    y = torch.empty_like(x)
    us = microseconds(lambda: y.copy_(x))
    rates["copy"] = 2 * x.numel() * x.element_size() / us / 1e3
    return {"us": us, "GB/s": rates["copy"]}


def kernel_row(call: Callable[[], object], moved: float, rates: dict[str, float]) -> dict[str, Any]:
    us = microseconds(call)
    rate = moved / us / 1e3
    share = rate / rates["copy"]
    row = {"us": us, "bytes": moved, "GB/s": rate, "of copy": share}
    return row | {"below target": share < TARGET}


def measurements(x: Tensor) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name of a row, what measures it): the copy first, of which the kernels are shares."""
    rates: dict[str, float] = {}
    yield "copy", partial(copy_row, x, rates)
    side = min(len(x), LARGEST_PRODUCT)
    square = x[:side, :side].contiguous()
    for name, call in products(square):
        yield f"product {name}", partial(product_row, call, side)
    for way in ("cublas", "triton"):
        yield f"product BF16 with two scales, {way}", partial(scaled_row, way, square)
    amax = kernels.TritonQuantizer(SPECS["nvfp4"]).amax
    yield "kernel amax", partial(kernel_row, partial(amax, x), 2 * x.numel(), rates)
    for kernel in KERNELS:
        moved = kernel.bytes(x.numel())
        yield f"kernel {kernel.name}", partial(kernel_row, kernel.call(x), moved, rates)


def main(words: list[str] | None = None) -> int:
    parser = gpu_results.options(__doc__)
    parser.add_argument("--size", type=int, default=SIZE, help="rows and columns of the tensors")
    given = parser.parse_args(words)
    gpu_results.needs_gpu(given)
    if given.dry_run:
        gpu_stand_ins.interpret()
    results = gpu_results.Results(given.out)
    size = TINY if given.dry_run else given.size
    device = "cpu" if given.dry_run else "cuda"
    for name, measure in measurements(torch.randn(size, size, device=device).bfloat16()):
        if name == "copy":
            results.rows = [row for row in results.rows if row["name"] != name]
        results.measure(name, measure)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
