"""The parts of a report: each a function from what is known to markup, empty where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fp4train.analysis.curves import SHADES
from fp4train.analysis.picture import COLOURS, LINES
from fp4train.report.errors import Errors
from fp4train.report.figures import LAYERS, bands, heat_maps, recipe_names, time_axis, worst_layers
from fp4train.report.gaps import Group, gap_at, loss_at
from fp4train.report.html import Html, folded, joined, plain, table, tag
from fp4train.report.sources import Source
from fp4train.report.svg import figure
from fp4train.run.history import UNRECORDED, Stretch

WORST = 10
"""Layers in the table of the worst."""
EVENTS = 60
"""Events of a run that are listed."""
KEYS = 150
"""Differing keys that are listed."""
_DASHES = ("", "7 3", "2 2", "8 2 2 2")
_UNINTERESTING = ("run.name", "run.dir", "data.cache_dir")


def section(title: str, *children: object) -> Html:
    """A part of the page under its heading, with an anchor."""
    return tag("section", tag("h2", title), *children, id=title.lower().replace(" ", "-"))


def warnings(found: Iterable[str]) -> Html:
    """A list of what a reader has to know; empty if there is nothing."""
    listed = list(dict.fromkeys(found))
    return tag("ul", *(tag("li", each) for each in listed), class_="warnings") if listed else Html()


def results(groups: Sequence[Group], at: tuple[str, int] | None) -> Html:
    """Losses and gaps as a table, and the sentences that go with it."""
    rows, words = [], []
    for index, group in enumerate(groups):
        first = group.sources[0]
        validation = [s.metrics.series("val/loss").values for s in group.sources]
        best = [float(v[np.isfinite(v)].min()) for v in validation if np.isfinite(v).any()]
        train = [float(s.metrics.series("train/loss").smoothed().values[-1]) for s in group.sources]
        rows.append(
            [
                joined([_sample(index), " ", group.numbers]),
                first.name if len(group.sources) == 1 else ", ".join(source.name for source in group.sources),
                " → ".join(recipe for *_, recipe in bands(first)),
                ", ".join(str(source.done) for source in group.sources) if _differ(group) else str(first.done),
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
            "Runs that differ in run.seed only are averaged; ± is Student's 95 % interval over the seeds. Gaps of equal "
            "seeds are formed seed by seed."
        )
    if len(groups) > 1 and any(len(group.sources) == 1 for group in groups):
        words.append(
            "A single run has no interval: whole runs scatter by one to two per cent, so smaller gaps of single runs say "
            "nothing. fp4train rank tells recipes apart."
        )
    at_step = "loss" if at is None else f"loss at {at[1]}"
    header = ["", "run", "recipes", "steps", "train loss", at_step, "best val loss", "gap"]
    body = table(header, rows, caption="Losses in nats per token", right=(3, 4, 5, 6, 7))
    return section("Results", body, tag("p", " ".join(words), class_="note"))


def curves(groups: Sequence[Group], at: tuple[str, int] | None) -> Html:
    """Losses, gaps and recipes over one axis of steps, with a legend and the stretches as a table."""
    sources = sorted((source for group in groups for source in group.sources), key=lambda source: source.number)
    recipes = recipe_names(sources)
    drawn = figure(
        "curves-figure",
        time_axis(groups, None if at is None else at[0]),
        alt=f"Training and validation losses of {len(sources)} runs over steps, the gap of each to the first, and below "
        "them the recipe that each run had at each step. The tables have the numbers.",
        caption="Training losses are smoothed; shaded: 95 % interval over seeds; dotted: planned and not trained yet; "
        "▾ swap, | start from a checkpoint, × a value that is not finite.",
    )
    runs = tag(
        "ul",
        *(tag("li", _sample(i), " ", group.numbers, " ", group.name) for i, group in enumerate(groups)),
        class_="legend",
    )
    shades = tag(
        "ul",
        *(tag("li", _shade(i), " ", recipe) for i, recipe in enumerate(recipes)),
        class_="legend",
    )
    return section("Curves", drawn, runs, shades, _stretches(sources), _events(sources))


def _sample(index: int) -> Html:
    """A line in the style of a group's curve."""
    line = tag(
        "line",
        x1="0",
        y1="5",
        x2="26",
        y2="5",
        stroke=f"var(--c{index % len(COLOURS)})",
        stroke_width="3",
        stroke_dasharray=_DASHES[index // len(COLOURS) % len(LINES)] or None,
    )
    return tag("svg", line, width="26", height="10", viewBox="0 0 26 10", aria_hidden="true", class_="sample")


def _shade(index: int) -> Html:
    return tag("span", class_="shade", style=f"background:var(--s{index % len(SHADES)})", aria_hidden="true")


def _differ(group: Group) -> bool:
    return len({source.done for source in group.sources}) > 1


def _stretches(sources: Sequence[Source]) -> Html:
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


def _events(sources: Sequence[Source]) -> Html:
    rows = []
    for source in sources:
        told = [(r.step, r.event, r.time.replace("+00:00", " UTC"), r.describe()) for r in source.records]
        known = {(step, name) for step, name, *_ in told}
        told += [
            (event.step, event.name, "", ", ".join(f"{k}: {v}" for k, v in event.values.items()))
            for event in source.metrics.events()
            if event.name not in ("resume", "init", "recipe") and (event.step, event.name) not in known
        ]
        told.sort(key=lambda each: each[0])
        rows += [[source.number, source.name, *each] for each in told[:EVENTS]]
        if len(told) > EVENTS:
            rows.append([source.number, source.name, "", f"and {len(told) - EVENTS} more", "", ""])
    if not rows:
        return Html()
    header = ["", "run", "step", "event", "time", ""]
    return folded(f"What happened: {len(rows)} events", table(header, rows, caption="Starts, swaps and trouble"))


def errors(sources: Sequence[Source]) -> Html:
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
            heat_maps(found),
            alt=f"Heat maps of relative error and underflow by layer and step of {source.name}, the worst operand of each "
            f"layer at each step; {len(found.layers)} layers, steps {found.steps[0]} to {found.steps[-1]}.",
            caption=f"{source.name}: the worst operand of each layer; empty: not quantised then"
            + (f"; the worst {LAYERS} layers, {left_out} are left out" if left_out > 0 else ""),
        )
        parts.append(
            folded(f"{source.number} {source.name}", drawn, _worst(found), opened=place == 0 or len(measured) <= 2)
        )
    return section("Quantisation errors", *parts)


