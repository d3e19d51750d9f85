"""The parts of a report: each a function from what is known to markup, empty where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fp4train.lab.analysis.curves import Losses, RecipeRow, over_steps, shades
from fp4train.lab.analysis.figure import VARIABLES, colour_of, line_of
from fp4train.lab.analysis.heatmap import LAYERS, Errors, worst_maps
from fp4train.lab.report.groups import SeedGroup, curve, gap_at, gap_curve, loss_at
from fp4train.lab.report.html import Html, figure, folded, joined, table, tag
from fp4train.lab.report.sources import RunSource
from fp4train.lab.studies.figures import ranking, sensitivity
from fp4train.lab.studies.results import VERDICTS, CandidateResult, RankResult, SensitivityResult
from fp4train.lab.studies.statistics import Estimate
from fp4train.text import p_value

WORST = 10
"""Layers in the table of the worst."""
LISTED = 12
"""Layers in a table, the worst first."""
WORDS = {**VERDICTS, "reference": "reference"}
EVENTS = 60
"""Events of a run that are listed."""
MARKS = {"swap": "v", "resume": "|", "branch": "|", "init": "|", "non-finite": "x"}
"""Events that are marked on the band of a run."""


def section(title: str, *children: object) -> Html:
    """A part of the page under its heading, with an anchor."""
    return tag("section", tag("h2", title), *children, id=title.lower().replace(" ", "-"))


def warnings(found: Iterable[str]) -> Html:
    """A list of what a reader has to know; empty if there is nothing."""
    listed = list(dict.fromkeys(found))
    return tag("ul", *(tag("li", each) for each in listed), class_="warnings") if listed else Html()


def results(groups: Sequence[SeedGroup], at: tuple[str, int] | None) -> Html:
    """Losses and gaps as a table, and the sentences that go with it."""
    rows, words = [], []
    for index, group in enumerate(groups):
        first, done = group.sources[0], [source.done for source in group.sources]
        validation = [s.metrics.series("val/loss").values for s in group.sources]
        best = [float(v[np.isfinite(v)].min()) for v in validation if np.isfinite(v).any()]
        train = [float(s.metrics.loss("train/loss").values[-1]) for s in group.sources]
        rows.append(
            [
                joined([_sample(index), " ", group.numbers]),
                group.name,
                " → ".join(recipe for *_, recipe in first.bands),
                ", ".join(map(str, done if len(set(done)) > 1 else done[:1])),
                f"{math.fsum(train) / len(train):.4f}",
                "–" if at is None else loss_at(group, *at).show(".4f"),
                f"{min(best):.4f}" if best else "–",
                "–" if at is None or index == 0 else f"{gap_at(groups[0], group, *at).show('+.2f')} %",
            ]
        )
    if at is not None:
        of = "validation loss in high precision" if at[0] == "val/loss" else "smoothed training loss"
        words.append(f"Gap: {of} at step {at[1]} relative to the first row; that is the last step that all runs have.")
    else:
        words.append("The runs share no step with a loss, so there is no gap.")
    if any(len(group.sources) > 1 for group in groups):
        words.append(
            "Runs that differ in run.seed only are averaged; ± is Student's 95 % interval over the seeds. Gaps of "
            "equal seeds are formed seed by seed."
        )
    if len(groups) > 1 and any(len(group.sources) == 1 for group in groups):
        words.append(
            "A single run has no interval: whole runs scatter by one to two per cent, so smaller gaps of single runs "
            "say nothing. fp4train rank tells recipes apart."
        )
    at_step = "loss" if at is None else f"loss at {at[1]}"
    header = ["", "run", "recipes", "steps", "train loss", at_step, "best val loss", "gap"]
    body = table(header, rows, caption="Losses in nats per token", right=(3, 4, 5, 6, 7))
    return section("Results", body, tag("p", " ".join(words), class_="note"))


def curves(groups: Sequence[SeedGroup], at: tuple[str, int] | None) -> Html:
    """Losses, gaps and recipes over one axis of steps, with a legend and the stretches as a table."""
    sources = sorted((source for group in groups for source in group.sources), key=lambda source: source.number)
    losses = [_losses(group, groups[0] if at is not None and group is not groups[0] else None) for group in groups]
    rows = [
        RecipeRow(
            label=str(source.number),
            index=next(i for i, group in enumerate(groups) if source in group.sources),
            bands=source.bands,
            done=source.done,
            marks=_marks(source),
        )
        for source in sources
    ]
    drawn = figure(
        "curves-figure",
        over_steps(losses, rows, named=False),
        alt=f"Training and validation losses of {len(sources)} runs over steps, the gap of each to the first, and "
        "below them the recipe that each run had at each step. The tables have the numbers.",
        caption="Training losses are smoothed; shaded, or a bar at the end: 95 % interval over seeds; dotted: planned "
        "and not trained yet; ▾ swap, | start from a checkpoint, × a value that is not finite.",
    )
    runs = tag(
        "ul",
        *(tag("li", _sample(i), " ", group.numbers, " ", group.name) for i, group in enumerate(groups)),
        class_="legend",
    )
    recipes = shades(recipe for row in rows for *_, recipe in row.bands)
    listed = tag("ul", *(tag("li", _shade(colour), " ", recipe) for recipe, colour in recipes.items()), class_="legend")
    return section("Curves", drawn, runs, listed, _stretches(sources), _events(sources))


def _losses(group: SeedGroup, first: SeedGroup | None) -> Losses:
    """The curves of a group, and its gaps to the first one."""
    train, validation = (curve(group, key) for key in ("train/loss", "val/loss"))
    gaps = [] if first is None else [gap_curve(first, group, key) for key in ("train/loss", "val/loss")]
    return Losses(name=group.name, train=train, validation=validation, gaps=gaps)


def _marks(source: RunSource) -> list[tuple[int, str]]:
    told = [(record.event, record.step) for record in source.records if record.step]
    told += [(event.name, event.step) for event in source.metrics.events() if event.name == "non-finite"]
    return [(step, MARKS[name]) for name, step in told if name in MARKS]


def _sample(index: int) -> Html:
    """A line in the style of a group's curve."""
    shape = line_of(index)
    dashes = None if shape == "-" else " ".join(f"{2 * each:g}" for each in shape[1])
    ends = {"x1": "0", "y1": "5", "x2": "26", "y2": "5"}
    line = tag("line", **ends, stroke=_variable(colour_of(index)), stroke_width="3", stroke_dasharray=dashes)
    return tag("svg", line, width="26", height="10", viewBox="0 0 26 10", aria_hidden="true", class_="sample")


