"""The result of a sensitivity study as a table on one screen, and as a policy file."""

from collections.abc import Sequence

import yaml

from fp4train.lab.studies.parts import LAYER
from fp4train.lab.studies.results import SensitivityResult
from fp4train.text import screen

LISTED = 8
"""Layers in the table, the worst first."""
NEAR = 0.25
"""The sum of the parts is near the whole within this share of it."""


def render(study: SensitivityResult, files: Sequence[str], width: int | None = None) -> str:
    """The screen (summary.txt), its table in lines of `width`; `files` are named in its last line."""
    return screen(
        __package__,
        "summary.txt",
        study=study,
        files=files,
        width=width,
        layers=sorted(study.of_kind(LAYER), key=lambda finding: -finding.nmse.mean),
        listed=LISTED,
        worst=sorted(study.blocks.items(), key=lambda block_damage: -block_damage[1]),
        far=[kind for kind, share in study.shares.items() if abs(share.mean - 1) > NEAR],
        near=f"{NEAR:.0%}",
        cheapest=min(study.pareto[-1].kept, key=lambda unit: unit.macs, default=None),
    )


def policy_file(study: SensitivityResult) -> str | None:
    """The chosen policy as YAML, as the files of configs/policy; None if it keeps nothing."""
    if study.policy.judged is None:
        return None
    policy = {
        "_target_": "fp4train.precision.LayerPolicy",
        "first": 0,
        "last": 0,
        "keep": list(study.policy.keep),
        "recipe_for_kept": {"_target_": "fp4train.precision.BF16"},
    }
    text = yaml.safe_dump(policy, sort_keys=False)
    return screen(__package__, "policy.txt", study=study, policy=text) + "\n"
