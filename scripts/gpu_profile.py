"""Where a training step of llama_1b goes on a GPU, with a real vocabulary:

    python scripts/gpu_profile.py --out NAME-profile.json [--nine] [--dry-run]

For BF16, FP8 and NVFP4, each eager, compiled and recorded, with 16,384 tokens in one and in eight microbatches; on
Blackwell NVFP4 also on torch's products:

    step ms           median of steps that are waited for
    host ms           of that, until the host has queued the step; near `step ms` the GPU waits for the host
    gpu ms            sum of the kernels' times of one step, and by kind
    kernels           the 15 that take longest: name, calls, ms, share of the GPU's time
    operators         the 15 operators whose kernels take longest: name, shapes, calls, ms
    factors ms        of that, passes that multiply a matrix by one number, as emulation applies scales
    attention         the operators of attention that torch chose
    peak GiB          memory in use at most, and reserved
    tokens/s, MFU     where the GPU's peak is known

Each is a process of its own. `--nine` measures the few variants of `NINE` in this one, where the eager ones share a
model that gets one plan after the other; after one that fails the others are processes again. Rows are written as they
come; those of a file that is there already are not measured again. Exit code 0: all were measured; 1: one failed; 3:
there is no GPU.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import gpu_runs
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

RECIPES = ("bf16", "fp8_current", "nvfp4")
MODES: dict[str, tuple[str, ...]] = {
    "eager": (),
    "compiled": ("train.compile=true",),
    "recorded": ("train.cuda_graph=true",),
}
NATIVE = {"native": ("backend=native",)}
"""The mode of GPUs whose products take NVFP4's codes."""
EMULATED = {"emulated": ("backend=emulate",)}
SWAPPED = ("eager", "emulated", "native")
"""Modes that differ in their plan alone, so that one model runs them in turn."""
NINE = (
    ("bf16", "eager"),
    ("nvfp4", "emulated"),
    ("fp8_current", "eager"),
    ("mxfp8", "emulated"),
    ("nvfp4", "native"),
    ("bf16", "recorded"),
    ("bf16", "compiled"),
)
"""(recipe, mode) of `--nine`, what is worth most first; where products take no codes of NVFP4
without `native`.
"""
MICROBATCHES = (1, 8)
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
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|mem_eff",
    "quantise": r"quantize|amax|cast_transpose|rht|hadamard|decode_blocks",
    "GEMM": r"gemm|scaled_product|nvjet|cutlass|cublas|xmma|\bmm\b|addmm|bmm|matmul",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "loss": r"softmax|nll|cross_entropy|scatter|gather",
    "norm": r"norm",
}
"""Kinds of kernels by their names, the first that fits; the rest is elementwise and copies."""


def variants() -> list[tuple[str, str, int]]:
    """The most telling first: a part that ends after eight minutes goes on when it is called
    again.
    """
    found = [
        (recipe, mode, count) for count in MICROBATCHES for mode in MODES for recipe in RECIPES
    ]
    found += [("nvfp4", mode, 1) for mode in (NATIVE if on_blackwell() else ())]
    return found


def nine_variants() -> list[tuple[str, str, int]]:
    return [(recipe, mode, 1) for recipe, mode in NINE if mode not in NATIVE or on_blackwell()]


def on_blackwell() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10


def few_variants() -> list[tuple[str, str, int]]:
    """Those of a dry run: each way with each number of microbatches, in the recipes by turns."""
    found = []
    known = variants()
    for place, (mode, count) in enumerate(
        (mode, count) for mode in MODES for count in MICROBATCHES
    ):
        recipe = RECIPES[place % len(RECIPES)]
        found.append((recipe if (recipe, mode, count) in known else "bf16", mode, count))
    return found


def label(recipe: str, mode: str, count: int) -> str:
    return f"{recipe}, {mode}, {count} microbatch{'es' * (count > 1)}"


def kind_of(name: str) -> str:
    """What a kernel belongs to."""
    return next(
        (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)),
        "elementwise, copies",
    )


