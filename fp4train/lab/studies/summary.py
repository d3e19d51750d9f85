"""The result of a sensitivity study as a table on one screen, and as a policy file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from fp4train.lab.studies.findings import Finding, Judgement, Sensitivity
from fp4train.lab.studies.parts import GEMM, LAYER, NOTHING, OF_THE_RUN, OPERAND, WHOLE
from fp4train.lab.studies.results import KINDS
from fp4train.lab.studies.statistics import CONFIDENCE
from fp4train.lab.studies.subject import Subject
from fp4train.lab.studies.tradeoff import Tradeoff
from fp4train.precision import LayerPolicy
from fp4train.text import tabulate

LISTED = 8
"""Layers in the table, the worst first."""
NEAR = 0.25
"""The sum of the parts is near the whole within this share of it."""
_HEADER = ("quantised", "nMSE", "variance", "bias²", "cosine", "loss change", "output error")


@dataclass(frozen=True, kw_only=True)
class SensitivityReport:
    """The findings of a study, and the conclusions from them.

    Args:
        trade: the curve and the chosen policy. judged: that policy on batches that did not choose it; None if it keeps
            nothing.
    """

    subject: Subject
    found: Sensitivity
    trade: Tradeoff
    judged: Judgement | None

    def render(self, files: Sequence[str]) -> str:
        """The table; `files` are named in its last line."""
        found, recipe = self.found, self.found.parts.recipe
        tokens = self.subject.run.config.train.tokens
        singles = " A single batch has no interval; give more batches." if found.batches == 1 else ""
        head = (
            f"{self.subject.title}, step {self.subject.step}: gradients in {recipe.name} against FP32, "
            f"{found.batches} batch{'es' if found.batches > 1 else ''} of {tokens:,} tokens; "
            f"± is the {CONFIDENCE:.0%} interval.{singles}"
        )
        rows = [_row("nothing (floor)", found.findings[NOTHING]), _row("everything", found.findings[WHOLE])]
        if (own := found.findings.get(OF_THE_RUN)) is not None:
            rows.append(_row("under the run's policy", own))
        rows += [_row(f"{each.what} alone", each) for kind in (GEMM, OPERAND) for each in found.of_kind(kind)]
        layers = sorted(found.of_kind(LAYER), key=lambda each: -each.nmse.mean)
        rows += [_row(each.what, each) for each in layers[:LISTED]]
        if self.judged is not None:
            rows.append(_row("everything, on batches that judge", self.judged.everything))
            rows.append(_row("under the chosen policy, on these", self.judged.chosen))
        table = tabulate([_HEADER, *rows], right=range(1, len(_HEADER)))
        return "\n".join([head, "", *table, "", *self._conclusions(len(layers)), f"written: {', '.join(files)}"])

    def _conclusions(self, layers: int) -> list[str]:
        found, trade = self.found, self.trade
        lines = []
        blocks, total = found.blocks(), sum(found.blocks().values())
        if total > 0 and len(blocks) > 1:
            worst = sorted(blocks, key=lambda block: -blocks[block])
            shown = ", ".join(f"{block}: {blocks[block] / total:.0%}" for block in worst[:4])
            lines.append(f"damage by block, of the sum over {layers} layers one at a time: block {shown}")
        sums = "; ".join(f"{KINDS[kind]} {each.show('.0%')}" for kind, each in found.shares.items())
        far = [KINDS[kind] for kind, each in found.shares.items() if abs(each.mean - 1) > NEAR]
        verdict = f"within {NEAR:.0%}" if not far else f"the {' and '.join(far)} interact: predictions are rough"
        lines.append(f"the parts sum to {sums} of the whole; {verdict}")
        if found.signal is not None:
            few = "" if found.whole.bias2 is not None else ", not told from 0: no bias² without more batches"
            lines.append(f"|G|² is {found.signal.show('.0%')} of the squared gradient of a batch{few}")
        lines += self._policy()
        if trade.curve[0].time is not None and trade.curve[0].time >= 1:
            lines.append(
                f"with nothing kept these layers take {trade.curve[0].time:.3f} of their time in BF16 on {trade.gpu}: "
                "for products of this size quantising costs more than it saves"
            )
        return lines

    def _policy(self) -> list[str]:
        """The layers to keep, and what that is worth; or why none is."""
        found, trade, judged = self.found, self.trade, self.judged
        chosen = trade.chosen
        time = "" if chosen.time is None else f", {chosen.time:.3f} of the time in BF16 on {trade.gpu}"
        if judged is None:
            worth = min(trade.curve[-1].kept, key=lambda unit: unit.macs, default=None)
            why = (
                f"no layer's damage is told apart from the floor with {found.batches} batches: give more, batches=… or "
                "budget=…"
                if worth is None
                else f"of what is worth keeping {worth.layer} costs least, {worth.macs:.1%} of the multiply-adds: "
                "allow more"
            )
            return [f"no policy: {why}{time}"]
        same = f"the {judged.batches} batches" if judged.batches > 1 else "the one batch"
        lines = [
            f"policy: keep {', '.join(trade.policy.keep)}: {chosen.macs:.1%} of the multiply-adds{time}; nMSE "
            f"{chosen.nmse:.4f} predicted",
            f"judged on {same} after those that chose it: nMSE {judged.chosen.nmse.show('.4f')}, "
            f"{judged.gain.show('.4f')} less than with nothing kept"
            + ("" if judged.over_own is None else f", {judged.over_own.show('.4f')} less than under the run's policy"),
        ]
        ends = judged.gain.interval()
        if ends is None or ends[0] <= 0:
            lines.append("this policy is not told apart from keeping nothing: give more batches, batches=… or budget=…")
        return lines

    def policy_file(self) -> str | None:
        """The chosen policy as YAML, which `policy=FILE.yaml` takes; None if it keeps nothing."""
        found, chosen, judged = self.found, self.trade.chosen, self.judged
        if judged is None:
            return None
        return (
            f"# Chosen by fp4train sensitivity for {found.parts.recipe.name} at step {self.subject.step} of "
            f"{self.subject.name}:\n"
            f"# keeps {chosen.macs:.1%} of the multiply-adds; nMSE {judged.chosen.nmse.mean:.4f} instead of "
            f"{judged.everything.nmse.mean:.4f} on {judged.batches} batches that did not choose it\n"
            + policy_yaml(self.trade.policy)
        )


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


def _row(title: str, each: Finding) -> tuple[str, ...]:
    return (
        title,
        each.nmse.show(".4f"),
        "" if each.variance is None else f"{each.variance.mean:.4f}",
        "" if each.bias2 is None else each.bias2.show(".4f"),
        f"{each.cosine.mean:.4f}",
        each.loss.show("+.4f"),
        "" if each.output is None else f"{each.output.mean:.5f}",
    )