def _worst(found: Errors) -> Html:
    rows = []
    for layer in worst_layers(found)[:WORST]:
        error = found.values["relative_error"][layer]
        seen = np.isfinite(error).any(axis=0).nonzero()[0]
        if not len(seen):
            continue
        last = int(seen[-1])
        operand = int(np.nanargmax(error[:, last]))
        mine = error[operand]
        finite = mine[np.isfinite(mine)]
        value = {name: float(values[layer, operand, last]) for name, values in found.values.items()}
        rows.append(
            [
                found.layers[layer],
                found.operands[operand],
                found.steps[last],
                f"{value['relative_error']:.4f}",
                f"{finite[0]:.4f}",
                f"{value['sqnr_db']:.1f}",
                f"{100 * value['underflow']:.2f} %",
                f"{100 * value['saturation']:.2f} %",
                f"{value['kurtosis']:.1f}",
                f"{value['amax']:.3g}",
            ]
        )
    header = ["layer", "operand", "step", "rel. error", "at first", "SQNR, dB", "underflow", "saturation", "kurtosis", "amax"]
    caption = f"The {len(rows)} worst layers when last measured, each with its worst operand"
    return table(header, rows, caption=caption, right=range(2, 10))


def differences(sources: Sequence[Source]) -> Html:
    """The configuration keys whose values differ, with the runs of each value."""
    known = [source for source in sources if source.config is not None]
    if len(known) < 2:
        return Html()
    keys = list(dict.fromkeys(key for source in known for key in source.config or {}))
    skipped = (*UNRECORDED, *_UNINTERESTING)
    differing = [key for key in keys if key not in skipped and len({_show(s.setting(key)) for s in known}) > 1]
    rows = [[key, _by_value({s: _show(s.setting(key)) for s in known}, len(known))] for key in differing[:KEYS]]
    if not rows:
        return section("Configuration", tag("p", "The runs have the same configuration.", class_="note"))
    more = f", {len(differing) - KEYS} more are not listed" if len(differing) > KEYS else ""
    caption = f"The {len(differing)} keys that differ, of {len(keys)}{more}; after each value the numbers of its runs"
    return section("Configuration", table(["key", "values"], rows, caption=caption))