def timed(run: Run) -> tuple[float, float]:
    """Seconds of one step: until it is queued, and until it is done."""
    synchronize(run.device)
    began = time.perf_counter()
    done = train_step(run, run.plan.at(run.step).recipe)
    queued = time.perf_counter() - began
    synchronize(run.device)
    ended = time.perf_counter() - began
    done.read()
    run.step = run.step + 1
    run.mid_update = False
    return queued, ended


def profiled(run: Run) -> dict[str, Any]:
    """Of one step the time of kernels, by their kind and by their operators, and the operators of
    attention.
    """
    on_gpu = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as found:
        timed(run)

    def ms(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000

    events = found.key_averages()
    device = "CUDA" if on_gpu else "CPU"
    kernels = sorted((e for e in events if e.device_type.name == device), key=ms, reverse=True)
    total = sum(map(ms, kernels))
    by_kind: dict[str, float] = {}
    for kernel in kernels:
        by_kind[kind_of(kernel.key)] = by_kind.get(kind_of(kernel.key), 0.0) + ms(kernel)
    by_shape = found.key_averages(group_by_input_shape=True)
    operators = sorted(
        (e for e in by_shape if e.device_type.name == "CPU"),
        key=ms,
        reverse=True,
    )
    return {
        "gpu ms": total,
        "by kind": by_kind,
        "launches": sum(kernel.count for kernel in kernels),
        "kernels": [(e.key, e.count, ms(e), ms(e) / max(total, 1e-9)) for e in kernels[:SHOWN]],
        "operators": [(e.key, str(e.input_shapes), e.count, ms(e)) for e in operators[:SHOWN]],
        "factors ms": sum(map(ms, of_factors(operators, kernels))),
        "attention": sorted(
            {e.key for e in events if "scaled_dot_product" in e.key or "_sdpa" in e.key}
        ),
    }


def of_factors(operators: list[Any], kernels: list[Any]) -> list[Any]:
    """The operators that apply a scale, and the kernels that make the factor of a product
    (`product_factors`).
    """
    applied = [e for e in operators if applies_factor(e.key, e.input_shapes)]
    return applied + [e for e in kernels if "product_factors" in e.key]


def applies_factor(name: str, shapes: list[list[int]]) -> bool:
    """Whether an operator multiplies a matrix by one number that lies in a tensor."""
    return (
        name in ("aten::mul", "aten::mul_")
        and len(shapes) >= 2
        and len(shapes[0]) == 2
        and shapes[1] == []
    )


def key_words(recipe: str, mode: str, count: int) -> list[str]:
    """Keys of a run, without its data."""
    return [
        *MODEL,
        f"recipe={recipe}",
        f"train.microbatch={8 // count}",
        *(MODES | NATIVE | EMULATED)[mode],
    ]


@contextmanager
def prepared(words: list[str], *, dry: bool) -> Iterator[Run]:
    """A run ready to train on random ids of a real vocabulary; in a dry run a tiny one on a CPU."""
    with ExitStack() as stack:
        data = real_vocabulary(seq_len=4, ids=257) if dry else real_vocabulary(seq_len=2048)
        words = [*words, *stack.enter_context(data), *(TINY if dry else ())]
        if dry:
            words = stack.enter_context(gpu_stand_ins.instead_of(words))
        run, _ = stack.enter_context(built_run(torch.device("cpu" if dry else "cuda"), words))
        enter_stretch(run, None)
        yield run


def measure(run: Run, name: str, *, dry: bool) -> dict[str, Any]:
    """The row of a run with the plan that is applied to it."""
    for _ in range(WARM_UP + 2):
        timed(run)
    if not dry:
        torch.cuda.reset_peak_memory_stats()
    pairs = [timed(run) for _ in range(1 if dry else MEASURED)]
    host, step = (statistics.median(each) for each in zip(*pairs, strict=True))
    peak = run.peak_tokens_per_s()
    tokens = run.config.train.tokens
    row: dict[str, Any] = {"name": name, "ok": True, "backends": backends(run)}
    row |= {"step ms": 1000 * step, "host ms": 1000 * host, **profiled(run)}
    row |= {"tokens/s": tokens / step, "MFU": None if peak is None else tokens / step / peak}
    if not dry:
        row |= {"peak GiB": torch.cuda.max_memory_allocated() / 2**30}
        row |= {"reserved GiB": torch.cuda.max_memory_reserved() / 2**30}
    return row


def measure_built(variant: tuple[str, str, int], *, dry: bool) -> dict[str, Any]:
    """The row of a variant, of a run of its own."""
    with prepared(key_words(*variant), dry=dry) as run:
        return measure(run, label(*variant), dry=dry)


def swap(run: Run, recipe: str, mode: str) -> None:
    """Apply to a run the plan of another recipe and backend, from the next step on."""
    keys = key_words(recipe, mode, 1)
    cfg = compose(keys)
    assert isinstance(cfg, DictConfig)
    config = to_config(cfg)
    timeline = Timeline(recipe=config.recipe, steps=run.config.train.steps)
    run.plan = build_plan(
        replace(run.config, backend=config.backend), run.layers, timeline, run.plan.device
    )
    run.apply(run.plan.stretches[0])


def nine_rows(variants: list[tuple[str, str, int]], *, dry: bool) -> Iterator[dict[str, Any]]:
    """The rows of variants, measured in this process until one fails, whose error may have taken
    the GPU with it.
    """
    pending = sorted(variants, key=lambda variant: variant[1] not in SWAPPED)
    healthy = True
    for row in swapped_rows([variant for variant in pending if variant[1] in SWAPPED], dry=dry):
        yield row
        pending.pop(0)
        healthy = bool(row["ok"])
    for variant in pending:
        if healthy or dry:
            row = measured_alone(variant, dry=dry)
            healthy = bool(row["ok"])
        else:
            row = gpu_runs.alone(__file__, label(*variant))
        yield row


def swapped_rows(variants: list[tuple[str, str, int]], *, dry: bool) -> Iterator[dict[str, Any]]:
    """The rows of variants that differ in their plan alone, of one model, up to the first that
    fails.
    """
    if not variants:
        return
    current = variants[0]
    try:
        with prepared(key_words(*current), dry=dry) as run:
            for current in variants:
                swap(run, *current[:2])
                yield measure(run, label(*current), dry=dry)
    except Exception as error:
        yield failure(current, error)


def measured_alone(variant: tuple[str, str, int], *, dry: bool) -> dict[str, Any]:
    """The row of a variant of a model of its own, for which the one before makes room."""
    release()
    try:
        return measure_built(variant, dry=dry)
    except Exception as error:
        return failure(variant, error)


def failure(variant: tuple[str, str, int], error: Exception) -> dict[str, Any]:
    return {"name": label(*variant), "ok": False, "note": gpu_runs.first_line(error)}


def release() -> None:
    """Give the memory of the model before this one back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def backends(run: Run) -> list[str]:
    """On what the GEMMs run."""
    return sorted({row.backend for row in run.plan.rows})


def main(words: list[str] | None = None) -> int:
    parser = gpu_runs.options(__doc__, "a tiny model on a CPU, with stand-ins")
    parser.add_argument("--nine", action="store_true", help="few variants, in this process")
    given = parser.parse_args(words)
    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu_profile: torch sees no GPU")
        return 3
    if given.only:
        (variant,) = {
            each for each in (*variants(), *nine_variants()) if label(*each) == given.only
        }
        print(json.dumps(measure_built(variant, dry=False)))
        return 0
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    chosen = nine_variants() if given.nine else few_variants() if given.dry_run else variants()
    pending = [variant for variant in chosen if not results.has(label(*variant))]
    if given.nine:
        for row in nine_rows(pending, dry=given.dry_run):
            results.add(row)
        return results.code
    for variant in pending:
        own = (
            gpu_runs.alone(__file__, label(*variant))
            if not given.dry_run
            else measure_built(variant, dry=True)
        )
        results.add(own)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
