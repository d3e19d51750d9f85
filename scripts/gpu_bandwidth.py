"""What this GPU's memory and tensor cores reach, and the Triton kernels beside it:

    python scripts/gpu_bandwidth.py --out NAME-bandwidth.json [--few] [--dry-run]

copy        GB/s of a device-to-device copy, which reads and writes
products    TFLOP/s of torch's products: BF16 into BF16 and into float32; FP8 with one scale; NVFP4 and MXFP8 where
            tensor cores multiply them; and of emulation's, whose scales are applied in cuBLAS's product and in
            Triton's, each after products of integers that must be exact; `library` says which one ran
kernels     bytes that each must move, divided by its time, as a share of the copy's GB/s; the target is 75 %

Times are medians of CUDA-graph replays, so that Python's launches do not count. `--few` times the kernels alone that
take most of a training step. Rows are written as they come; those of a file that is there already are not measured
again. Exit code 0: all were measured, whatever they reach; 1: one failed; 3: there is no GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpu_runs
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
FEW = (
    "amax",
    "nvfp4 values and codes of both forms, and amaxes",
    "nvfp4 stochastic values of both forms, and amaxes",
    "nvfp4 16x16 values",
    "mxfp8 values",
    "nvfp4 codes of both forms, and amaxes",
    "mxfp8 codes of both forms",
    "fp8 tensor codes of both forms, and amax",
)
"""Kernels of `--few`: of emulation, and of products of codes."""
SIZE = 16384
TINY = 64
"""Rows and columns of the timed tensors, and those of a dry run."""
LARGEST_PRODUCT = 8192
"""Rows and columns of the multiplied matrices, at most."""


@dataclass(frozen=True, kw_only=True)
class IntegerCase:
    """A kind of product of integers. turned: the columns of both operands are contiguous. rows: the
    first operand has a scale per row. bias: one is added. adds: the product is added to a float32
    sum.
    """

    dtype: torch.dtype
    turned: bool = False
    rows: bool = False
    bias: bool = False
    adds: bool = False


INTEGER_SIZES = (512, 512, 256), (301, 215, 137)
TINY_INTEGER_SIZES = (64, 64, 32), (33, 17, 40)
"""R, S and C of products of integers: whole tiles and others."""
INTEGER_CASES = (
    IntegerCase(dtype=torch.bfloat16),
    IntegerCase(dtype=torch.float16, turned=True),
    IntegerCase(dtype=torch.bfloat16, turned=True, adds=True),
    IntegerCase(dtype=torch.float16, rows=True),
    IntegerCase(dtype=torch.bfloat16, bias=True),
)


@dataclass(frozen=True)
class Timing:
    """One kernel's time on x, and the bytes it must move."""

    name: str
    call: Callable[[], object]
    bytes: int