def environment(sources: Sequence[Source]) -> Html:
    """Host, device and versions of every run; what differs has the runs beside it."""
    known = {source: _flat(source.environments[-1][1]) for source in sources if source.environments}
    without = [source for source in sources if source not in known.keys()]
    words = []
    if without:
        words.append(f"Not recorded for {', '.join(source.name for source in without)}.")
    for source in known:
        if len({str(each) for _, each in source.environments}) > 1:
            steps = ", ".join(str(step) for step, _ in source.environments)
            words.append(f"{source.name} changed its environment; it was started at steps {steps}. The last is shown.")
    if not known:
        return section("Environment", tag("p", "The runs were made before it was recorded.", class_="note"))
    keys = list(dict.fromkeys(key for each in known.values() for key in each))
    rows = [[key, _by_value({s: each.get(key, "–") for s, each in known.items()}, len(known))] for key in keys]
    body = table(["", ""], rows, caption="What the runs were trained on")
    return section("Environment", body, tag("p", " ".join(words), class_="note") if words else Html())


def cost(sources: Sequence[Source]) -> Html:
    """Tokens, time and arithmetic of every run."""
    rows = []
    for source in sources:
        tokens, speed = source.metrics.series("train/tokens"), source.metrics.series("perf/tokens_per_s")
        total = float(tokens.values[-1]) if len(tokens) else math.nan
        seconds = math.nan
        if len(speed) > 1 and len(tokens) and (speed.values > 0).all():
            seconds = total / len(speed) * float(np.sum(1 / speed.values))
        mfu = source.metrics.series("perf/mfu")
        work = _arithmetic(source)
        whole = sum(work.values())
        rows.append(
            [
                source.number,
                source.name,
                _quantity(total),
                f"{np.median(speed.values):,.0f}" if len(speed) else "–",
                _duration(seconds),
                f"{np.median(mfu.values):.1%}" if len(mfu) else "–",
                _quantity(2 * whole) if whole else "–",
                ", ".join(f"{k} {v / whole:.1%}" for k, v in sorted(work.items(), key=lambda each: -each[1])),
            ]
        )
    header = ["", "run", "tokens", "tokens/s", "time in steps", "MFU", "FLOP of linear layers", "in elements"]
    note = (
        "Tokens per second: the median over steps, measured. Time in steps leaves out evaluations and checkpoints. "
        "Emulated formats are slower than BF16; fp4train plan gpu=B200 estimates what a GPU takes."
    )
    body = table(header, rows, caption="Measured speed, and the arithmetic that was done", right=(2, 3, 4, 5, 6))
    return section("Cost", body, tag("p", note, class_="note"))


def _arithmetic(source: Source) -> dict[str, float]:
    """Multiply-adds of the linear layers by elements, for the steps that were trained."""
    batch, microbatch = source.setting("train.batch_size"), source.setting("train.microbatch")
    count = batch / microbatch if isinstance(batch, int) and isinstance(microbatch, int) and microbatch > 0 else 1.0
    found: dict[str, float] = {}
    for stretch in source.stretches:
        steps = max(0, min(stretch.stop, source.done) - stretch.start)
        for elements, macs in _macs(stretch).items():
            found[elements] = found.get(elements, 0.0) + macs * steps * count
    return {elements: macs for elements, macs in found.items() if macs}


def _macs(stretch: Stretch) -> dict[str, float]:
    total = float(sum(stretch.macs))
    return {elements: share * total for elements, share in stretch.shares.items()}


def _by_value(values: Mapping[Source, str], everything: int) -> Html:
    """The distinct values, each with the numbers of its runs; alone if all runs have it."""
    runs: dict[str, list[int]] = {}
    for source, value in values.items():
        runs.setdefault(value, []).append(source.number)
    if len(runs) == 1 and len(values) == everything:
        return tag("span", next(iter(runs)))
    return joined(
        tag("div", tag("code", value), " ", tag("span", ", ".join(map(str, numbers)), class_="runs"))
        for value, numbers in runs.items()
    )


def _flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in list(found.items())[:100]:
        if isinstance(value, dict) and not prefix:
            flat |= _flat(value, "version of " if key == "versions" else f"{plain(key, 60)} ")
        else:
            flat[plain(f"{prefix}{key}", 80)] = _show(value)
    return flat


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else plain(value, 200)


def _quantity(value: float) -> str:
    """ "1.2 M"; a dash where it is not known."""
    if not math.isfinite(value):
        return "–"
    for power, letter in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {letter}"
    return f"{value:.0f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
