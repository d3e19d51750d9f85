"""scripts/paper: figures that a page calls reproduced come out, and the ledger has those of the page."""

import re
from pathlib import Path

import published_figures as script
import pytest

from fp4train.lab.ledger import ledger

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks" / "published_figures.md").read_text(encoding="utf-8")
ROWS = {
    cells[1]: cells
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 7
}
"""The cells of the page, by figure: source, figure, published, its rounding, here, deviation, verdict."""
LAYERS = "SNR of"
"""Begins figures of whole layers, which take seconds."""


def number(cell: str) -> float:
    match = re.match(r"[-+.\d]+", cell)
    assert match is not None
    return float(match[0])


@pytest.mark.long
def test_a_draw_of_each_figure_lies_as_near_to_it_as_the_page_says() -> None:
    figures = script.figures()
    assert [figure.what for figure in figures] == list(ROWS)[2:]
    for figure in figures:
        _, _, published, _, here, deviation, _ = ROWS[figure.what]
        assert number(published) == figure.published
        if not figure.what.startswith(LAYERS):
            room = script.half_unit(figure) + 2 * number(deviation)
            assert figure.measure(figure.seeds[0]) == pytest.approx(number(here), abs=room)


def test_a_verdict_tells_rounding_from_scatter_from_a_miss() -> None:
    figure = script.Figure(source="x", what="x", published=1.82, digits=2, measure=float)
    for here, deviation, verdict in (
        (1.8249, 0.0, script.ROUNDED),
        (1.8151, 0.0, script.ROUNDED),
        (1.8140, 0.0, script.MISSED),
        (1.8140, 0.001, script.SCATTER),
        (1.8000, 0.001, script.MISSED),
    ):
        assert script.Result(figure=figure, here=here, deviation=deviation).verdict == verdict


def test_figures_of_the_ledger_are_those_of_the_page() -> None:
    computed = [(entry, figure) for entry in ledger() for figure in entry.figures if figure.here]
    assert computed
    for entry, figure in computed:
        source, _, published, _, here, _, _ = ROWS[figure.what]
        assert (figure.published, figure.here) == (published, here)
        if entry.arxiv is None:
            assert source.partition(",")[0] in entry.title
        else:
            assert source == f"[{entry.arxiv}]({entry.link})"