def _shade(colour: str) -> Html:
    return tag("span", class_="shade", style=f"background:{_variable(colour)}", aria_hidden="true")


def _variable(colour: str) -> str:
    return f"var({VARIABLES[colour]})"


def _stretches(sources: Sequence[RunSource]) -> Html:
    rows = [
        [
            source.number,
            source.name,
            f"{s.start}–{s.stop - 1}",
            "ran" if s.stop <= source.done else "planned" if s.start >= source.done else f"ran to {source.done}",
            s.recipe,
            ", ".join(f"{elements} {share:.1%}" for elements, share in s.shares.items()),
            s.reason,
        ]
        for source in sources
        for s in source.stretches
    ]
    if not rows:
        return Html()
    header = ["", "run", "steps", "", "recipe", "multiply-adds of linear layers", "why"]
    return folded(f"Plan: {len(rows)} stretches of steps", table(header, rows, caption="What ran, and what is planned"))


def _events(sources: Sequence[RunSource]) -> Html:
    rows = []
    for source in sources:
        told = [(r.step, r.event, r.time.replace("+00:00", " UTC"), r.describe()) for r in source.records]
        known = {(step, name) for step, name, *_ in told}
        told += [
            (event.step, event.name, "", ", ".join(f"{k}: {v}" for k, v in event.values.items()))
            for event in source.metrics.events()
            if event.name not in ("resume", "init", "rewind", "recipe") and (event.step, event.name) not in known
        ]
        told.sort(key=lambda each: each[0])
        rows += [[source.number, source.name, *each] for each in told[:EVENTS]]
        if len(told) > EVENTS:
            rows.append([source.number, source.name, "", f"and {len(told) - EVENTS} more", "", ""])
    if not rows:
        return Html()
    header = ["", "run", "step", "event", "time", ""]
    return folded(f"What happened: {len(rows)} events", table(header, rows, caption="Starts, swaps and trouble"))


