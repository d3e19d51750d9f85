"""Rank recipes on checkpoints of small models, and write the tables to benchmarks/recipe_ranking.md.

    python scripts/paper/rank_recipes.py [--runs runs] [--out FILE.md] [--cases CASE…] [--bases N] [--ledger]
        [words of `fp4train rank`]

With --ledger the candidates are BF16, MXFP8 and the recipes of `fp4train recipes` but those of LEFT_OUT.

A file that exists keeps its text; the sections of the cases that are ranked are replaced, or added at its end.

Base runs of several seeds, trained in NVFP4 and in BF16 by turns: early (step 200) and annealed (step 300, the end),
and the early ones with outlier channels put in. Runs that are trained and forks that are made
already are not repeated, so that the script goes on where it was stopped.

Outlier channels: the weight of each norm before a linear layer is multiplied by FACTOR in CHANNELS of its channels, and
the columns of the layers that read it are divided by FACTOR; moments of the optimizer follow. The function of the model
stays the same in exact arithmetic, the activations that are quantised get channels as large as those of large models
(SmoothQuant, arXiv:2211.10438, read backwards).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4train import checkpoint
from fp4train.lab.ledger import ledger
from fp4train.lab.studies import VERDICTS, open_checkpoint
from fp4train.lab.studies.sequential import needed
from fp4train.precision.layers import find_blocks
from fp4train.run.record.directory import CHECKPOINTS
from fp4train.text import p_value

CPU_INFO = Path("/proc/cpuinfo")
CHANNELS = 3
FACTOR = 16.0
MOST_PAIRS = 12
"""Pairs of candidates that a section lists."""
READERS = {
    "attention_norm": ("attention.wq", "attention.wk", "attention.wv"),
    "mlp_norm": ("mlp.gate", "mlp.up"),
}
"""The norms of a block of Llama, and the linear layers that read each."""
TRAINING = ("checkpoint.every=100", "checkpoint.keep=5", "track=jsonl")
FORKS = {
    "recipe": "bf16,mxfp8,nvfp4,nvfp4_plain,mxfp4",
    "policy": "all",
    "steps": "16",
    "forks": "2",
}
"""Every layer of every block follows the recipe, without phases: what the format does, not what
spares it.
"""
LEFT_OUT = {
    "tetrajet_v2_outliers": "its outlier channels are chosen from step 550 on, before which it is "
    "tetrajet_v2 in every bit",
}
"""Recipes of the ledger that forks of these steps cannot tell from another, with the reason."""
TRAINED_IN = ("nvfp4", "bf16")
"""The recipes of the base runs, by turns; the rest is the default run."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Checkpoints of `bases` runs to rank recipes on; `options` are those of the command that differ
    from `FORKS`.
    """

    name: str
    suffix: str = ""
    step: int
    about: str
    options: tuple[tuple[str, str], ...] = ()
    bases: int = 4


CASES = (
    Case(name="early", step=200, about="step 200 of 300, before the cooldown"),
    Case(
        name="policies",
        step=200,
        about="the early checkpoints; every layer in the recipe (`all`), or the last 15 % of "
        "the blocks in BF16 "
        "(`last15`, the default), or the first 15 % (`first15`)",
        options=(("recipe", "bf16,nvfp4"), ("policy", "all,last15,first15")),
    ),
    Case(
        name="annealed",
        step=300,
        about="the runs at their end; the forks keep the small rate that the cooldown ended with",
    ),
    Case(
        name="outliers",
        suffix="-outliers",
        step=200,
        about=f"the early checkpoints with {CHANNELS} outlier channels per norm put in "
        f"({FACTOR:g} times as large); "
        "the columns that read them are small, so the rate is a tenth",
        options=(("recipe", "bf16,mxfp8,nvfp4,mxfp4"), ("lr", "3e-4")),
        bases=3,
    ),
)
INTRODUCTION = """# Ranking of the recipes

Paired forks (`fp4train rank`, [docs/ranking.md](../docs/ranking.md)) of the default model, 1.2 M parameters: validation
loss in the recipe minus that of BF16, in nats per token. By `python scripts/paper/rank_recipes.py{words}` on {machine},
torch {torch}.

