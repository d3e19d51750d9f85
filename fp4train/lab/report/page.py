"""The report: one HTML file that needs no network and runs no script, a template over the pictures
of `analysis` and `studies`.

A picture stands in the page as SVG of its own, an image in the page's text: what it holds can
neither run nor be mixed up with the page, it prints as vectors, and it shows in viewers that run no
scripts: mail, forges, shared disks. What is given up is zooming, and reading a value under the
pointer; the tables have the numbers.

Names and values come from run directories of other people. The template escapes each of them.
Besides `<`, `>`, `&` and quotes, control characters, lone surrogates and the marks that turn the
direction of writing are written as JSON escapes them: they would let a name look like another one, or cannot be
encoded. Since nothing has to run, the page's Content-Security-Policy forbids every script and every
request, also one that a name might bring in past the escaping.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fp4train import __version__, text
from fp4train.lab.analysis import Comparison, figure, heatmap
from fp4train.lab.report import facts
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
        left_out: sentences about runs that are missing.
    """

    sources: Sequence[RunSource]
    left_out: Sequence[str]

    @cached_property
    def comparison(self) -> Comparison:
        names = [source.name for source in self.sources]
        return Comparison([source.metrics for source in self.sources], names)

    @cached_property
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

    @property
    def problems(self) -> list[str]:
        """Sentences about what is left out or missing."""
        return [
            *self.left_out,
            *(problem for source in self.sources for problem in source.problems),
        ]

    @cached_property
    def figures(self) -> dict[str, figure.Draw]:
        """Name → picture."""
        drawings = {"curves": self.comparison.picture()}
        for number, ranking in enumerate(self.rankings, start=1):
            drawings[f"ranking-{number}"] = figures.ranking(ranking)
        for number, (_, study) in enumerate(self.sensitivities, start=1):
            drawings[f"sensitivity-{number}"] = figures.sensitivity(study)
        for source in self.sources:
            if source.errors is not None:
                drawings[f"errors-{source.number}"] = heatmap.statistics(
                    source.errors, source.label
                )
        return drawings

    def render(self) -> str:
        """The whole page."""
        pages = _environment()
        return pages.get_template(PAGE).render(
            style=Markup(pages.get_template(STYLE).render()),
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            report=self,
            gates=dict.fromkeys(gate for source in self.sources for gate in source.studies.gates),
        )

    def write(self, out: Path) -> None:
        """Write the page.

        Raises:
            UserError: the file cannot be written.
        """
        figure.write(out, self.render().encode())

    def write_figures(self, out: Path, endings: Sequence[str], width: float) -> list[Path]:
        """Write each picture to files beside `out`, named after it; their paths.

        Raises:
            UserError: a file cannot be written.
        """
        written = []
        for name, draw in self.figures.items():
            paths = [out.with_name(f"{out.stem}-{name}.{ending}") for ending in endings]
            figure.save(draw, width, *paths)
            written += paths
        return written


def read_report(
    runs: Sequence[Path], out: Path, labels: Sequence[str] = (), baseline: Path | None = None
) -> Report:
    """The report of `runs`, to be written to `out`.

    Args:
        labels: names of the runs, as `labelled` has them.
        baseline: the reference; None: the first run.

    Raises:
        UserError: no run is given or can be read, there is no such folder, or there are more or
            fewer labels.
    """
    figure.check_out(out, (".html",))
    sources, left_out = read_sources(runs, labels, baseline)
    return Report(sources=sources, left_out=left_out)


@cache
def _environment() -> Environment:
    """Templates whose values are escaped, and in which a name that nobody gives is an error."""
    pages = Environment(
        loader=PackageLoader("fp4train.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_seen,
    )
    modules = (facts, sequential, text)
    pages.globals |= {module.__name__.rpartition(".")[2]: module for module in modules}
    pages.globals |= {"image": _image, "version": __version__}
    pages.filters |= {"form": format, "of": lambda place, items: items[place]}
    pages.tests["of_data"] = lambda key: key.startswith("data.")
    return pages


def _seen(value: Any) -> Any:
    """Markup as it is; of anything else a text in which every character can be seen."""
    if isinstance(value, Markup):
        return value
    return figure.plain(value, LONGEST)


def _image(draw: figure.Draw) -> Markup:
    """The address of a picture, which is all of it."""
    contents = figure.rendered(draw, figure.PICTURE, ".svg")
    return Markup("data:image/svg+xml;base64," + b64encode(contents).decode())