def timings(x: Tensor) -> list[Timing]:
    """What a training step calls, on x [tokens, features] BF16. The amax is given, so that each
    line is one kernel.
    """
    amax = x.abs().amax().float()
    n = x.numel()
    key = KEY.replace(row_offset=0, col_offset=0)
    plain = 2 * n
    codes4 = n // 2 + n // 16
    codes8 = n + n // 32
    names = (
        "nvfp4",
        "nvfp4 hadamard",
        "nvfp4 stochastic",
        "nvfp4 hadamard stochastic",
        "nvfp4 16x16",
    )
    nvfp4, had, stochastic, had_stochastic, square = (
        kernels.TritonQuantizer(SPECS[name]) for name in names
    )
    mxfp8, tensor8 = (
        kernels.TritonQuantizer(SPECS[name]) for name in ("mxfp8 e4m3", "fp8 tensor e4m3")
    )
    saved4 = nvfp4.codes(x, None, amax)
    saved8 = mxfp8.codes(x)

    random = stochastic, had_stochastic

    def both(
        row: kernels.TritonQuantizer,
        column: kernels.TritonQuantizer,
        given: Tensor | None,
        codes: tuple[bool, bool] = (True, True),
    ) -> object:
        return row.with_columns(column, x, key, given, key, given, *codes)

    return [
        Timing("amax", lambda: nvfp4.amax(x), plain),
        Timing("amax hadamard, columns", lambda: had.amax(x.T), plain),
        Timing("amax per row", lambda: nvfp4.amax(x, per_row=True), plain),
        Timing("nvfp4 codes", lambda: nvfp4.codes(x, None, amax), plain + codes4),
        Timing("nvfp4 values", lambda: nvfp4.values(x, None, amax), 2 * plain),
        Timing("nvfp4 stochastic codes", lambda: stochastic.codes(x, key, amax), plain + codes4),
        Timing("nvfp4 stochastic values", lambda: stochastic.values(x, key, amax), 2 * plain),
        Timing("nvfp4 codes, columns", lambda: nvfp4.codes(x.T, None, amax), plain + codes4),
        Timing("nvfp4 hadamard codes, columns", lambda: had.codes(x.T, None, amax), plain + codes4),
        Timing("nvfp4 hadamard values, columns", lambda: had.values(x.T, None, amax), 2 * plain),
        Timing(
            "nvfp4 hadamard stochastic codes, columns",
            lambda: had_stochastic.codes(x.T, key, amax),
            plain + codes4,
        ),
        Timing(
            "nvfp4 hadamard stochastic values, columns",
            lambda: had_stochastic.values(x.T, key, amax),
            2 * plain,
        ),
        Timing("nvfp4 16x16 codes", lambda: square.codes(x, None, amax), plain + n // 2 + n // 256),
        Timing("nvfp4 16x16 values", lambda: square.values(x, None, amax), 2 * plain),
        Timing("nvfp4 decode", lambda: nvfp4.decode(saved4), plain + codes4),
        Timing("mxfp8 codes", lambda: mxfp8.codes(x), plain + codes8),
        Timing("mxfp8 values", lambda: mxfp8.values(x), 2 * plain),
        Timing("mxfp8 codes, columns", lambda: mxfp8.codes(x.T), plain + codes8),
        Timing("mxfp8 decode", lambda: mxfp8.decode(saved8), plain + codes8),
        Timing("nvfp4 codes of both forms", lambda: both(nvfp4, had, amax), plain + 2 * codes4),
        Timing(
            "nvfp4 stochastic codes of both forms", lambda: both(*random, amax), plain + 2 * codes4
        ),
        Timing(
            "nvfp4 codes of both forms, and amaxes",
            lambda: both(nvfp4, had, None),
            2 * plain + 2 * codes4,
        ),
        Timing(
            "nvfp4 values and codes of both forms, and amaxes",
            lambda: both(nvfp4, had, None, (False, True)),
            3 * plain + codes4,
        ),
        Timing(
            "nvfp4 stochastic values of both forms, and amaxes",
            lambda: both(*random, None, (False, False)),
            4 * plain,
        ),
        Timing("mxfp8 codes of both forms", lambda: both(mxfp8, mxfp8, None), plain + 2 * codes8),
        Timing(
            "fp8 tensor codes of both forms", lambda: both(tensor8, tensor8, amax), plain + 2 * n
        ),
        Timing(
            "fp8 tensor codes of both forms, and amax",
            lambda: both(tensor8, tensor8, None),
            2 * plain + 2 * n,
        ),
        Timing("fp8 tensor codes", lambda: tensor8.codes(x, None, amax), plain + n),
        Timing("fp8 tensor values", lambda: tensor8.values(x, None, amax), 2 * plain),
    ]


def microseconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Median GPU time of a call, from replays of a CUDA graph of it; in a dry run that of one
    call.
    """
    if not torch.cuda.is_available():  # a dry run
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def products(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of the products x·xᵀ that tensor cores of this GPU multiply."""
    yield "BF16", lambda: x @ x.T
    yield (
        "BF16 into float32",
        lambda: matmul(Decoded(x, None), Decoded(x, None), out_dtype=torch.float32),
    )
    scale = torch.full((), 0.01, device=x.device)
    operand = Decoded(x, scale)
    for way in ("cublas", "triton"):
        scaled = ScaledProducts(way)
        yield f"BF16 with two scales, {way}", partial(multiplied, scaled, operand)
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


def multiplied(scaled: ScaledProducts, operand: Decoded) -> Tensor:
    """The product x·xᵀ with its scales, as emulation makes it."""
    return scaled.product(operand, operand, out_dtype=torch.bfloat16)


def check_integers(scaled: ScaledProducts, device: torch.device) -> None:
    """RuntimeError where a product of integers, whose sums are exact in float32, has other bits
    than it must.
    """
    for sizes in INTEGER_SIZES if device.type == "cuda" else TINY_INTEGER_SIZES:
        for case in INTEGER_CASES:
            product, exact = integer_product(scaled, case, sizes, device)
            if not torch.equal(product.cpu(), exact):
                differ = (
                    f"{int((product.cpu() != exact).sum())} of {exact.numel()} exact products "
                    "differ"
                )
                raise RuntimeError(f"{differ}: {case} of {sizes}")


def integer_product(
    scaled: ScaledProducts, case: IntegerCase, sizes: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """A product [R, S] of integers with sums over C, and what it must be; sizes: R, S, C.

    What is added to a sum is a multiple of 1/8 below 2^21: no rounding of float32 changes it.
    """
    rows, cols, depth = sizes
    places = torch.arange(depth)
    a = ((torch.arange(rows)[:, None] * 37 + places * 53) % 201 - 100).to(case.dtype)
    b = ((torch.arange(cols)[:, None] * 91 + places * 17) % 129 - 64).to(case.dtype)
    sums = (a.double() @ b.double().T).float()
    first, second = torch.tensor([0.1234567, 3.7654321e-3], dtype=torch.float32).unbind()
    bias = (torch.arange(cols) % 13 - 6.0).to(case.dtype) if case.bias else None
    if case.adds:
        first, second = torch.tensor([0.5, 0.25], dtype=torch.float32).unbind()
    if case.rows:
        first = (1 + torch.arange(rows, dtype=torch.float32)[:, None]) * first
    exact = sums * first * second if case.rows else sums * (first * second)
    if case.turned:
        a = a.T.contiguous().T
        b = b.T.contiguous().T
    left = Decoded(placed(a, device), first.to(device))
    right = Decoded(placed(b, device), second.to(device))
    if case.adds:
        total = (torch.arange(rows * cols) % 101 - 50.0).to(torch.float32).reshape(rows, cols)
        on_device = total.to(device, copy=True)
        scaled.add(on_device, left, right)
        return on_device, total + exact
    product = scaled.product(
        left, right, out_dtype=case.dtype, bias=None if bias is None else bias.to(device)
    )
    return product, (exact if bias is None else exact + bias.float()).to(case.dtype)


def placed(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, with its strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def measurements(size: int, few: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name of a row, what measures it): the copy first, of which the kernels are shares."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    rates: dict[str, float] = {}
    yield "copy", partial(copy_row, x, rates)
    side = min(size, LARGEST_PRODUCT)
    for name, call in products(x[:side, :side].contiguous()):
        yield f"product {name}", partial(product_row, call, side)
    for timing in timings(x):
        if not few or timing.name in FEW:
            yield f"kernel {timing.name}", partial(kernel_row, timing, rates)


def copy_row(x: Tensor, rates: dict[str, float]) -> dict[str, Any]:
    """The copy's row; its rate is kept for those of the kernels."""
    y = torch.empty_like(x)
    us = microseconds(lambda: y.copy_(x))
    rates["copy"] = 2 * x.numel() * x.element_size() / us / 1e3
    return {"us": us, "GB/s": rates["copy"]}


def kernel_row(timing: Timing, rates: dict[str, float]) -> dict[str, Any]:
    us = microseconds(timing.call)
    rate = timing.bytes / us / 1e3
    share = rate / rates["copy"]
    return {
        "us": us,
        "bytes": timing.bytes,
        "GB/s": rate,
        "of copy": share,
        "below target": share < TARGET,
    }


def product_row(call: Callable[[], object], side: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if isinstance(call, partial) and call.func is multiplied:
        scaled, operand = call.args
        device = operand.values.device
        check_integers(scaled, device)
        reason = scaled.why_triton(device)
        row = (
            {"library": "cuBLAS"}
            if reason is None
            else {"library": "Triton", "why not cuBLAS": reason}
        )
    us = microseconds(call)
    return {"us": us, "TFLOP/s": 2 * side**3 / us / 1e6, **row}


def main(words: list[str] | None = None) -> int:
    parser = gpu_runs.options(__doc__, f"matrices of {TINY} rows on a CPU, in Triton's interpreter")
    parser.add_argument(
        "--few", action="store_true", help="the kernels that take most of a training step"
    )
    parser.add_argument(
        "--size", type=int, default=SIZE, help="rows and columns of the timed tensors"
    )
    given = parser.parse_args(words)
    if given.dry_run:
        gpu_stand_ins.interpret()
    elif not torch.cuda.is_available():
        print("gpu_bandwidth: torch sees no GPU")
        return 3
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    for name, measure in measurements(TINY if given.dry_run else given.size, given.few):
        if results.has(name) and name != "copy":
            continue
        try:
            row = {"name": name, "ok": True, **measure()}
        # of the compiler or the launch: the other kernels still tell something
        except Exception as error:
            row = {"name": name, "ok": False, "note": gpu_runs.first_line(error)}
        results.add(row)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