What it shows: which formats cost how much on these checkpoints in {steps} steps. What it cannot show: techniques that
matter at 12 B parameters and a trillion tokens are not told apart at this size, and what adds up over a long run is not
seen in {steps} steps.
"""
OF_THE_LEDGER = """
The candidates are the recipes of `fp4train recipes` ([docs/recipes.md](../docs/recipes.md)) by themselves: the words
beside them there, layers that their papers keep and `oscillation.every`, are left out. Tensor scales that a recipe
holds for 50 steps are measured once, in the first step of a fork. {left_out}.
"""


def machine() -> str:
    """The CPU's name, as far as the system tells."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def fp4train(*words: str) -> str:
    """Run a command of the package and return what it prints; its progress is shown."""
    print(" ".join(["fp4train", *words]), flush=True)
    command = [sys.executable, "-m", "fp4train", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def put_outliers_in(
    source: Path, step: int, target: Path, channels: int = CHANNELS, factor: float = FACTOR
) -> None:
    """A copy of a run with one checkpoint, whose norms and their readers are scaled as the module
    says.
    """
    subject = open_checkpoint(source, step)
    optimizer = subject.run.optimizer
    draw = torch.Generator().manual_seed(0)

    def scale(weight: nn.Parameter, columns: torch.Tensor, by: float) -> None:
        weight.data[..., columns] *= by
        for name, power in (("exp_avg", -1), ("exp_avg_sq", -2)):  # gradients scale by 1/by
            optimizer.state[weight][name][..., columns] *= by**power

    for block in find_blocks(subject.run.model):
        for norm, readers in READERS.items():
            weight = block.get_submodule(norm).get_parameter("weight")
            columns = torch.randperm(len(weight), generator=draw)[:channels]
            scale(weight, columns, factor)
            for reader in readers:
                scale(block.get_submodule(reader).get_parameter("weight"), columns, 1 / factor)
    tensors, _ = checkpoint.flatten(subject.run.state())
    assert subject.start is not None
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(CHECKPOINTS, "studies", ".lock"))
    checkpoint.save(target / CHECKPOINTS, step, tensors, subject.start.state, keep=1)


def prepare(case: Case, seed: int, runs: Path) -> Path:
    """The base run of a case with this seed, trained or made if it is not there."""
    recipe = TRAINED_IN[seed % len(TRAINED_IN)]
    run = runs / f"rank-seed{seed}-{recipe}{case.suffix}"
    if checkpoint.steps(run / CHECKPOINTS):
        return run
    if case.name == "outliers":
        put_outliers_in(prepare(CASES[0], seed, runs), case.step, run)
        return run
    fp4train(f"run.dir={run}", f"run.seed={seed}", f"recipe={recipe}", *TRAINING)
    return run


def of_the_ledger() -> list[str]:
    """BF16, MXFP8 and the recipes of the ledger, each once, without those of `LEFT_OUT`."""
    names = dict.fromkeys(["bf16", "mxfp8", *(entry.recipe for entry in ledger())])
    return [name for name in names if name not in LEFT_OUT]


