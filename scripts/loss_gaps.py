"""Train the default run in every recipe and write the table of loss gaps to BF16.

    python scripts/loss_gaps.py --out benchmarks/loss_gaps.md [fp4train overrides, e.g. train.steps=200]

Each recipe runs twice: as a run does by default (the last 15 % of the blocks in BF16, the forward pass in BF16 during
the cooldown), and bare, in the recipe everywhere and to the end. Runs that are finished already are not repeated.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path

import torch

from fp4train.config.overrides import groups
from fp4train.track import read_metrics

CPU_INFO = Path("/proc/cpuinfo")
BASELINE = "bf16"
BARE = ("policy=all", "phases=none")
INTRODUCTION = """# Loss gaps

Final validation loss (nats per byte) of the default run in each recipe, and the relative gap to BF16 (same seed). By
`{made_by}` on {machine}, {threads} threads, torch {torch}.

`default` is what `fp4train recipe=…` does: the last 15 % of the blocks in BF16, and the forward pass in BF16 during the
cooldown. `bare`, where it was run, quantises every layer of every block until the last step and evaluates in the
recipe; it shows what the policy and the cooldown phase are for. One seed, 1.2 M parameters: gaps of up to two
percent, either way, say nothing.

"""


def machine() -> str:
    """The CPU's name, as far as the system tells."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def run(recipe: str, kind: str, overrides: list[str]) -> Path:
    """Train one run, unless it is finished; returns its directory."""
    name = f"gaps-{kind}-{recipe}"
    bare = BARE if kind == "bare" else ()
    command = [
        sys.executable,
        "-m",
        "fp4train",
        f"recipe={recipe}",
        f"run.name={name}",
        "track=jsonl",
        *bare,
        *overrides,
    ]
    print(" ".join(command[2:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Path("runs") / name


def final(directory: Path) -> dict[str, float]:
    """Final validation losses, in high precision and in the recipe, and the median speed."""
    lines = read_metrics(directory / "metrics.jsonl")
    last = [line for line in lines if "val/loss" in line][-1]
    speeds = sorted(line["perf/tokens_per_s"] for line in lines if "perf/tokens_per_s" in line)
    return {"val": last["val/loss"], "recipe": last["val/loss_recipe"], "speed": speeds[len(speeds) // 2]}


def table(recipes: list[str], results: dict[tuple[str, str], dict[str, float]]) -> str:
    """Markdown, a row a recipe; dashes for the runs that there are no results of."""
    base = results[BASELINE, "default"]["val"]
    # What a run is judged by: its weights in high precision, or, bare, the recipe that it would be used in.
    kinds = {kind: key for kind, key in (("default", "val"), ("bare", "recipe")) if any(k == kind for _, k in results)}
    rows = [
        "| recipe |" + "".join(f" {kind} | gap |" for kind in kinds),
        "|---|" + "---|---|" * len(kinds),
    ]
    for recipe in recipes:
        cells = [f"| {recipe} |"]
        for kind, key in kinds.items():
            found = results.get((recipe, kind))
            cells.append(
                " – | – |" if found is None else f" {found[key]:.4f} | {100 * (found[key] / base - 1):+.2f} % |"
            )
        rows.append("".join(cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/loss_gaps.md"))
    parser.add_argument("--recipes", nargs="*", default=None, help="default: all in recipes/")
    parser.add_argument("--kinds", nargs="*", default=["default", "bare"], choices=["default", "bare"])
    parser.add_argument("overrides", nargs="*", help="for every run")
    args = parser.parse_intermixed_args()
    recipes = list(dict.fromkeys([BASELINE, *(args.recipes or groups()["recipe"])]))
    # Kind by kind: a script that is stopped leaves the default runs first.
    wanted = [(recipe, kind) for kind in args.kinds for recipe in recipes if recipe != BASELINE]
    results: dict[tuple[str, str], dict[str, float]] = {}
    for recipe, kind in [(BASELINE, "default"), *wanted]:
        results[recipe, kind] = final(run(recipe, kind, args.overrides))
        made_by = f"python scripts/loss_gaps.py {' '.join(args.overrides)}".rstrip()
        text = INTRODUCTION.format(
            made_by=made_by, machine=machine(), threads=torch.get_num_threads(), torch=torch.__version__
        )
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + table(recipes, results) + "\n")


if __name__ == "__main__":
    main()
