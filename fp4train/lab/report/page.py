"""The report: one HTML file that needs no network and runs no script.

Figures are SVG by matplotlib. The alternatives ship JavaScript that has to stand in every file (in their wheels: Plotly
4.8 MB, Bokeh 1.3 MB) and would be a new dependency. A script lays a plot out for the screen that it starts on, so that
paper and a turned phone need it to run again. Matplotlib is a dependency already, its licence sets no terms for what it
draws, a report takes some hundred kilobytes, prints as vectors, and shows in viewers that run no scripts: mail, forges,
shared disks. What is given up is zooming, and reading a value under the pointer; the tables have the numbers.

Since nothing has to run, the page's Content-Security-Policy forbids every script and every request, also one that a
name from somebody else's run directory might bring in past the escaping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from fp4train import __version__, files
from fp4train.errors import UserError
from fp4train.hardware import Gpu
from fp4train.lab.analysis.figure import shortened
from fp4train.lab.costs.estimate import CostEstimate
from fp4train.lab.report import facts, sections
from fp4train.lab.report.groups import common, group
from fp4train.lab.report.html import Html, tag
from fp4train.lab.report.sources import RunSource, read_sources
from fp4train.run.observe import THRESHOLD

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
ENDING = ".html"
STYLE = "page.css"


def write_report(runs: Sequence[Path], out: Path, gpu: Gpu | None = None) -> list[str]:
    """Write the report of `runs`, the first of which is the reference; what was left out or is missing.

    Args:
        gpu: whose time for each run is estimated; None estimates none.

    Raises:
        UserError: no run is given or can be read, or the file cannot be written.
    """
    check_out(out)
    if not runs:
        raise UserError("report needs run directories: fp4train report RUN RUN… [out=report.html]")
    sources, left_out = read_sources(runs)
    predicted, unknown = ({}, []) if gpu is None else facts.predict(sources, gpu)
    page = render(sources, [*left_out, *unknown], gpu, predicted)
    try:
        files.write(out, page.encode(), sync=False)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from error
    return [*left_out, *unknown, *(problem for source in sources for problem in source.problems)]


def check_out(out: Path) -> None:
    """Refuse a file that cannot be the report, before anything is read.

    Raises:
        UserError: its name ends otherwise, or there is no such folder.
    """
    if out.suffix.lower() != ENDING:
        raise UserError(f"out={out if out.name else ''}: the name must end in {ENDING}")
    if not out.parent.is_dir():
        raise UserError(f"out={out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UserError(f"out={out} is a folder; name a file in it")


def render(
    sources: Sequence[RunSource],
    left_out: Sequence[str],
    gpu: Gpu | None = None,
    predicted: Mapping[RunSource, CostEstimate] | None = None,
) -> str:
    """The whole page."""
    groups = group(sources)
    at = common(groups)
    parts = [
        sections.results(groups, at),
        sections.curves(groups, at),
        sections.rankings(sources),
        sections.sensitivities(sources),
        sections.errors(sources),
        facts.differences(sources),
        facts.environment(sources),
        facts.cost(sources, gpu, predicted),
    ]
    named = " and ".join(shortened(source.name, 40) for source in sources)
    title = f"Report of {named if len(sources) < 3 else f'{len(sources)} runs'}"
    warned = [
        *(f"Left out: {each}" for each in left_out),
        *different_data(sources),
        *(sentence for source in sources for sentence in weak_gradient(source)),
        *(f"{source.name}: {problem}" for source in sources for problem in source.problems),
    ]
    titles = [re.search(r'<section id="([^"]+)"><h2>([^<]+)</h2>', part) for part in parts]
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title),
        tag("style", Html(resources.files(__package__).joinpath(STYLE).read_text(encoding="utf-8"))),
    )
    body = tag(
        "body",
        tag("h1", title),
        tag("p", f"{len(sources)} run{'s' * (len(sources) > 1)}; made {made} by fp4train {__version__}", class_="note"),
        sections.warnings(warned),
        tag("nav", *(tag("a", Html(t[2]), href=f"#{t[1]}") for t in titles if t), aria_label="contents"),
        tag("main", *parts),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def different_data(sources: Sequence[RunSource]) -> list[str]:
    """Reasons why losses of these runs do not compare: other data, tokens, or sequences. Empty where none is known."""
    found = []
    prints = {str(source.environments[-1][1].get("data")) for source in sources if source.environments}
    keys = list(dict.fromkeys(key for s in sources for key in s.config or {} if key.startswith("data.")))
    keys = [key for key in (*keys, "train.seq_len", "eval.batches") if key != "data.cache_dir"]
    known = [source for source in sources if source.config is not None]
    differing = [key for key in keys if len({str(source.setting(key)) for source in known}) > 1]
    if len(prints) > 1:
        found.append("The runs were trained on different data (their fingerprints differ): losses do not compare.")
    elif data := [key for key in differing if key.startswith("data.")]:
        found.append(f"The runs differ in {', '.join(data[:6])}: losses may not compare.")
    if other := [key for key in differing if not key.startswith("data.")]:
        found.append(f"The runs differ in {', '.join(other)}: their validation losses are of different tokens.")
    return found


def weak_gradient(source: RunSource) -> list[str]:
    """A warning where the gradient fell below √3 times its quantisation noise ("FP4 All the Way", arXiv 2505.19115)."""
    ratio = source.metrics.series("error/gradient_to_noise")
    below = (ratio.values < THRESHOLD).nonzero()[0]
    if not len(below):
        return []
    first = int(below[0])
    return [
        f"{source.label}: at step {int(ratio.steps[first])} the gradient's norm was {ratio.values[first]:.2f} times "
        f"its quantisation noise, less than √3, and at {len(below)} of {len(ratio)} measured steps; quantised training "
        "becomes less effective there (arXiv 2505.19115)."
    ]
