"""Where a training step of llama_1b goes on a GPU, with a real vocabulary:

    python scripts/gpu_profile.py --out NAME-profile.json [--nine] [--dry-run]

Recipes and modes (eager, emulated, native, compiled, recorded) with 16,384 tokens in one and in eight microbatches;
`--nine`: those that `NINE` names, in one, with BF16 again after those that share its model: clocks drift.

    step ms           one of ten steps that are queued, with one wait at the end; a training run queues a step before it
                      waits for the one before
    waited ms         median of steps that are waited for, each from an empty queue
    host ms           of that, until the host has queued the step; near `step ms` the GPU waits for the host
    SM MHz, W         the GPU's clock and power behind the queued steps
    gpu ms            sum of the kernels' times of one step, and by kind
    kernels           the 15 that take longest: name, calls, ms, share of the GPU's time
    operators         the 15 operators whose kernels take longest: name, shapes, calls, ms
    attention         the operators of attention that torch chose
    peak GiB          memory in use at most, and reserved
    tokens/s, MFU     where the GPU's peak is known

Variants that differ in their plan alone share a model, which gets one plan after the other. After one that fails, whose
error may have taken the GPU from this process, each of the others is a process of its own. Rows are written as they
come. Exit code 0: all were measured; 1: one failed; 3: there is no GPU.
"""

from __future__ import annotations

import gc
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gpu_results
import gpu_stand_ins
import torch
from benchmark_report import synchronize
from benchmark_steps import built_run, real_vocabulary
from omegaconf import DictConfig
from torch.profiler import ProfilerActivity, profile

from fp4train.config.composition import compose
from fp4train.config.schema import to_config
from fp4train.precision import Timeline
from fp4train.run.build import build_plan
from fp4train.run.run import Run
from fp4train.run.step_graph import WARM_UP
from fp4train.train import enter_stretch, train_step

MODES: dict[str, tuple[str, ...]] = {
    "eager": (),
    "eager again": (),
    "emulated": ("backend=emulate",),
    "native": ("backend=native",),
    "compiled": ("train.compile=true",),
    "recorded": ("train.cuda_graph=true",),
}
SWAPPED = ("eager", "eager again", "emulated", "native")
"""Modes that differ in their plan alone."""
Variant = tuple[str, str, int]
"""Recipe, mode, number of microbatches."""
NINE: tuple[Variant, ...] = (
    ("bf16", "eager", 1),
    ("fp8_current", "eager", 1),
    ("fp8_delayed", "eager", 1),
    ("nvfp4", "emulated", 1),
    ("mxfp8", "emulated", 1),
    ("fp8_block", "eager", 1),
    ("nvfp4", "native", 1),
    ("bf16", "eager again", 1),
    ("fp8_current", "recorded", 1),
    ("nvfp4", "recorded", 1),
)
"""Those that share a model first, BF16 at both ends; where products take no codes of NVFP4 without
`native`.
"""
OTHERS: tuple[Variant, ...] = (
    *((recipe, "compiled", 1) for recipe in ("bf16", "fp8_current", "nvfp4")),
    ("bf16", "recorded", 1),
    *(
        (recipe, mode, 8)
        for mode in ("eager", "compiled", "recorded")
        for recipe in ("bf16", "nvfp4")
    ),
)
MODEL = (
    "model=llama_1b",
    "train.batch_size=8",
    "train.seq_len=2048",
    "phases=none",
    "policy=all",
    "eval.every=0",
)
TINY = (
    "train.seq_len=4",
    "model.width=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=32",
)
SHOWN = 15
MEASURED = 5
QUEUED = 10
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|mem_eff",
    "quantise": r"quantize|amax|cast_transpose|rht|hadamard|decode_(blocks|codes)|product_factors",
    "GEMM": r"gemm|scaled_product|nvjet|cutlass|cublas|xmma|\bmm\b|addmm|bmm|matmul",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "loss": r"softmax|nll|cross_entropy|scatter|gather",
    "norm": r"norm",
}
"""Kinds of kernels by their names, the first that fits; the rest is elementwise and copies."""


def label(variant: Variant) -> str:
    recipe, mode, count = variant
    return f"{recipe}, {mode}, {count} microbatch{'es' * (count > 1)}"


def runs_here(variant: Variant) -> bool:
    on_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
    return variant[1] != "native" or on_blackwell


def kind_of(name: str) -> str:
    """What a kernel belongs to."""
    kinds = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(kinds, "elementwise, copies")


def timed(run: Run) -> tuple[float, float]:
    """Seconds of one step: until it is queued, and until it is done."""
    synchronize(run.device)
    began = time.perf_counter()
    done = train_step(run, run.course.plan.at(run.step).recipe)
    queued = time.perf_counter() - began
    synchronize(run.device)
    ended = time.perf_counter() - began
    done.read()
    run.step += 1
    run.mid_update = False
    return queued, ended


def queued_ms(run: Run, count: int) -> dict[str, float]:
    """The time of a step of `count` that are queued, with one wait, and the GPU's state behind
    them.
    """
    recipe = run.course.plan.at(run.step).recipe

    def steps() -> None:
        for _ in range(count):
            train_step(run, recipe)
            run.step += 1
            run.mid_update = False

    if run.device.type != "cuda":
        began = time.perf_counter()
        steps()
        return {"step ms": 1000 * (time.perf_counter() - began) / count}
    synchronize(run.device)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    steps()
    last.record()
    clock = gpu_results.clock()  # the GPU still works
    synchronize(run.device)
    return {"step ms": first.elapsed_time(last) / count, **clock}


