"""The parts of a report about studies: what a recipe harms, and which recipe is better."""

from __future__ import annotations

from collections.abc import Sequence

from fp4train.lab.report.html import Html, figure, table, tag
from fp4train.lab.report.sections import section
from fp4train.lab.report.sources import Source
from fp4train.lab.studies.figures import ranking, sensitivity
from fp4train.lab.studies.results import VERDICTS, RankedCandidate, RankResult, SensitivityResult
from fp4train.lab.studies.statistics import Interval
from fp4train.text import p_value

LISTED = 12
"""Layers in a table, the worst first."""
WORDS = {**VERDICTS, "reference": "reference"}


def sensitivities(sources: Sequence[Source]) -> Html:
    """What every sensitivity study of the runs found."""
    every = [(source, found) for source in sources for found in source.studies.sensitivities]
    parts = [_sensitivity(f"sensitivity-{place}", *each) for place, each in enumerate(every, start=1)]
    return section("Sensitivity", *parts) if parts else Html()


def _sensitivity(name: str, source: Source, found: SensitivityResult) -> Html:
    layers = sorted(found.of_kind("layer"), key=lambda part: -part.nmse.mean)
    wholes = [part for whole in ("nothing", "everything") if (part := found.parts.get(whole)) is not None]
    shown = [*wholes, *found.of_kind("gemm"), *found.of_kind("operand"), *layers[:LISTED]]
    rows = [
        [
            part.name.replace("/", " ", 1),
            part.nmse.show(".4f"),
            "–" if part.bias2 is None else part.bias2.show(".4f"),
            part.loss.show("+.4f"),
        ]
        for part in shown
    ]
    title = f"{source.label}, step {found.step}: gradients in {found.recipe} against FP32, {found.batches} batches"
    kept = ", ".join(found.keep) or "nothing"
    drawn = figure(
        name,
        sensitivity(found),
        alt=f"{title}. Bars: nMSE of the gradient with one layer, or one operand, quantised alone. Curve: predicted "
        "nMSE against the share of multiply-adds kept in high precision. The table has the numbers.",
        caption=f"Policy: keep {kept}, {found.chosen.macs:.1%} of the multiply-adds; nMSE {found.chosen.nmse:.4f} "
        f"predicted, {found.measured.show('.4f')} measured"
        + ("." if found.gain is None else f" on other batches, {found.gain.show('.4f')} less than with nothing kept."),
    )
    header = ["quantised", "nMSE", "bias²", "loss change"]
    caption = "±: 95 % interval over batches" + ("" if found.batches > 1 else "; a single batch has none")
    if found.batches > 1 and any(part.bias2 is None for part in shown):
        caption += "; – of bias²: its denominator |G|² is not told from 0 over so few batches"
    return tag("div", tag("h3", title), drawn, table(header, rows, caption=caption, right=(1, 2, 3)))


def rankings(sources: Sequence[Source]) -> Html:
    """What every ranking on checkpoints of the runs found; one of several runs is shown once."""
    every: list[tuple[Source, RankResult]] = []
    for source in sources:
        shown = [found for _, found in every]
        every += [(source, found) for found in source.studies.rankings if found not in shown]
    parts = [_ranking(f"ranking-{place}", *each) for place, each in enumerate(every, start=1)]
    return section("Ranking", *parts) if parts else Html()


def _ranking(name: str, source: Source, found: RankResult) -> Html:
    one = len(found.checkpoints) == 1
    where = found.checkpoints[0] if one else f"{source.label} and others, {len(found.checkpoints)} checkpoints"
    title = f"{where}: {found.forks} forks of {found.steps} steps for each candidate" + " at each" * (not one)
    rows = [
        [
            each.name,
            _gap(each, each.gap),
            _gap(each, each.high),
            "–" if each.p is None else p_value(each.p),
            "diverged" if each.diverged else WORDS.get(each.verdict, "no test: too few forks"),
            each.group,
        ]
        for each in found.candidates
    ]
    floor = "" if found.floor is None else f"; floor of the noise, FP32 − BF16: {found.floor.show('+.5f')}"
    header = ["candidate", "gap in the recipe", "gap in high precision", "p", "verdict", "group"]
    caption = (
        f"Gap to {found.reference}, nats per token, ± 95 % interval of the gap alone, on these validation tokens; p is "
        f"corrected{floor}"
    )
    body = table(header, rows, caption=caption, right=(1, 2, 3))
    reach = "One checkpoint: all of this holds for it alone." if one else "; ".join(found.checkpoints)
    notes = [reach, *(f"{each.name}: {each.diverged}" for each in found.candidates if each.diverged)]
    notes += [f"{each.name} spikes at {where}" for each in found.candidates for where in each.spikes]
    troubles = [tag("p", note, class_="note") for note in notes]
    if not any(each.gap is not None for each in found.candidates):
        return tag("div", tag("h3", title), body, *troubles)
    drawn = figure(
        name,
        ranking(found, named=False),
        alt=f"{title}: gap of each candidate to {found.reference} with its 95 % interval. The table has the numbers.",
        caption="From the reference: orange: told apart; yellow: on these checkpoints; green: alike; blue: not told "
        "apart. Thin: interval of all pairs together; grey below: in high precision; |: each checkpoint. Grey behind: "
        "floor of the noise.",
    )
    return tag("div", tag("h3", title), drawn, body, *troubles)


def _gap(each: RankedCandidate, found: Interval | None) -> str:
    return "–" if found is None or each.diverged else found.show("+.5f")
