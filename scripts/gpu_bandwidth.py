"""The time of the Triton kernels on a GPU, beside that of a device-to-device copy; `gpu_kernels.py` calls it.

Bytes that a kernel must move, divided by its time, as a share of what a copy of the same tensor reaches. Times are
medians of CUDA-graph replays, so that Python's launches do not count. The target is 75 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_cases import KEY, SPECS
from torch import Tensor

from fp4train.quantize import produced
from fp4train.quantize import triton as kernels

TARGET = 0.75


@dataclass(frozen=True)
class Timing:
    """One kernel's time on x, and the bytes it must move."""

    name: str
    call: Callable[[], object]
    bytes: int


def timings(x: Tensor) -> list[Timing]:
    """What a training step calls, on x [tokens, features] BF16. The amax is given, so that each line is one kernel."""
    amax = x.abs().amax().float()
    n = x.numel()
    key = KEY.replace(row_offset=0, col_offset=0)
    plain, codes4, codes8 = 2 * n, n // 2 + n // 16, n + n // 32
    names = ("nvfp4", "nvfp4 hadamard", "nvfp4 stochastic", "nvfp4 hadamard stochastic", "nvfp4 16x16")
    nvfp4, had, stochastic, had_stochastic, square = (kernels.TritonQuantizer(SPECS[name]) for name in names)
    mxfp8, tensor8 = (kernels.TritonQuantizer(SPECS[name]) for name in ("mxfp8 e4m3", "fp8 tensor e4m3"))
    saved4, saved8 = nvfp4.codes(x, None, amax), mxfp8.codes(x)

    random = stochastic, had_stochastic

    def both(row: kernels.TritonQuantizer, column: kernels.TritonQuantizer, given: Tensor | None) -> object:
        return row.with_columns(column, x, key, given, key, given, True, True)

    second, third = x.clone(), x.clone()  # of their own memory, which no cache holds after x was read

    # The tensors that x is made of, read twice where an amax comes first, and the codes of all results.
    norm = produced.SourceTensors("norm", (x, x[0].clone(), torch.empty(len(x), device=x.device)), 1e-5)
    summed = norm._replace(tensors=(torch.empty_like(x), *norm.tensors[1:], x, second))
    gate = produced.SourceTensors("gate", (x, second))
    gradients = produced.SourceTensors("gradients", (x, second, third))
    backward = partial(produced.norm_backward, x, second, *norm.tensors[1:])
    none, drawn = [(None, None)], [(key, key)] * 2
    made = [
        ("nvfp4", (nvfp4, had), none, norm, 2 * plain + 2 * codes4),
        ("nvfp4", (nvfp4, had), none, summed, 4 * plain + 2 * codes4),
        ("nvfp4", (nvfp4, had), none, gate, 4 * plain + 2 * codes4),
        ("nvfp4 stochastic", random, drawn, gradients, 6 * plain + 4 * codes4),
        ("mxfp8", (mxfp8, mxfp8), none, norm, plain + 2 * codes8),
        ("mxfp8", (mxfp8, mxfp8), none, summed, 3 * plain + 2 * codes8),
        ("mxfp8", (mxfp8, mxfp8), none, gate, 2 * plain + 2 * codes8),
        ("mxfp8", (mxfp8, mxfp8), drawn, gradients, 3 * plain + 4 * codes8),
        ("fp8 tensor", (tensor8, tensor8), none, norm, 2 * plain + 2 * n),
        ("fp8 tensor", (tensor8, tensor8), none, summed, 4 * plain + 2 * n),
        ("fp8 tensor", (tensor8, tensor8), none, gate, 4 * plain + 2 * n),
        ("fp8 tensor", (tensor8, tensor8), drawn, gradients, 6 * plain + 4 * n),
    ]

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
            "nvfp4 hadamard stochastic codes, columns", lambda: had_stochastic.codes(x.T, key, amax), plain + codes4
        ),
        Timing("nvfp4 hadamard stochastic values, columns", lambda: had_stochastic.values(x.T, key, amax), 2 * plain),
        Timing("nvfp4 16x16 codes", lambda: square.codes(x, None, amax), plain + n // 2 + n // 256),
        Timing("nvfp4 16x16 values", lambda: square.values(x, None, amax), 2 * plain),
        Timing("nvfp4 decode", lambda: nvfp4.decode(saved4), plain + codes4),
        Timing("mxfp8 codes", lambda: mxfp8.codes(x), plain + codes8),
        Timing("mxfp8 values", lambda: mxfp8.values(x), 2 * plain),
        Timing("mxfp8 codes, columns", lambda: mxfp8.codes(x.T), plain + codes8),
        Timing("mxfp8 decode", lambda: mxfp8.decode(saved8), plain + codes8),
        Timing("nvfp4 codes of both forms", lambda: both(nvfp4, had, amax), plain + 2 * codes4),
        Timing("nvfp4 stochastic codes of both forms", lambda: both(*random, amax), plain + 2 * codes4),
        Timing("nvfp4 codes of both forms, and amaxes", lambda: both(nvfp4, had, None), 2 * plain + 2 * codes4),
        Timing("mxfp8 codes of both forms", lambda: both(mxfp8, mxfp8, None), plain + 2 * codes8),
        Timing("fp8 tensor codes of both forms", lambda: both(tensor8, tensor8, amax), plain + 2 * n),
        Timing("fp8 tensor codes of both forms, and amax", lambda: both(tensor8, tensor8, None), 2 * plain + 2 * n),
        *(
            Timing(f"{name} codes of {source.kind}{of_sum}", partial(produced.produce, *pair, source, keys), moved)
            for name, pair, keys, source, moved in made
            for of_sum in [" of a sum" * (source is summed)]
        ),
        Timing("gradients of norm", backward, int(produced.NORM_BACKWARD * n)),
        Timing(
            "gradients of norm, one added",
            partial(backward, added_MK=third),
            int((produced.NORM_BACKWARD + produced.ADDED) * n),
        ),
        Timing("fp8 tensor codes", lambda: tensor8.codes(x, None, amax), plain + n),
        Timing("fp8 tensor values", lambda: tensor8.values(x, None, amax), 2 * plain),
    ]


def microseconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Median GPU time of a call, from replays of a CUDA graph of it."""
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


def bandwidth(rows: int, cols: int) -> tuple[float, list[dict[str, Any]]]:
    """(GB/s of the copy, one row a kernel), printed as they come."""
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = 2 * x.numel() * x.element_size() / microseconds(lambda: y.copy_(x)) / 1e3
    print(f"\ncopy of {rows}x{cols} BF16: {copy:.0f} GB/s; target {TARGET:.0%} of it\n")
    print(f"{'kernel':44s} {'us':>9s} {'GB/s':>7s} {'of copy':>8s}")
    table = []
    for timing in timings(x):
        time = microseconds(timing.call)
        rate = timing.bytes / time / 1e3
        row = {"kernel": timing.name, "us": time, "bytes": timing.bytes, "gb_per_s": rate, "share_of_copy": rate / copy}
        table.append(row)
        print(
            f"{timing.name:44s} {time:9.1f} {rate:7.0f} {rate / copy:8.1%}{'' if rate >= TARGET * copy else '  below'}"
        )
    return copy, table
