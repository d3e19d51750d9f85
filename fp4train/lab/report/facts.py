"""The parts of a report that are facts about the runs: what differs in their configuration, environment, and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from fp4train.config import to_config
from fp4train.data.source import planned_vocab_size
from fp4train.errors import UserError
from fp4train.hardware import Device, Gpu
from fp4train.lab.analysis.figure import plain
from fp4train.lab.costs.estimate import CostEstimate, estimate, time_text
from fp4train.lab.report.html import Html, joined, table, tag
from fp4train.lab.report.sections import section
from fp4train.lab.report.sources import UNREADABLE, RunSource
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model, build_plan, build_timeline
from fp4train.run.record import directory as run_directory
from fp4train.run.record.journal import UNRECORDED
from fp4train.run.record.trust import check_paths
from fp4train.text import ranges

LARGEST = 1 << 20
"""A model with a larger number in its configuration is none."""
KEYS = 150
"""Differing keys that are listed."""
MOST_ROWS = 1 << 40
"""A batch of more sequences is none."""
_UNINTERESTING = ("run.name", "run.dir", "data.cache_dir")


def predict(sources: Sequence[RunSource], gpu: Gpu) -> tuple[dict[RunSource, CostEstimate], list[str]]:
    """The runs that can be estimated, and a sentence for each that cannot."""
    found: dict[RunSource, CostEstimate] = {}
    problems: list[str] = []
    for source in sources:
        try:
            found[source] = _predicted_time(source, gpu)
        except UNREADABLE as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            problems.append(f"{source.name}: its time on {gpu} is not estimated: {said}")
    return found, problems


def _predicted_time(source: RunSource, gpu: Gpu) -> CostEstimate:
    path = source.metrics.path
    for key, value in (source.config or {}).items():
        if key.startswith("model.") and isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{key}={value} is no size of a model")
    saved = run_directory.read_config(path)
    # All that the estimate reads of the data is the size of the vocabulary.
    check_paths(OmegaConf.create({"resume": str(path), "data": {"tokenizer": saved.data.get("tokenizer")}}), ())
    config = to_config(saved)
    model = build_model(config, planned_vocab_size(config.data), torch.device("meta"))
    plan = build_plan(config, find_layers(model), build_timeline(config, path), Device.elsewhere(gpu))
    microbatches = config.train.batch_size // (config.train.microbatch or config.train.batch_size)
    return estimate(plan, gpu, microbatches=microbatches)


def differences(sources: Sequence[RunSource]) -> Html:
    """The configuration keys whose values differ, with the runs of each value."""
    known = [source for source in sources if source.config is not None]
    if len(known) < 2:
        return Html()
    keys = list(dict.fromkeys(key for source in known for key in source.config or {}))
    skipped = (*UNRECORDED, *_UNINTERESTING)
    differing = [key for key in keys if key not in skipped and len({_show(s.setting(key)) for s in known}) > 1]
    rows = [
        [key, _by_value({s: _show(s.setting(key)) for s in known if key in (s.config or {})}, len(known))]
        for key in differing[:KEYS]
    ]
    if not rows:
        return section("Configuration", tag("p", "The runs have the same configuration.", class_="note"))
    more = f", {len(differing) - KEYS} more are not listed" if len(differing) > KEYS else ""
    caption = f"The {len(differing)} keys that differ, of {len(keys)}{more}; after each value the numbers of its runs"
    return section("Configuration", table(["key", "values"], rows, caption=caption))


def environment(sources: Sequence[RunSource]) -> Html:
    """Host, device and versions of every run; what differs has the runs beside it."""
    known = {source: _flat(source.environments[-1][1]) for source in sources if source.environments}
    without = [source for source in sources if source not in known]
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


def cost(
    sources: Sequence[RunSource], gpu: Gpu | None = None, predicted: Mapping[RunSource, CostEstimate] | None = None
) -> Html:
    """Tokens, time and arithmetic of every run; with `gpu`, what was `predicted` for it."""
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
    header = ["", "run", "tokens", "tokens/s", "time of steps", "MFU", "FLOP of linear layers", "in elements"]
    note = (
        "Tokens per second: the median over steps, measured. The time of steps leaves out evaluations and checkpoints. "
        "Emulated formats are slower than BF16; fp4train plan gpu=B200 estimates what a GPU takes."
    )
    body = table(header, rows, caption="Measured speed, and the arithmetic that was done", right=(2, 3, 4, 5, 6))
    times = Html() if gpu is None else _predicted(gpu, predicted or {})
    return section("Cost", body, tag("p", note, class_="note"), times)


def _predicted(gpu: Gpu, predicted: Mapping[RunSource, CostEstimate]) -> Html:
    """The estimated time of the linear layers of each run on a GPU."""
    if not predicted:
        return tag("p", f"No run's time on {gpu} can be estimated.", class_="note")
    rows = [
        [
            source.number,
            source.name,
            time_text(each.total / steps) if (steps := sum(at.steps for at in each.stretches)) else "–",
            f"{each.total / each.bf16:.2f}" if each.bf16 else "–",
            time_text(each.total),
            "some GEMMs" if any(row.emulated is not None for at in each.stretches for row in at.rows) else "none",
        ]
        for source, each in predicted.items()
    ]
    header = ["", "run", "time per step", "relative to BF16", "all planned steps", "emulated"]
    note = (
        "By the cost model of fp4train plan gpu=…: products and quantising of the linear layers on one GPU, without "
        "attention, norms, the optimizer and communication. GEMMs without a kernel on the GPU are emulated."
    )
    body = table(header, rows, caption=f"Predicted time of the linear layers on {gpu}", right=(2, 3, 4))
    return joined([body, tag("p", note, class_="note")])


def _arithmetic(source: RunSource) -> dict[str, float]:
    """Multiply-adds of the linear layers by elements, for the steps that were trained."""
    batch, microbatch = source.setting("train.batch_size"), source.setting("train.microbatch")
    sizes = [size for size in (batch, microbatch) if isinstance(size, int) and 0 < size <= MOST_ROWS]
    count = sizes[0] / sizes[1] if len(sizes) == 2 else 1.0
    found: dict[str, float] = {}
    for stretch in source.stretches:
        steps = max(0, min(stretch.stop, source.done) - stretch.start)
        for elements, share in stretch.shares.items():
            found[elements] = found.get(elements, 0.0) + share * float(sum(stretch.macs)) * steps * count
    return {elements: macs for elements, macs in found.items() if macs}


def _by_value(values: Mapping[RunSource, str], everything: int) -> Html:
    """The distinct values, each with the numbers of its runs; alone if all runs have it."""
    runs: dict[str, list[int]] = {}
    for source, value in values.items():
        runs.setdefault(value, []).append(source.number)
    if len(runs) == 1 and len(values) == everything:
        return tag("span", next(iter(runs)))
    return joined(
        tag("div", tag("code", value), " ", tag("span", ranges(numbers, least=3), class_="runs"))
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
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
