"""Where a training step of llama_1b goes on a GPU, with a real vocabulary:

    python scripts/gpu_profile.py --out NAME-profile.json [--dry-run]

For BF16, FP8 and NVFP4, each eager, compiled and recorded, with 16,384 tokens in one and in
eight microbatches; for BF16 also with queries, keys and values, and gate and up, as one product; on Blackwell NVFP4
also on torch's products, with and without norms and gates that are quantised where they are made:

    step ms           median of steps that are waited for
    host ms           of that, until the host has queued the step; near `step ms` the GPU waits for the host
    gpu ms            sum of the kernels' times of one step, and by kind
    kernels           the 15 that take longest: name, calls, ms
    attention         the operators of attention that torch chose
    peak GiB          memory in use at most, and reserved
    tokens/s, MFU     where the GPU's peak is known

Each is a process of its own; those of a file that is there already are not measured again. Exit code 0: all were
measured; 1: one failed; 3: there is no GPU.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import gpu_runs
import gpu_stand_ins
import torch
from benchmark_report import synchronize
from benchmark_steps import built_run, real_vocabulary
from torch.profiler import ProfilerActivity, profile

from fp4train.run.run import Run
from fp4train.run.step_graph import WARM_UP
from fp4train.train import enter_stretch, train_step

RECIPES = ("bf16", "fp8_current", "nvfp4")
MODES = {
    "eager": (),
    "compiled": ("train.compile=true",),
    "recorded": ("train.cuda_graph=true",),
}
NATIVE = {
    "native": ("backend=native",),
    "native, norms and gates in BF16": ("backend=native", "train.kernels=torch"),
}
"""Modes of GPUs whose products take NVFP4's codes: with and without norms and gates quantised where they are made."""
MICROBATCHES = (1, 8)
MODEL = ("model=llama_1b", "train.batch_size=8", "train.seq_len=2048", "phases=none", "policy=all", "eval.every=0")
TINY = (
    "train.seq_len=4",
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=32",
)
SHOWN, MEASURED = 15, 5
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|mem_eff",
    "quantise": r"quantize|amax|cast_transpose|rht|hadamard|decode_blocks",
    "GEMM": r"gemm|nvjet|cutlass|cublas|xmma|\bmm\b|addmm|bmm|matmul",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "loss": r"softmax|nll|cross_entropy|scatter|gather",
    "norm": r"norm",
}
"""Kinds of kernels by their names, the first that fits; the rest is elementwise and copies."""


def variants() -> list[tuple[str, str, int]]:
    """The most telling first: a part that ends after eight minutes goes on when it is called again."""
    found = [(recipe, mode, count) for count in MICROBATCHES for mode in MODES for recipe in RECIPES]
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
    found += [("nvfp4", mode, 1) for mode in (NATIVE if blackwell else ())]
    return found


def few_variants() -> list[tuple[str, str, int]]:
    """Those of a dry run: each way with each number of microbatches, in the recipes by turns."""
    found, known = [], variants()
    for place, (mode, count) in enumerate((mode, count) for mode in MODES for count in MICROBATCHES):
        recipe = RECIPES[place % len(RECIPES)]
        found.append((recipe if (recipe, mode, count) in known else "bf16", mode, count))
    return found


def label(recipe: str, mode: str, count: int) -> str:
    return f"{recipe}, {mode}, {count} microbatch{'es' * (count > 1)}"


def kind_of(name: str) -> str:
    """What a kernel belongs to."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "elementwise, copies")


def timed(run: Run) -> tuple[float, float]:
    """Seconds of one step: until it is queued, and until it is done."""
    synchronize(run.device)
    began = time.perf_counter()
    done = train_step(run, run.plan.at(run.step).recipe)
    queued = time.perf_counter() - began
    synchronize(run.device)
    ended = time.perf_counter() - began
    done.read()
    run.step, run.mid_update = run.step + 1, False
    return queued, ended


def kernels_of(run: Run) -> tuple[list[tuple[str, int, float]], list[str]]:
    """((name, calls, ms) of the kernels of one step, the longest first; the operators of attention)."""
    on_gpu = run.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        timed(run)
    events = found.key_averages()
    attention = sorted({e.key for e in events if "scaled_dot_product" in e.key or "_sdpa" in e.key})
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    rows = [
        (e.key, e.count, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1000)
        for e in events
        if e.device_type == wanted
    ]
    return sorted(rows, key=lambda each: -each[2]), attention


def measure(recipe: str, mode: str, count: int, *, dry: bool) -> dict[str, Any]:
    """The row of one variant."""
    device = torch.device("cpu" if dry else "cuda")
    with ExitStack() as stack:
        data = real_vocabulary(seq_len=4, ids=257) if dry else real_vocabulary(seq_len=2048)
        words = [*MODEL, *stack.enter_context(data), f"recipe={recipe}"]
        words += [f"train.microbatch={8 // count}", *(TINY if dry else ())]
        words += stack.enter_context(gpu_stand_ins.instead_of(MODES[mode])) if dry else (MODES | NATIVE)[mode]
        run, _ = stack.enter_context(built_run(device, words))
        enter_stretch(run, None)
        for _ in range(WARM_UP + 2):
            timed(run)
        if not dry:
            torch.cuda.reset_peak_memory_stats()
        pairs = [timed(run) for _ in range(1 if dry else MEASURED)]
        host, step = (statistics.median(each) for each in zip(*pairs, strict=True))
        kernels, attention = kernels_of(run)
        peak = run.peak_tokens_per_s()
        tokens = run.config.train.tokens
    by_kind: dict[str, float] = {}
    for name, _, ms in kernels:
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + ms
    row: dict[str, Any] = {"name": label(recipe, mode, count), "ok": True, "backends": backends(run)}
    row |= {"step ms": 1000 * step, "host ms": 1000 * host, "gpu ms": sum(by_kind.values()), "by kind": by_kind}
    row |= {"launches": sum(calls for _, calls, _ in kernels), "kernels": kernels[:SHOWN], "attention": attention}
    row |= {"tokens/s": tokens / step, "MFU": None if peak is None else tokens / step / peak}
    if not dry:
        row |= {"peak GiB": torch.cuda.max_memory_allocated() / 2**30}
        row |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30}
    return row


def backends(run: Run) -> list[str]:
    """On what the GEMMs run."""
    return sorted({row.backend for row in run.plan.rows})


def main(words: list[str] | None = None) -> int:
    given = gpu_runs.options(__doc__, words, "a tiny model on a CPU, with stand-ins")
    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu_profile: torch sees no GPU")
        return 3
    if given.only:
        (variant,) = [each for each in variants() if label(*each) == given.only]
        print(json.dumps(measure(*variant, dry=False)))
        return 0
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    if given.dry_run:
        for variant in few_variants():
            results.add(measure(*variant, dry=True))
        return results.code
    for variant in variants():
        if not results.has(label(*variant)):
            results.add(gpu_runs.alone(__file__, label(*variant)))
    return results.code


if __name__ == "__main__":
    sys.exit(main())
