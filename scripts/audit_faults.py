"""Plant faults in live runs, audit the runs, and write the table of what was found and named.

python scripts/audit_faults.py [--out FILE] [WORD…]

Each fault is planted into a run of its own, of the default model with two blocks and of experts;
words choose the faults whose names have one of them. `audit_clean.py` makes runs without a fault.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import audit_planting as planting
import audit_run_faults as run_faults
import torch
from audit_run_faults import Plant, after_step, flipped
from audit_runs import DENSE, EXPERTS, SMALL, run

LAYERS = ("audit.every=1", "audit.sums=0", "audit.repeat=0")
SUMS = ("audit.every=0", "audit.sums=1", "audit.repeat=0")
MODELS = {"dense": DENSE, "experts": EXPERTS}
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
REPEAT = ("audit.every=0", "audit.sums=0", "audit.repeat=1")


@dataclass(frozen=True)
class Case:
    """A fault to plant.

    Args:
        name: its name; source: "field" or "memory", the list that has it.
        plant: makes the context in which a run has it.
        by: the audit that is to find it.
        words: words that a fault that names it has, or those for each model; empty: none names it.
        options: options of the run besides.
        patch: the program that plants it in each of two ranks; empty: the run has one rank.
    """

    name: str
    source: str
    plant: Plant
    by: Sequence[str]
    words: str | Mapping[str, str] = ""
    options: tuple[str, ...] = ("policy=all",)
    patch: str = ""


def operand(change: planting.Change) -> Plant:
    return lambda: planting.planted_operand(change)


def cases() -> Iterator[Case]:
    """All faults, those of field lists first."""
    once = ("another seed of stochastic rounding", "one 4-bit code doubled")
    for name, (change, words) in planting.OPERAND_FAULTS.items():
        if name not in once:
            plant = operand(change)
            if "zero block scale" in name:
                plant = _in_small_blocks(plant)
            yield Case(name, "field", plant, LAYERS, words)
    yield Case("BF16 on the wire", "field", run_faults.rounded_weights, LAYERS, "rounded to BF16")
    stale = "weight of the step before"
    yield Case(
        "a weight cached from the step before", "field", planting.stale_weights, LAYERS, stale
    )
    yield Case(
        "a layer not called",
        "field",
        lambda: after_step(run_faults.bypass, 1),
        LAYERS,
        "did not call",
    )
    kept = ("policy=last15",)
    words = "another plan"
    name = "a layer quantised that the policy keeps"
    yield Case(name, "field", run_faults.without_policy, LAYERS, words, kept)
    yield Case("a weight bit flipped", "field", flipped(15), SUMS, WEIGHT)
    for bit in (29, 27, 25, 23, 22, 12):
        yield Case(f"weight bit {bit}", "memory", flipped(bit), SUMS, WEIGHT)
    yield Case("weight sign", "memory", flipped(31), SUMS, WEIGHT)
    yield Case("weight bit 30, which overflows", "memory", flipped(30), SUMS, WEIGHT)
    for bit in (23, 30):
        plant = flipped(bit, run_faults.norm_weight)
        yield Case(f"a norm's weight, bit {bit}", "memory", plant, SUMS, NORM)
    yield Case("a moment, bit 28", "memory", flipped(28, run_faults.moment), SUMS, MOMENT)
    yield Case("moments zeroed", "memory", run_faults.zeroed_moment, SUMS, MOMENT)
    plant = run_faults.filled(float("nan"))
    yield Case("a weight that is not a number", "memory", plant, SUMS, WEIGHT)
    plant = run_faults.filled(float("inf"), run_faults.moment)
    yield Case("an infinite moment", "memory", plant, SUMS, MOMENT)
    for name, (gemm, spoil, _) in planting.PRODUCT_FAULTS.items():
        plant = _product(gemm, spoil)
        yield Case(f"{name}, in one step", "memory", _once(plant), REPEAT)
        words = planting.PRODUCT_FAULTS[name][2]
        yield Case(f"{name}, in every step", "program", plant, LAYERS, words)
    for name in once:
        plant = operand(planting.OPERAND_FAULTS[name][0])
        words = planting.OPERAND_FAULTS[name][1]
        yield Case(f"{name}, in one step", "memory", _once(plant), REPEAT)
        yield Case(f"{name}, in every step", "program", plant, LAYERS, words)
    yield Case("one token", "memory", run_faults.other_token, REPEAT)
    yield Case(
        "a rate ten times too high for a step", "memory", run_faults.higher_rate, SUMS, "schedule"
    )
    yield Case(
        "a step of the optimizer left out", "memory", run_faults.left_out, SUMS, "changed no weight"
    )
    for kind in ("model", "optimizer"):
        plant = _copy_of(kind)
        yield Case(f"a bit of the copy that is saved: {kind}", "memory", plant, SUMS, "other bits")
    yield Case(
        "a replica that drifts",
        "memory",
        nullcontext,
        SUMS,
        "differ between the replicas",
        ("policy=all", "parallel.dp_replicate=2"),
        run_faults.DRIFTING_REPLICA,
    )


def _product(gemm: str, change: Any) -> Plant:
    return lambda: planting.planted_product(gemm, change)


def _in_small_blocks(plant: Plant) -> Plant:
    return lambda: run_faults.small_blocks(plant)


def _once(plant: Plant) -> Plant:
    return lambda: run_faults.in_one_computation(plant)


def _copy_of(kind: str) -> Plant:
    return lambda: run_faults.copied_wrongly(kind)


def tried(case: Case, model: str) -> tuple[bool, bool, str]:
    """(whether the fault was found, whether it was named, what was said of it) in a run of a key of
    `MODELS`.
    """
    try:
        options = (*SMALL, *MODELS[model], "recipe=nvfp4", *case.options, *case.by)
        finding = run(options, case.plant, ranks=2 if case.patch else 1, patch=case.patch)
    except RuntimeError as error:
        return False, False, f"the run itself fails: {error}"
    sentences = finding.sentences
    words = case.words if isinstance(case.words, str) else case.words[model]
    named = [text for text in sentences if words and words in text]
    if case.by == REPEAT:
        named = []  # that bits differ, and not why
    told = next(iter(named or sentences), "; ".join(finding.failed))
    return bool(sentences), bool(named), told


def table(words: Sequence[str]) -> str:
    """The table of all faults, and its sums."""
    rows = []
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        for name in MODELS:
            began = time.perf_counter()
            found, named, told = tried(case, name)
            by = case.by[("every", "sums", "repeat").index(_audit_of(case))]
            row = (case.name, case.source, name, by, _word(found), _word(named), told[:150])
            rows.append(row)
            print(row, f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    heads = ("fault", "list", "model", "audit", "found", "named", "what was said first")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines.append("")
    for kind in ("field", "memory", "program"):
        for of_model in ("dense", "experts"):
            of_list = [row for row in rows if row[1] == kind and row[2] == of_model]
            counts = [sum(row[at] == "yes" for row in of_list) for at in (4, 5)]
            lines.append(
                f"- {kind}, {of_model}: {len(of_list)} faults, {counts[0]} found, {counts[1]} named"
            )
    return "\n".join(lines)


def _audit_of(case: Case) -> str:
    return {LAYERS: "every", SUMS: "sums", REPEAT: "repeat"}[tuple(case.by)]  # type: ignore[index]


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


def script(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    text = table(chosen.words)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}"
    text = f"{text}\n\n`python scripts/audit_faults.py {' '.join(arguments)}`, {machine}.\n"
    if chosen.out is not None:
        chosen.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(script(sys.argv[1:]))
