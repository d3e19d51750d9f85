"""The result of a sensitivity study as a table on one screen, and as a policy file."""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from fp4train.lab.studies.findings import Judgement, Sensitivity
from fp4train.lab.studies.intervals import CONFIDENCE
from fp4train.lab.studies.parts import KINDS, LAYER
from fp4train.lab.studies.subject import Subject
from fp4train.lab.studies.tradeoff import Tradeoff
from fp4train.precision import LayerPolicy
from fp4train.text import screen

LISTED = 8
"""Layers in the table, the worst first."""
NEAR = 0.25
"""The sum of the parts is near the whole within this share of it."""


@dataclass(frozen=True, kw_only=True)
class SensitivityReport:
    """The findings of a study, and the conclusions from them.

    Args:
        sensitivity: findings of the study.
        trade: curve and chosen policy.
        judged: that policy on batches that did not choose it; None if it keeps nothing.
    """

    subject: Subject
    sensitivity: Sensitivity
    trade: Tradeoff
    judged: Judgement | None

    def render(self, files: Sequence[str], width: int | None = None) -> str:
        """The screen (summary.txt), its table in lines of `width`; `files` are named in its last
        line.
        """
        study = self.sensitivity
        blocks = study.blocks()
        return screen(
            __package__,
            "summary.txt",
            **vars(self),
            files=files,
            width=width,
            layers=sorted(study.of_kind(LAYER), key=lambda finding: -finding.nmse.mean),
            listed=LISTED,
            total=sum(blocks.values()),
            worst=sorted(blocks.items(), key=lambda block_damage: -block_damage[1]),
            far=[KINDS[kind] for kind, share in study.shares.items() if abs(share.mean - 1) > NEAR],
            near=f"{NEAR:.0%}",
            kinds=KINDS,
            confidence=f"{CONFIDENCE:.0%}",
            cheapest=min(self.trade.curve[-1].kept, key=lambda unit: unit.macs, default=None),
        )

    def policy_file(self) -> str | None:
        """The chosen policy as YAML, which `policy=FILE.yaml` takes; None if it keeps nothing."""
        if self.judged is None:
            return None
        policy = policy_yaml(self.trade.policy)
        return screen(__package__, "policy.txt", **vars(self), policy=policy) + "\n"


def policy_yaml(policy: LayerPolicy) -> str:
    """A policy that keeps layers in BF16, as the files of configs/policy."""
    plain = {
        "_target_": "fp4train.precision.LayerPolicy",
        "first": policy.first,
        "last": policy.last,
        "keep": list(policy.keep),
        "recipe_for_kept": {"_target_": "fp4train.precision.BF16"},
    }
    text: str = yaml.safe_dump(plain, sort_keys=False)
    return text
