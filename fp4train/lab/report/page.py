"""The report: one HTML file that needs no network and runs no script.

Figures are SVG by matplotlib. The alternatives ship JavaScript that has to stand in every file (in
their wheels: Plotly 4.8 MB, Bokeh 1.3 MB) and would be a new dependency. A script lays a plot out
for the screen that it starts on, so that paper and a turned phone need it to run again. Matplotlib
is a dependency already, its licence sets no terms for what it draws, a report takes some hundred
kilobytes, prints as vectors, and shows in viewers that run no scripts: mail, forges, shared disks.
What is given up is zooming, and reading a value under the pointer; the tables have the numbers.

Names and values come from run directories of other people. The template escapes each of them.
Besides `<`, `>`, `&` and quotes, control characters, lone surrogates and the marks that turn the
direction of writing are replaced: they would let a name look like another one, or cannot be
encoded. Since nothing has to run, the page's Content-Security-Policy forbids every script and every
request, also one that a name might bring in past the escaping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fp4train import __version__, text
from fp4train.errors import UserError
from fp4train.hardware import Gpu
from fp4train.lab.analysis import figure, heatmap, over_steps
from fp4train.lab.costs import CostEstimate
from fp4train.lab.report import facts, groups
from fp4train.lab.report.sources import RunSource, read_sources
from fp4train.lab.studies import RankResult, SensitivityResult, figures, sequential

PAGE = "page.html"
STYLE = "page.css"
LONGEST = 2000
"""Characters of a single text that are shown."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs that are read, and what is shown of them.

    Args:
        left_out: sentences about runs and predictions that are missing.
        predicted: estimated time of each run on `gpu`.
    """

    sources: Sequence[RunSource]
    left_out: Sequence[str]
    gpu: Gpu | None
    predicted: Mapping[RunSource, CostEstimate]

    @cached_property
    def grouped(self) -> list[groups.SeedGroup]:
        return groups.group(self.sources)

    @cached_property
    def at(self) -> tuple[str, int] | None:
        """The loss and the step that gaps are of; None where the runs share no step."""
        return groups.common(self.grouped)

    @property
    def rankings(self) -> dict[RankResult, RunSource]:
        """Rankings on checkpoints of the runs → the first run that has it."""
        runs: dict[RankResult, RunSource] = {}
        for source in self.sources:
            for ranking in source.studies.rankings:
                runs.setdefault(ranking, source)
        return runs

    @property
    def sensitivities(self) -> list[tuple[RunSource, SensitivityResult]]:
        return [
            (source, study) for source in self.sources for study in source.studies.sensitivities
        ]

    def render(self) -> str:
        """The whole page."""
        rows = groups.recipe_rows(self.grouped)
        pages = _environment()
        return pages.get_template(PAGE).render(
            style=Markup(pages.get_template(STYLE).render()),
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            report=self,
            sources=self.sources,
            grouped=self.grouped,
            at=self.at,
            recipe_rows=rows,
            shades=figure.shades(recipe for row in rows for *_, recipe in row.bands),
            stretches=[
                (source, stretch) for source in self.sources for stretch in source.stretches
            ],
            events=[(source, event) for source in self.sources for event in source.events],
            gates=dict.fromkeys(gate for source in self.sources for gate in source.studies.gates),
        )

    @property
    def problems(self) -> list[str]:
        """Sentences about what is left out or missing."""
        return [
            *self.left_out,
            *(problem for source in self.sources for problem in source.problems),
        ]

    def write(self, out: Path) -> None:
        """Write the page.

        Raises:
            UserError: the file cannot be written.
        """
        figure.write(out, self.render().encode())

    def write_figures(self, out: Path, endings: Sequence[str], width: float) -> list[Path]:
        """Write each figure to files beside `out`, named after it; their paths.

        Raises:
            UserError: a file cannot be written.
        """
        written = []
        drawings = self.figures() if endings else {}
        for name, draw in drawings.items():
            paths = [out.with_name(f"{out.stem}-{name}{ending}") for ending in endings]
            figure.save(draw, width, *paths)
            written += paths
        return written

    def figures(self) -> dict[str, figure.Draw]:
        """Name → figure, each with its names and its legend."""
        rows = [
            replace(row, label=source.name)
            for row, source in zip(groups.recipe_rows(self.grouped), self.sources, strict=True)
        ]
        losses = groups.losses(self.grouped, self.at)
        drawings = {"curves": over_steps(losses, rows, named=True)}
        for number, ranking in enumerate(self.rankings, start=1):
            drawings[f"ranking-{number}"] = figures.ranking(ranking, named=True)
        for number, (_, study) in enumerate(self.sensitivities, start=1):
            drawings[f"sensitivity-{number}"] = figures.sensitivity(study)
        for source in self.sources:
            if source.errors is not None:
                drawings[f"errors-{source.number}"] = heatmap.worst_maps(source.errors)
        return drawings


def read_report(runs: Sequence[Path], out: Path, gpu: Gpu | None = None) -> Report:
    """The report of `runs`, the first of which is the reference, to be written to `out`.

    Args:
        gpu: whose time for each run is estimated; None estimates none.

    Raises:
        UserError: no run is given or can be read, or there is no such folder.
    """
    figure.check_out(out, (".html",))
    if not runs:
        raise UserError("report needs run directories: fp4train report RUN RUN… [out=report.html]")
    sources, left_out = read_sources(runs)
    predicted: dict[RunSource, CostEstimate] = {}
    if gpu is not None:
        predicted, unknown = facts.predict(sources, gpu)
        left_out += unknown
    return Report(sources=sources, left_out=left_out, gpu=gpu, predicted=predicted)


def write_report(runs: Sequence[Path], out: Path, gpu: Gpu | None = None) -> list[str]:
    """Write the report of `runs`; sentences about what was left out or is missing.

    Raises:
        UserError: the errors of `read_report`, or the file cannot be written.
    """
    report = read_report(runs, out, gpu)
    report.write(out)
    return report.problems


@cache
def _environment() -> Environment:
    """Templates whose values are escaped, and in which a name that nobody gives is an error."""
    pages = Environment(
        loader=PackageLoader("fp4train.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_seen,
    )
    modules = (facts, figure, figures, groups, heatmap, sequential, text)
    pages.globals |= {module.__name__.rpartition(".")[2]: module for module in modules}
    pages.globals |= {"svg": _svg, "over_steps": over_steps, "version": __version__}
    pages.filters["form"] = format
    return pages


def _seen(value: Any) -> Any:
    """Markup as it is; of anything else a text in which every character can be seen."""
    if isinstance(value, Markup):
        return value
    return figure.plain(value, LONGEST)


def _svg(name: str, draw: figure.Draw, width: float, alt: str) -> Markup:
    return Markup(figure.inline_svg(name, draw, width, figure.plain(alt, 1000)))