def profiled(run: Run) -> dict[str, Any]:
    """Of one step the time of kernels, by their kind and by their operators, and the operators of
    attention.
    """
    device = "CUDA" if run.device.type == "cuda" else "CPU"
    activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, device)}
    with profile(activities=activities, record_shapes=True) as profiler:
        timed(run)
    by_name = profiler.key_averages()
    by_shape = profiler.key_averages(group_by_input_shape=True)
    return profiled_row(by_name, by_shape, device)


def profiled_row(by_name: Iterable[Any], by_shape: Iterable[Any], device: str) -> dict[str, Any]:
    """The row of the events of a step, by name and by name and shapes. A range that a program
    names (`record_function`) is no kernel: its time is that of kernels which are events, too.
    """

    def ms(event: Any) -> float:
        on_device = device == "CUDA"
        us = event.self_device_time_total if on_device else event.self_cpu_time_total
        return float(us) / 1000

    events = sorted(by_name, key=ms, reverse=True)
    kernels = [
        event
        for event in events
        if event.device_type.name == device and not event.is_user_annotation
    ]
    total = sum(map(ms, kernels))
    by_kind: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_kind[kind_of(kernel.key)] += ms(kernel)
    operators = [event for event in by_shape if event.device_type.name == "CPU"]
    operators.sort(key=ms, reverse=True)
    attention = {event.key for event in events if re.search("scaled_dot_product|_sdpa", event.key)}
    return {
        "gpu ms": total,
        "by kind": dict(by_kind),
        "launches": sum(kernel.count for kernel in kernels),
        "kernels": [(e.key, e.count, ms(e), ms(e) / max(total, 1e-9)) for e in kernels[:SHOWN]],
        "operators": [(e.key, str(e.input_shapes), e.count, ms(e)) for e in operators[:SHOWN]],
        "attention": sorted(attention),
    }


def key_words(recipe: str, mode: str, count: int) -> list[str]:
    """Keys of a run, without its data."""
    return [*MODEL, f"recipe={recipe}", f"train.microbatch={8 // count}", *MODES[mode]]


@contextmanager
def prepared(words: list[str], *, dry: bool) -> Iterator[Run]:
    """A run ready to train on random ids of a real vocabulary; in a dry run a tiny one on a CPU."""
    with ExitStack() as stack:
        if dry:
            device = "cpu"
            data = stack.enter_context(real_vocabulary(seq_len=4, ids=257))
            words = stack.enter_context(gpu_stand_ins.instead_of([*words, *data, *TINY]))
        else:
            device = "cuda"
            words = [*words, *stack.enter_context(real_vocabulary(seq_len=2048))]
        run, _ = stack.enter_context(built_run(torch.device(device), words))
        enter_stretch(run, None)
        yield run


class Measurer:
    """Measures variants, one after the other."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.shared: Run | None = None
        self._stack = ExitStack()

    def row(self, variant: Variant) -> dict[str, Any]:
        recipe, mode, count = variant
        swapped = mode in SWAPPED and count == 1
        if self.shared is not None and swapped:
            swap(self.shared, recipe, mode)
            return measure(self.shared, dry=self.dry)
        self.close()
        run = self._stack.enter_context(prepared(key_words(*variant), dry=self.dry))
        self.shared = run if swapped else None
        return measure(run, dry=self.dry)

    def close(self) -> None:
        """Give the memory of the model back."""
        self.shared = None
        self._stack.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(run: Run, *, dry: bool) -> dict[str, Any]:
    """The row of a run with the plan that is applied to it."""
    for _ in range(WARM_UP + 2):
        timed(run)
    if not dry:
        torch.cuda.reset_peak_memory_stats()
    pairs = [timed(run) for _ in range(1 if dry else MEASURED)]
    host, waited = (statistics.median(column) for column in zip(*pairs, strict=True))
    queued = queued_ms(run, 1 if dry else QUEUED)
    step = queued["step ms"] / 1000
    peak = run.peak_tokens_per_s()
    tokens = run.config.train.step_tokens
    row: dict[str, Any] = {"backends": sorted({row.backend for row in run.course.plan.rows})}
    row |= queued | {"waited ms": 1000 * waited, "host ms": 1000 * host, **profiled(run)}
    row |= {"tokens/s": tokens / step, "MFU": peak and tokens / step / peak}
    if not dry:
        row |= {"peak GiB": torch.cuda.max_memory_allocated() / 2**30}
        row |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30}
    return row


def swap(run: Run, recipe: str, mode: str) -> None:
    """Apply to a run the plan of another recipe and backend, from the next step on."""
    cfg = compose(key_words(recipe, mode, 1))
    assert isinstance(cfg, DictConfig)
    config = to_config(cfg)
    timeline = Timeline(recipe=config.recipe, steps=run.config.train.steps)
    run.course.plan = build_plan(
        replace(run.config, backend=config.backend), run.layers, timeline, run.course.plan.device
    )
    run.apply(run.course.plan.stretches[0])


def main(words: list[str] | None = None) -> int:
    parser = gpu_results.options(__doc__)
    parser.add_argument("--nine", action="store_true", help="few variants")
    parser.add_argument("--only", help="the variant of this name")
    options, results = gpu_results.begin(parser, words)
    chosen = NINE if options.nine or options.dry_run else (*NINE, *OTHERS)
    pending = [v for v in chosen if runs_here(v) and options.only in (None, label(v))]
    measurer = Measurer(dry=options.dry_run)
    while pending:
        variant = pending.pop(0)
        if not results.measure(label(variant), partial(measurer.row, variant)):
            break
    measurer.close()
    for variant in pending:
        command = [sys.executable, __file__, "--out", str(options.out), "--only", label(variant)]
        subprocess.run(command)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