def errors(sources: Sequence[RunSource]) -> Html:
    """Heat maps and the worst layers of every run whose quantisation errors were measured."""
    measured = [(source, source.errors) for source in sources if source.errors is not None]
    if not measured:
        return section(
            "Quantisation errors",
            tag("p", "None of the runs measured them; eval.errors_every=50 does, every 50 steps.", class_="note"),
        )
    parts = []
    for place, (source, found) in enumerate(measured):
        left_out = len(found.layers) - LAYERS
        drawn = figure(
            f"errors-{source.number}",
            worst_maps(found),
            alt=f"Heat maps of relative error, underflow, and gradient over noise by layer and step of {source.label}; "
            f"the worst operand of each layer at each step; {len(found.layers)} layers, "
            f"steps {found.steps[0]} to {found.steps[-1]}.",
            caption=f"{source.label}: the worst operand of each layer; empty: not quantised then"
            + (f"; the worst {LAYERS} layers, {left_out} are left out" if left_out > 0 else ""),
        )
        parts.append(folded(source.label, drawn, _worst(found), opened=place == 0 or len(measured) <= 2))
    return section("Quantisation errors", *parts)


def _worst(found: Errors) -> Html:
    rows, relative = [], found.relative_error
    for layer in found.worst_layers[:WORST]:
        seen = np.isfinite(relative[layer]).any(axis=0).nonzero()[0]
        if not len(seen):
            continue
        last = int(seen[-1])
        operand = int(np.nanargmax(relative[layer, :, last]))
        error = relative[layer, operand]
        value = {name: float(values[layer, operand, last]) for name, values in found.values.items()}
        rows.append(
            [
                found.layers[layer],
                found.operands[operand],
                found.steps[last],
                f"{error[last]:.4f}",
                f"{error[np.isfinite(error)][0]:.4f}",
                f"{value['sqnr_db']:.1f}",
                f"{100 * value['underflow']:.2f} %",
                f"{100 * value['saturation']:.2f} %",
                f"{value['kurtosis']:.1f}",
                f"{value['amax']:.3g}",
                _known(found.gradient_to_noise[layer, last], ".1f"),
            ]
        )
    errors = ["rel. error", "at first", "SQNR, dB", "underflow", "saturation", "kurtosis", "amax", "grad/noise"]
    caption = f"The {len(rows)} worst layers when last measured, each with its worst operand"
    return table(["layer", "operand", "step", *errors], rows, caption=caption, right=range(2, 11))


def _known(value: float, form: str) -> str:
    """A dash where it is not known."""
    return f"{value:{form}}" if math.isfinite(value) else "–"


def sensitivities(sources: Sequence[RunSource]) -> Html:
    """The findings of every sensitivity study of the runs."""
    every = [(source, found) for source in sources for found in source.studies.sensitivities]
    parts = [_sensitivity(f"sensitivity-{place}", *each) for place, each in enumerate(every, start=1)]
    return section("Sensitivity", *parts) if parts else Html()


def _sensitivity(name: str, source: RunSource, found: SensitivityResult) -> Html:
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


def rankings(sources: Sequence[RunSource]) -> Html:
    """The findings of every ranking on checkpoints of the runs; a ranking of several runs is shown once."""
    every: list[tuple[RunSource, RankResult]] = []
    for source in sources:
        shown = [found for _, found in every]
        every += [(source, found) for found in source.studies.rankings if found not in shown]
    parts = [_ranking(f"ranking-{place}", *each) for place, each in enumerate(every, start=1)]
    return section("Ranking", *parts) if parts else Html()


def _ranking(name: str, source: RunSource, found: RankResult) -> Html:
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


def _gap(each: CandidateResult, found: Estimate | None) -> str:
    return "–" if found is None or each.diverged else found.show("+.5f")
