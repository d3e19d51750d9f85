"""The first minute on a GPU: everything once, small.

    python scripts/gpu_first.py --out NAME-first.json [CHECK …] [--patience SECONDS] [--dry-run]

A Triton kernel to the bit; each scheme of `scaled_mm` against emulation; liger's kernels against torch's operators; two
training steps per recipe; a run whose steps are recorded, one compiled, one deterministic, one with recomputation. Each
is a process of its own, as many at once as half of the cores, since a crash of one must not end the others, and one
that hangs is ended.
`kernel`, named alone, runs in this process: nothing else runs beside it, and it takes no longer than its compiler. Rows
are written as they come. Exit code 0: all are well; 1: one is not; 3: there is no GPU.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gpu_runs
import gpu_stand_ins
import torch

RECIPES = ("bf16", "nvfp4", "mxfp8", "fp8_current", "fp8_delayed", "fp8_row", "fp8_block")
SHORT = (
    "model=llama_30m",
    "train.steps=2",
    "train.batch_size=4",
    "train.microbatch=2",
    "train.seq_len=256",
    "eval.every=0",
    "checkpoint.every=0",
    "phases=none",
)
MODES = {
    "capture": ("recipe=bf16", "train.cuda_graph=true", "train.steps=5"),
    "compile": ("recipe=bf16", "train.compile=true"),
    "deterministic": ("recipe=nvfp4", "train.deterministic=true"),
    "recompute": ("recipe=nvfp4", "model.recompute=true"),
}
PATIENCE = 300.0
"""Seconds after which a check hangs: on a busy CPU the kernels of a recipe took 85 s to compile,
and here several processes do so at once.
"""


def checks(dry: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    """(name, what is checked, which gives a note or raises), what is worth most first."""
    import gpu_native

    yield "kernel", partial(kernel, dry)
    for name in RECIPES:
        yield f"step {name}", partial(steps, (f"recipe={name}",), dry)
    yield "liger", partial(fused, dry)
    for name, words in MODES.items():
        yield name, partial(steps, words, dry)
    for name in gpu_native.RECIPES:
        yield f"scaled_mm {name}", partial(scaled, name, dry)


def kernel(dry: bool) -> str:
    """NVFP4's kernel with the transform and random bits, against the reference."""
    if dry:
        gpu_stand_ins.interpret()
    import gpu_cases
    import gpu_kernels

    rows, cols = (20, 40) if dry else (256, 512)
    x = gpu_cases.content("wide", rows, cols, 1).bfloat16()
    case = gpu_cases.Case(
        "first", x, gpu_cases.SPECS["nvfp4 hadamard stochastic"], gpu_cases.KEY, None
    )
    if found := gpu_kernels.check(case, "cpu" if dry else "cuda"):
        raise ValueError(f"differs from the reference: {found}")
    return f"{rows}x{cols} equal to the bit"


def scaled(name: str, dry: bool) -> str:
    """One scheme of scaled_mm."""
    import gpu_native
    import te_problem

    with ExitStack() as stack:
        if dry:
            stack.enter_context(gpu_stand_ins.scaled_products())
        problem = te_problem.Problem.draw(128, 256, 128, "cpu" if dry else "cuda")
        row = gpu_native.compare(name, gpu_native.RECIPES[name], problem, timed=False)
    if row["agrees"] is False:
        raise ValueError(str(row.get("note") or f"distances {row['distances']}"))
    return f"left out: {row['note']}" if row["agrees"] is None else f"distances {row['distances']}"


def fused(dry: bool) -> str:
    """A model's norms, gates, rotations and loss in liger's kernels, against torch's operators:
    loss and gradients.
    """
    import fp4train as f4
    from fp4train.models.common import use_liger
    from fp4train.models.common.liger import why_not
    from fp4train.models.llama import Llama
    from fp4train.precision import BF16

    device = "cpu" if dry else "cuda"
    with ExitStack() as stack:
        if dry:
            stack.enter_context(gpu_stand_ins.liger_kernels())
        elif (reason := why_not(device)) is not None:
            return f"left out: {reason}"
        torch.manual_seed(0)
        shape = Llama(
            width=64 if dry else 1024,
            layers=2,
            heads=8,
            kv_heads=2,
            hidden=96 if dry else 2816,
            qk_norm=True,
        )
        vocabulary, tokens = (60, 32) if dry else (32_000, 1024)
        model = f4.convert(shape.build(vocab_size=vocabulary, seq_len=tokens)).to(device)
        batch = torch.randint(vocabulary, (2, tokens), device=device)
        found = []
        for kernels in (False, True):
            if kernels:
                use_liger(model)
            model.zero_grad()
            with f4.autocast(BF16(), step=0):
                loss = model(batch, batch.flip(1))
            loss.backward()
            found.append(
                [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
            )
    far = [float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True)]
    if not far[0] < 1e-2 or not max(far) < 0.1:
        raise ValueError(
            f"distances from torch's operators: loss {far[0]:.2e}, gradients up to {max(far):.2e}"
        )
    return f"distances from torch's operators: loss {far[0]:.1e}, gradients up to {max(far):.1e}"


def steps(words: tuple[str, ...], dry: bool) -> str:
    """A short run; `words` come after SHORT."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = stack.enter_context(gpu_stand_ins.instead_of(words)) if dry else words
        lines = gpu_runs.train(Path(folder) / "run", [*SHORT, *options], dry=dry)
    if isinstance(lines, str):
        raise ValueError(lines)
    losses = [line["train/loss"] for line in lines]
    if not losses or not all(map(math.isfinite, losses)):
        raise ValueError(f"losses {losses}")
    return f"losses {', '.join(f'{loss:.4f}' for loss in losses)}"


def row(name: str, check: Callable[[], str]) -> dict[str, Any]:
    """What one check found."""
    began = time.perf_counter()
    try:
        found = {"ok": True, "note": check()}
    except Exception as error:
        found = {"ok": False, "note": gpu_runs.first_line(error)}
    return {"name": name, **found, "seconds": round(time.perf_counter() - began, 1)}


def main(words: list[str] | None = None) -> int:
    parser = gpu_runs.options(__doc__, "on a CPU, with stand-ins, in this process")
    parser.add_argument(
        "names", nargs="*", metavar="CHECK", help="those of these names; all by default"
    )
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds after which a check hangs"
    )
    given = parser.parse_args(words)
    if not torch.cuda.is_available() and not given.dry_run:
        print("gpu_first: torch sees no GPU")
        return 3
    if given.only:
        print(json.dumps(row(given.only, dict(checks(False))[given.only])))
        return 0
    known = dict(checks(given.dry_run))
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"unknown check {unknown[0]}: it is one of {', '.join(known)}")
    results = gpu_runs.Results(given.out, gpu_runs.machine())
    names = [name for name in given.names or known if not results.has(name)]
    if given.dry_run or names == ["kernel"]:
        for name in names:
            if name in DRY or not given.dry_run:
                results.add(row(name, known[name]))
        return results.code
    with ThreadPoolExecutor(max(1, min(len(names), (os.cpu_count() or 1) // 2))) as pool:
        for done in as_completed(
            [pool.submit(gpu_runs.alone, __file__, name, given.patience) for name in names]
        ):
            results.add(done.result())
    return results.code


DRY = (
    "kernel",
    "scaled_mm fp8 current",
    "scaled_mm nvfp4",
    "liger",
    "step nvfp4",
    *MODES,
)
"""The checks of a dry run: one of each kind."""


if __name__ == "__main__":
    sys.exit(main())
