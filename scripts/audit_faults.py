"""Plant faults in live runs, audit the runs, and write the table of what was found and named.

python scripts/audit_faults.py [--out FILE] [WORD…]

Each fault is planted into a run of its own, of the default model with two blocks or of experts;
words choose the faults whose names have one of them. `audit_clean.py` makes runs without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import audit_planting as planting
import torch
import torch.nn.functional as F
from torch import Tensor

import fp4train.train as loop
from fp4train.cli import main
from fp4train.hardware import Device
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.layer_plan import resolve
from fp4train.run import step as run_step
from fp4train.run.step import EagerSteps
from fp4train.run.supervise.saving import Saver

DENSE = ("model.layers=2",)
EXPERTS = ("model=moe_tiny", "model.layers=2")
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
)
LAYERS = ("audit.every=1", "audit.sums=0", "audit.repeat=0")
SUMS = ("audit.every=0", "audit.sums=1", "audit.repeat=0")
REPEAT = ("audit.every=0", "audit.sums=0", "audit.repeat=1")
STEP = 4
"""Step after or in which faults that happen once do."""

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """A fault to plant.

    Args:
        name: its name; source: "field" or "memory", the list that has it.
        plant: makes the context in which a run has it.
        by: the audit that is to find it.
        words: words that a fault that names it has; empty: any that names its tensor.
        experts: whether it is planted into experts, too.
        options: options of the run besides.
    """

    name: str
    source: str
    plant: Plant
    by: Sequence[str]
    words: str = ""
    experts: bool = False
    options: tuple[str, ...] = ("policy=all",)


@dataclass(frozen=True)
class Finding:
    """What the audits of a run said: faults as a tracker has them, and failed checkpoints."""

    faults: list[dict[str, Any]]
    refused: list[str]
    failed: list[str]
    code: int

    @property
    def sentences(self) -> list[str]:
        """Each fault in words."""
        told = [
            f"{fault['layer']} {fault['gemm']} {fault['operand']}: {fault['what']}: "
            f"{', '.join(fault['hypotheses'])}"
            for fault in self.faults
        ]
        return [*told, *self.refused]


# -- faults of programs that are planted elsewhere than in operands --------------------------------


@contextmanager
def rounded_weights() -> Iterator[None]:
    """Weights arrive in BF16."""
    whole = PreparedWeights.prepared

    def form(weights: PreparedWeights, w_NK: Tensor, *more: Any, **options: Any) -> Any:
        return whole(PreparedWeights(False), w_NK.bfloat16().float(), *more, **options)

    with mock.patch.object(PreparedWeights, "prepared", form):
        yield


@contextmanager
def after_step(act: Callable[[Any], None], step: int = STEP) -> Iterator[None]:
    """`act(run)` is called when the run has done so many steps."""
    original = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        queued = original(run, recipe)
        if run.step + 1 == step:
            act(run)
        return queued

    with mock.patch.object(loop, "train_step", train_step):
        yield


@contextmanager
def small_blocks(plant: Plant) -> Iterator[None]:
    """The fault, in a model whose norms make one block of x too small for a scale."""
    original = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        for name, parameter in run.model.named_parameters():
            if name.endswith("norm.weight"):
                with torch.no_grad():
                    parameter[:16] = 1e-8
        return original(run, recipe)

    with plant(), mock.patch.object(loop, "train_step", train_step):
        yield


def bypass(run: Any) -> None:
    """A layer's weight is multiplied by other code from now on."""
    layer = run.linears[2]
    layer.forward = lambda x: F.linear(x, layer.weight.to(x.dtype))


@contextmanager
def without_policy() -> Iterator[None]:
    """The layers that the policy keeps are quantised."""
    original = PlannedLayer.apply_plan

    def apply_plan(layer: Any, plan: Any, recipe: Any, policy: Any, device: Any) -> None:
        other = resolve(layer.layer, recipe, None, layer.backend, Device.of(device))
        original(layer, other, recipe, policy, device)

    with mock.patch.object(PlannedLayer, "apply_plan", apply_plan):
        yield


# -- faults of memory, which happen once -----------------------------------------------------------


