"""fp4train doctor [--json]

What this machine can do: recipes, kernels, versions. Exit code 0 where the default run will work. Under torchrun the
ranks try the collectives together, and the first one looks at its machine and prints.

  --json           as data
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fp4train.errors import UserError

if TYPE_CHECKING:
    from fp4train.precision import Recipe

DEFAULT = "nvfp4"
"""The recipe of the default run, which configs/train.yaml names."""


def main(arguments: list[str]) -> int:
    """Print the screen, or JSON; returns the exit code."""
    from fp4train.lab.doctor import device, examine, ranks

    if wrong := [a for a in arguments if a != "--json"]:
        raise UserError(f"doctor takes --json only, not {' '.join(wrong)}")
    logging.getLogger("fp4train").setLevel(logging.WARNING)  # the screen says which kernels there are
    rank, world = ranks.started()
    found = []
    if world > 1:
        with ranks.meeting():
            found = ranks.collectives(device().type)
        if rank:
            return 1 if any(each.problem for each in found) else 0
    report = examine(_recipes(), DEFAULT, Path("runs"), ranks=world, collectives=found)
    print(json.dumps(report.as_json(), indent=2) if "--json" in arguments else report.render())
    return 1 if report.problems else 0


def _recipes() -> dict[str, Recipe]:
    """Every file of recipes/, as `recipe=` composes it."""
    from fp4train.config.binding import bind
    from fp4train.config.composition import sections
    from fp4train.config.folders import own_options
    from fp4train.precision import Recipe

    found = sections({"recipe": own_options()["recipe"]})
    return {name: bind(node, Recipe, "recipe") for (_, name), node in found.items()}
