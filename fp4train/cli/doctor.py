"""fp4train doctor [--json]

What this machine can do: recipes, kernels, versions. Exit code 0 where the
default run will work.

  --json           as data
"""

import json
import logging
import os
from pathlib import Path

from fp4train.cli.output import terminal_width
from fp4train.config.binding import bind
from fp4train.config.composition import sections
from fp4train.config.folders import own_options
from fp4train.errors import UserError
from fp4train.lab.doctor import device, examine
from fp4train.precision import Recipe

DEFAULT = "nvfp4"
"""The recipe of the default run, which configs/train.yaml names."""
MOST = 8
"""Processes that try recipes on a GPU; each takes half a gigabyte of its memory."""


def main(arguments: list[str]) -> int:
    """Print the screen, or JSON; returns the exit code."""

    if wrong := [a for a in arguments if a != "--json"]:
        raise UserError(f"doctor takes --json only, not {' '.join(wrong)}")
    # the screen says which kernels there are
    logging.getLogger("fp4train").setLevel(logging.WARNING)
    if device().type == "cuda":
        processes = min(os.cpu_count() or 1, MOST)
    else:
        processes = 1
    report = examine(own_recipes(), DEFAULT, Path("runs"), processes)
    if "--json" in arguments:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(report.render(terminal_width()))
    return 1 if report.problems else 0


def own_recipes() -> dict[str, Recipe]:
    """Every file of recipes/, as `recipe=` composes it."""

    bodies = sections({"recipe": own_options()["recipe"]})
    return {name: bind(node, Recipe, "recipe") for (_, name), node in bodies.items()}