def flip(tensor: Tensor, bit: int) -> None:
    """Change one bit of a float32 tensor."""
    bits = tensor.detach().view(torch.int32).view(-1)
    mask = 1 << bit if bit < 31 else -(1 << 31)
    bits[len(bits) // 2] ^= mask


def weight(run: Any) -> Tensor:
    tensor: Tensor = run.linears[1].weight
    return tensor


def norm_weight(run: Any) -> Tensor:
    tensor: Tensor = next(p for name, p in run.model.named_parameters() if "norm" in name)
    return tensor


def moment(run: Any) -> Tensor:
    tensor: Tensor = run.optimizer.state[run.linears[1].weight]["exp_avg"]
    return tensor


def flipped(bit: int, of: Callable[[Any], Tensor] = weight) -> Plant:
    return lambda: after_step(lambda run: flip(of(run), bit))


def filled(value: float, of: Callable[[Any], Tensor] = weight) -> Plant:
    def fill(run: Any) -> None:
        with torch.no_grad():
            of(run).view(-1)[5] = value

    return lambda: after_step(fill)


def zeroed_moment() -> AbstractContextManager[None]:
    def zero(run: Any) -> None:
        moment(run).zero_()

    return after_step(zero)


@contextmanager
def left_out() -> Iterator[None]:
    """The optimizer's update of one step is left out."""
    original = run_step.step_unless
    calls: list[int] = []

    def step_unless(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) != STEP:
            original(*arguments)

    with mock.patch.object(run_step, "step_unless", step_unless):
        yield


@contextmanager
def copied_wrongly(kind: str) -> Iterator[None]:
    """A bit of the copy that becomes a checkpoint is flipped."""
    original = Saver._copy

    def copy(saver: Saver, parts: Any) -> Any:
        copies = original(saver, parts)
        if saver.run.step == 6:
            name = next(name for name in copies if name.startswith(kind))
            flip(copies[name].tensor, 20)
        return copies

    with mock.patch.object(Saver, "_copy", copy):
        yield


@contextmanager
def in_one_computation(plant: Plant, index: int = STEP) -> Iterator[None]:
    """A fault acts the first time that the step of this index is computed, and never again."""
    original = EagerSteps.step
    done: list[int] = []

    def step(runner: EagerSteps, recipe: Any, rows: Any) -> Any:
        if runner.run.step != index or done:
            return original(runner, recipe, rows)
        done.append(1)
        with plant():
            return original(runner, recipe, rows)

    with mock.patch.object(EagerSteps, "step", step):
        yield


@contextmanager
def higher_rate() -> Iterator[None]:
    """The rate of one step is ten times too high."""
    original = run_step.step_unless
    calls: list[int] = []

    def step_unless(optimizer: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == STEP:
            for group in optimizer.param_groups:
                group["lr"] *= 10
        original(optimizer, *arguments)

    with mock.patch.object(run_step, "step_unless", step_unless):
        yield


@contextmanager
def other_token() -> Iterator[None]:
    """One token of one batch is another one, whenever it is read."""
    original = run_step.microbatch

    def microbatch(run: Any, recipe: Any, tokens: Tensor, *more: Any, **options: Any) -> Any:
        if run.step == STEP:
            tokens = tokens.clone()
            tokens[0, 3] = (tokens[0, 3] + 1) % 100
        return original(run, recipe, tokens, *more, **options)

    with mock.patch.object(run_step, "microbatch", microbatch):
        yield


def operand(change: planting.Change) -> Plant:
    return lambda: planting.planted_operand(change)


def cases() -> Iterator[Case]:
    """All faults, those of field lists first."""
    once = ("another seed of stochastic rounding", "one 4-bit code doubled")
    for name, (change, words) in planting.OPERAND_FAULTS.items():
        if name not in once:
            # without the transform an operand of experts is not padded to its groups
            experts = "Hadamard" not in name
            plant = operand(change)
            if "zero block scale" in name:
                plant = _in_small_blocks(plant)
            yield Case(name, "field", plant, LAYERS, words, experts=experts)
    yield Case("BF16 on the wire", "field", rounded_weights, LAYERS, "rounded to BF16")
    stale = "weight of the step before"
    yield Case(
        "a weight cached from the step before", "field", planting.stale_weights, LAYERS, stale
    )
    yield Case("a layer not called", "field", lambda: after_step(bypass, 1), LAYERS, "did not call")
    kept = ("policy=last15",)
    words = "another plan"
    yield Case(
        "a layer quantised that the policy keeps",
        "field",
        without_policy,
        LAYERS,
        words,
        False,
        kept,
    )
    yield Case("a weight bit flipped", "field", flipped(15), SUMS)
    for bit in (29, 27, 25, 23, 22, 12):
        yield Case(f"weight bit {bit}", "memory", flipped(bit), SUMS)
    yield Case("weight sign", "memory", flipped(31), SUMS)
    yield Case("weight bit 30, which overflows", "memory", flipped(30), SUMS)
    yield Case("a norm's weight, bit 23", "memory", flipped(23, norm_weight), SUMS)
    yield Case("a norm's weight, bit 30", "memory", flipped(30, norm_weight), SUMS)
    yield Case("a moment, bit 28", "memory", flipped(28, moment), SUMS)
    yield Case("moments zeroed", "memory", zeroed_moment, SUMS)
    yield Case("a weight that is not a number", "memory", filled(float("nan")), SUMS)
    yield Case("an infinite moment", "memory", filled(float("inf"), moment), SUMS)
    for name, (gemm, spoil, _) in planting.PRODUCT_FAULTS.items():
        plant = _product(gemm, spoil)
        yield Case(f"{name}, in one step", "memory", _once(plant), REPEAT)
        words = planting.PRODUCT_FAULTS[name][2]
        yield Case(f"{name}, in every step", "program", plant, LAYERS, words, experts=True)
    for name in once:
        plant = operand(planting.OPERAND_FAULTS[name][0])
        words = planting.OPERAND_FAULTS[name][1]
        yield Case(f"{name}, in one step", "memory", _once(plant), REPEAT)
        yield Case(f"{name}, in every step", "program", plant, LAYERS, words)
    yield Case("one token", "memory", other_token, REPEAT)
    yield Case("a rate ten times too high for a step", "memory", higher_rate, SUMS, "schedule")
    yield Case("a step of the optimizer left out", "memory", left_out, SUMS, "changed no weight")
    for kind in ("model", "optimizer"):
        plant = _copy_of(kind)
        yield Case(f"a bit of the copy that is saved: {kind}", "memory", plant, SUMS, "other bits")


def _product(gemm: str, change: Any) -> Plant:
    return lambda: planting.planted_product(gemm, change)


def _in_small_blocks(plant: Plant) -> Plant:
    return lambda: small_blocks(plant)


def _once(plant: Plant) -> Plant:
    return lambda: in_one_computation(plant)


def _copy_of(kind: str) -> Plant:
    return lambda: copied_wrongly(kind)


# -- runs ------------------------------------------------------------------------------------------


def run(options: Sequence[str], plant: Plant = nullcontext, ranks: int = 1) -> Finding:
    """One run in a folder of its own; of several ranks, in as many processes."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 2000)
            words = ["run.name=a", "data.path=text.txt", *options]
            if ranks > 1:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc-per-node={ranks}", "-m", "fp4train", *words]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                ended = subprocess.run(command, env=environment, capture_output=True, check=False)
                return _finding(Path("runs/a/metrics.jsonl"), ended.returncode)
            shown = io.StringIO()
            code = 0
            with plant(), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                try:
                    main(words)
                except SystemExit as ended:
                    code = int(ended.code or 0)
            return _finding(Path("runs/a/metrics.jsonl"), code)
        finally:
            os.chdir(here)
            logging.disable(logging.NOTSET)


def _finding(metrics: Path, code: int) -> Finding:
    lines = []
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    faults = [line for line in lines if line.get("event") == "audit fault"]
    refused = [line["reason"] for line in lines if line.get("event") == "checkpoint failed"]
    failed = [line["reason"] for line in lines if line.get("event") == "audit failed"]
    return Finding(faults, refused, failed, code)


def tried(case: Case, model: Sequence[str]) -> tuple[bool, bool, str]:
    """(whether the fault was found, whether it was named, what was said of it)."""
    try:
        finding = run((*SMALL, *model, "recipe=nvfp4", *case.options, *case.by), case.plant)
    except RuntimeError as error:
        return False, False, f"the run itself fails: {error}"
    sentences = finding.sentences
    named = [text for text in sentences if case.words in text] if case.words else sentences
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
        models = {"dense": DENSE, **({"experts": EXPERTS} if case.experts else {})}
        for name, model in models.items():
            began = time.perf_counter()
            found, named, told = tried(case, model)
            by = case.by[("every", "sums", "repeat").index(_audit_of(case))]
            row = (case.name, case.source, name, by, _word(found), _word(named), told[:150])
            rows.append(row)
            print(row, f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    heads = ("fault", "list", "model", "audit", "found", "named", "what was said first")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    for source in ("field", "memory", "program"):
        own = [row for row in rows if row[1] == source and row[2] == "dense"]
        counts = [sum(row[at] == "yes" for row in own) for at in (4, 5)]
        lines.append(
            f"\n{source}: {len(own)} faults, {counts[0]} found, {counts[1]} named (dense model)."
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
