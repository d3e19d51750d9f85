"""Plant faults in live runs, audit the runs, and write the table of what was found and named.

    python scripts/audit_faults.py [--out FILE] [WORD…]
    python scripts/audit_faults.py --moments 76

Each fault is planted into a run of its own, of the default model with two blocks and of experts;
words choose the faults whose names have one of them. --moments flips so many bits of the default
model, each at a moment uniform in the wall time of a step. `fp4train check` audits runs without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import audit_planting as planting
import audit_run_faults as run_faults
import torch
from audit_run_faults import Plant, after_step, flipped

from fp4train.cli import main

SMALL = (
    "train.steps=18",
    "train.batch_size=4",
    "train.microbatch=2",
    "train.seq_len=64",
    "eval.every=0",
    "eval.batches=1",
    "checkpoint.every=6",
    "checkpoint.keep=9",
    "track=jsonl",
    "phases=none",
    "schedule=constant",
    "schedule.warmup=0",
    "data=text",
    "data.path=text.txt",
    "recipe=nvfp4",
    "run.name=a",
)
DEFAULT = (
    "data=text",
    "data.path=text.txt",
    "eval.every=0",
    "eval.batches=1",
    "checkpoint.every=0",
    "track=jsonl",
    "audit.every=0",
    "audit.sums=1",
    "run.name=a",
)
"""The default model, whose state is summed in every step."""
SEED = 50
MODELS = {"dense": ("model.layers=2",), "experts": ("model=moe_tiny", "model.layers=2")}
AUDITS = {
    "layers": ("audit.every=1", "audit.sums=0"),
    "sums": ("audit.every=0", "audit.sums=1"),
}
SHOWN = {"layers": "audit.every=1", "sums": "audit.sums=1"}
WEIGHT = {
    "dense": "model/blocks.0.attention.wk.weight",
    "experts": "model/blocks.1.mlp.down.weight",
}
"""The weight that `audit_run_faults.weight` chooses, by model."""
MOMENT = {
    "dense": "optimizer/blocks.0.attention.wk.weight/exp_avg",
    "experts": "optimizer/blocks.1.mlp.down.weight/exp_avg",
}
NORM = "model/blocks.0.attention_norm.weight"
HEADS = ("fault", "list", "model", "audit", "found", "named", "what was said first")


@dataclass(frozen=True)
class Case:
    """A fault to plant.

    Args:
        name: its name.
        source: the list that has it: "field", "memory", "program" or "update".
        plant: makes the context in which a run has it.
        audit: the key of `AUDITS` that is to find it.
        words: words that a fault that names it has, or those for each model; empty: none names it.
        policy: the policy of the run.
    """

    name: str
    source: str
    plant: Plant
    audit: str
    words: str | Mapping[str, str] = ""
    policy: str = "all"


def cases() -> Iterator[Case]:
    """All faults, those of field lists first."""
    once = ("another seed of stochastic rounding", "one 4-bit code doubled")
    for name, (change, words) in planting.OPERAND_FAULTS.items():
        if name not in once:
            plant = operand(change)
            if "zero block scale" in name:
                plant = _in_small_blocks(plant)
            yield Case(name, "field", plant, "layers", words)
    rounded = run_faults.rounded_weights
    yield Case("BF16 on the wire", "field", rounded, "layers", "rounded to BF16")
    name = "a weight cached from the step before"
    yield Case(name, "field", planting.stale_weights, "layers", "weight of the step before")
    name = "a layer not called"
    yield Case(name, "field", lambda: after_step(run_faults.bypass, 1), "layers", "did not call")
    name = "a layer quantised that the policy keeps"
    yield Case(name, "field", run_faults.without_policy, "layers", "another plan", "last15")
    yield Case("a weight bit flipped", "field", flipped(15), "sums", WEIGHT)
    yield from memory_cases()
    for name, (gemm, spoil, words) in planting.PRODUCT_FAULTS.items():
        plant = _product(gemm, spoil)
        yield Case(f"{name}, in one step", "memory", _once(plant), "layers", words)
        yield Case(f"{name}, in every step", "program", plant, "layers", words)
    for name in once:
        change, words = planting.OPERAND_FAULTS[name]
        yield Case(f"{name}, in one step", "memory", _once(operand(change)), "layers", words)
        yield Case(f"{name}, in every step", "program", operand(change), "layers", words)
    for name, (plant, words) in run_faults.UPDATE_FAULTS.items():
        audit = "sums" if "never updated" in name else "layers"
        yield Case(name, "update", plant, audit, words)
    yield Case("one token", "memory", run_faults.other_token, "layers")


def memory_cases() -> Iterator[Case]:
    """Faults of the state, which happen once."""
    for bit in (29, 27, 25, 23, 22, 12):
        yield Case(f"weight bit {bit}", "memory", flipped(bit), "sums", WEIGHT)
    yield Case("weight sign", "memory", flipped(31), "sums", WEIGHT)
    yield Case("weight bit 30, which overflows", "memory", flipped(30), "sums", WEIGHT)
    for bit in (23, 30):
        plant = flipped(bit, run_faults.norm_weight)
        yield Case(f"a norm's weight, bit {bit}", "memory", plant, "sums", NORM)
    yield Case("a moment, bit 28", "memory", flipped(28, run_faults.moment), "sums", MOMENT)
    yield Case("moments zeroed", "memory", run_faults.zeroed_moment, "sums", MOMENT)
    plant = run_faults.filled(float("nan"))
    yield Case("a weight that is not a number", "memory", plant, "sums", WEIGHT)
    plant = run_faults.filled(float("inf"), run_faults.moment)
    yield Case("an infinite moment", "memory", plant, "sums", MOMENT)
    name = "a rate ten times too high for a step"
    yield Case(name, "memory", run_faults.higher_rate, "sums", "schedule")
    name = "a step of the optimizer left out"
    yield Case(name, "memory", run_faults.left_out, "sums", "changed no weight")
    for kind in ("model", "optimizer"):
        name = f"a bit of the copy that is saved: {kind}"
        yield Case(name, "memory", _copy_of(kind), "sums", "other bits")


def operand(change: planting.Change) -> Plant:
    return lambda: planting.planted_operand(change)


def _product(gemm: str, change: Any) -> Plant:
    return lambda: planting.planted_product(gemm, change)


def _in_small_blocks(plant: Plant) -> Plant:
    return lambda: run_faults.small_blocks(plant)


def _once(plant: Plant) -> Plant:
    return lambda: run_faults.in_one_computation(lambda _: plant())


def _copy_of(kind: str) -> Plant:
    return lambda: run_faults.copied_wrongly(kind)


def tried(case: Case, model: str) -> tuple[bool, bool, str]:
    """(whether the fault was found, whether it was named, what was said of it) in a run of a key of
    `MODELS`.
    """
    try:
        options = (*SMALL, *MODELS[model], f"policy={case.policy}", *AUDITS[case.audit])
        sentences, failed = audited(options, case.plant)
    except RuntimeError as error:
        return False, False, f"the run itself fails: {error}"
    words = case.words if isinstance(case.words, str) else case.words[model]
    named = [text for text in sentences if words and words in text]
    told = next(iter(named or sentences), "; ".join(failed))
    return bool(sentences), bool(named), told


def audited(options: Sequence[str], plant: Plant) -> tuple[list[str], list[str]]:
    """(faults that audits of a run named, why audits failed), of a run in a folder of its own."""
    lines = logged(options, plant)
    faults = [
        f"{line['layer']} {line['gemm']} {line['operand']}: {line['what']}: {line['cause']}"
        for line in lines
        if line.get("event") == "audit fault"
    ]
    refused = [line["reason"] for line in lines if line.get("event") == "checkpoint failed"]
    failed = [line["reason"] for line in lines if line.get("event") == "audit failed"]
    return [*faults, *refused], failed


def logged(options: Sequence[str], plant: Plant) -> list[dict[str, Any]]:
    """The lines of metrics of a run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
        printed = io.StringIO()
        with (
            contextlib.suppress(SystemExit),
            plant(),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            main([*options])
        logging.disable(logging.NOTSET)
        return [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]


def at_moments(count: int) -> str:
    """A sentence about bits of weights, moments and buffers of the default model that flipped at so
    many random moments, each with an audit of every step, and a line for each that was not found.

    A run that a flip ends is followed by another one.
    """
    draw = random.Random(SEED)
    moments = [
        run_faults.Moment(share=draw.random(), draw=random.Random(draw.random()))
        for _ in range(count)
    ]
    missed = []
    remaining = moments
    while remaining:
        steps = f"train.steps={2 * len(remaining) + 6}"
        lines = logged((*DEFAULT, steps), partial(run_faults.flips_at, remaining))
        faults = [line for line in lines if line.get("event") == "audit fault"]
        for moment in (planted for planted in remaining if planted.tensor):
            steps_after = range(moment.step, moment.step + 3)
            named = {fault["layer"] for fault in faults if fault["step"] in steps_after}
            if moment.tensor not in named:
                missed.append(f"- {moment.share:.1%} of a step, {moment.tensor}")
            print(moment.share, moment.tensor, moment.tensor in named, file=sys.stderr, flush=True)
        remaining = [moment for moment in remaining if not moment.tensor]
    return "\n".join([f"{count} random moments, {count - len(missed)} found:", "", *missed])


def table(words: Sequence[str]) -> str:
    """The table of all faults, and its sums."""
    rows = []
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        for model in MODELS if case.source != "update" else ["dense"]:
            began = time.perf_counter()
            is_found, named, told = tried(case, model)
            answers = ["yes" if holds else "no" for holds in (is_found, named)]
            row = (case.name, case.source, model, SHOWN[case.audit], *answers, told[:150])
            rows.append(row)
            print(row, f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines.append("")
    for kind in ("field", "memory", "program", "update"):
        for model in MODELS:
            of_list = [row for row in rows if row[1:3] == (kind, model)]
            found_count, named_count = (sum(row[at] == "yes" for row in of_list) for at in (4, 5))
            counts = f"{len(of_list)} faults, {found_count} found, {named_count} named"
            lines.append(f"- {kind}, {model}: {counts}")
    return "\n".join(lines)


def script(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--moments", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = at_moments(chosen.moments) if chosen.moments else table(chosen.words)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}"
    text = f"{text}\n\n`python scripts/audit_faults.py {' '.join(arguments)}`, {machine}.\n"
    if chosen.out is not None:
        chosen.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