def ranking(case: Case, bases: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """The words of the command."""
    return [
        "rank",
        *bases,
        f"step={case.step}",
        *(f"{key}={value}" for key, value in options.items()),
    ]


def section(case: Case, ranked: dict[str, Any]) -> str:
    """Markdown of one ranking: a row per candidate, from the best to the worst."""
    entries = {entry["name"]: entry for entry in ranked["candidates"]}
    pairs = {frozenset((pair["first"], pair["second"])): pair for pair in ranked["pairs"]}
    reference = ranked["reference"]
    floor = ranked["floor"]
    where = [
        f"{Path(entry['run']).name} (trained in {entry['trained']})"
        for entry in ranked["checkpoints"]
    ]
    lines = [
        f"## {case.name}: {case.about}",
        "",
        f"{ranked['forks']} forks at each of {len(where)} checkpoints: {', '.join(where)}. "
        + (f"FP32 − BF16: {gap(floor)}. " if floor else "")
        + f"Look {ranked['look']} at a record of {ranked['recorded']} candidates.",
        "",
        "| candidate | gap to BF16 | ± tokens | in high precision | at each checkpoint | p | "
        "from BF16 | group |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ranked["order"]:
        entry = entries[name]
        pair = pairs.get(frozenset((name, reference)))
        same = "".join(f", {other}" for other in entry["same"])
        p = ""
        verdict = "–"
        if pair is not None:
            p = p_value(pair["p"])
            verdict = VERDICTS[pair["verdict"]]
        gaps = " ".join(f"{at:+.4f}" for at in entry["gaps"])
        tokens = "–" if entry["tokens"] is None else f"{entry['tokens']:.5f}"
        lines.append(
            f"| {name}{same} | {gap(entry['gap'])} | {tokens} | {gap(entry['gap_high'])} | "
            f"{gaps} | {p} | {verdict} | "
            f"{entry['group']} |"
        )
    lines += [
        f"| {name} | diverged: {entry['diverged'][0]} | | | | | | |"
        for name, entry in entries.items()
        if entry["diverged"]
    ]
    apart = [
        f"{pair['first']} < {pair['second']} {gap(pair)}, {VERDICTS[pair['verdict']]}"
        for pair in ranked["pairs"]
        if reference not in (pair["first"], pair["second"]) and pair["verdict"] != "open"
    ]
    text = []
    if apart:
        text = ["", "Between the others: " + "; ".join(apart) + "."]
    if len(apart) > MOST_PAIRS:
        told = "Candidates without a letter in common are told apart"
        text = ["", f"{told} on these checkpoints: {len(apart)} pairs besides those with BF16."]
    return "\n".join([*lines, *text])


def gap(difference: dict[str, float]) -> str:
    """ "+.0044 ± .0009", half of the 95 % interval."""
    return f"{difference['mean']:+.5f} ± {(difference['high'] - difference['low']) / 2:.5f}"


def introduction(words: Sequence[str], keys: Mapping[str, str]) -> str:
    """The text before the tables of a new file."""
    return INTRODUCTION.format(
        words="".join(f" {word}" for word in words),
        machine=machine(),
        torch=torch.__version__,
        steps=keys.get("steps", FORKS["steps"]),
    )


def introduction_of_the_ledger(words: Sequence[str], keys: Mapping[str, str]) -> str:
    """The same where the candidates are those of the ledger: what of it is not ranked, and why."""
    left_out = "; ".join(f"{name} is left out: {reason}" for name, reason in LEFT_OUT.items())
    return introduction(("--ledger", *words), keys) + OF_THE_LEDGER.format(left_out=left_out)


def with_section(text: str, new: str) -> str:
    """The file's text with a section in the place of the one of the same case, or at the end."""
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    by_case = {part.partition(":")[0]: part for part in (*sections, new)}
    return "\n".join(part.strip("\n") + "\n" for part in (head, *by_case.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/recipe_ranking.md"))
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--bases", type=int, help="base runs; each case has a number of its own")
    parser.add_argument("--ledger", action="store_true", help="all recipes of the ledger")
    parser.add_argument("words", nargs="*", help="for every ranking")
    args = parser.parse_intermixed_args()
    keys = dict(word.split("=", 1) for word in args.words)
    if args.ledger:
        keys["recipe"] = ",".join(of_the_ledger())
    begin = introduction_of_the_ledger if args.ledger else introduction
    text = begin(args.words, keys)
    if args.out.exists():
        text = args.out.read_text()
    commands = []
    for case in (case for case in CASES if case.name in args.cases):
        seeds = range(args.bases or case.bases)
        bases = [str(prepare(case, seed, args.runs)) for seed in seeds]
        commands.append((case, bases, {**FORKS, **dict(case.options), **keys}))
    # so few forks take no look, and the first one has all cases
    single = [
        ranking(case, [base], options)
        for case, bases, options in commands
        if int(options["forks"]) < needed(1)
        for base in bases
    ]
    count = len(single) + len(commands)
    for number, words in enumerate(single, 1):
        print(f"{number} of {count}:", end=" ")
        fp4train(*words)
    for number, (case, bases, options) in enumerate(commands, 1 + len(single)):
        print(f"{number} of {count}:", end=" ")
        shown = fp4train(*ranking(case, bases, options))
        print(shown)
        named = re.search(r"^(.+rank\.json); ", shown, re.MULTILINE)
        assert named is not None
        text = with_section(text, section(case, json.loads(Path(named[1]).read_text())))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
