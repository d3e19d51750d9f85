"""scripts/published_figures.py: figures that it calls reproduced come out, and the page says so."""

import re
from pathlib import Path

import published_figures as script
import pytest
from figure_measures import error_split

from fp4train.lab.ledger import ledger

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks" / "published_figures.md").read_text(encoding="utf-8")
ROWS = {
    cells[1]: cells
    for line in PAGE.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
}
"""The cells of the page, by figure: source, figure, published, here, deviation, verdict."""
LAYERS = "SNR of"
"""Begins figures of whole layers, which take seconds."""


def number(cell: str) -> float:
    found = re.match(r"[-+.\d]+", cell)
    assert found is not None
    return float(found[0])


def test_a_draw_of_each_figure_is_what_the_page_says_and_reproduces_what_it_reproduces() -> None:
    figures = script.figures()
    assert [figure.what for figure in figures] == list(ROWS)[2:]
    for figure in figures:
        if figure.what.startswith(LAYERS):
            continue
        _, _, published, here, deviation, verdict = ROWS[figure.what]
        drawn = figure.measure(0)
        room = 2 * number(deviation) + 10.0**-figure.digits / 2
        assert number(published) == figure.published
        assert abs(drawn - number(here)) <= room, figure.what
        assert (abs(number(here) - figure.published) <= room) == (verdict == "reproduced")
        assert verdict in ("reproduced", f"not explained; {figure.why}"), figure.what


@pytest.mark.long
def test_the_page_is_what_the_script_prints() -> None:
    results = [script.result(figure) for figure in script.figures()]
    assert "\n".join(script.table(results)) in PAGE


def test_parts_of_the_error_are_those_of_the_page_and_add_up() -> None:
    shares = error_split("even")
    assert sum(shares) == pytest.approx(100)
    assert f"| even | {' | '.join(f'{share:.1f} %' for share in shares)} |" in PAGE


def test_figures_of_the_ledger_are_those_of_the_page() -> None:
    computed = [(entry, figure) for entry in ledger() for figure in entry.figures if figure.here]
    assert computed
    for entry, figure in computed:
        source, *_ = ROWS[figure.what]
        assert ROWS[figure.what][2:4] == [figure.published, figure.here]
        if entry.arxiv is None:
            assert source.partition(",")[0] in entry.title
        else:
            assert source == f"[{entry.arxiv}]({entry.link})"


def test_the_page_counts_figures_of_papers_and_those_of_this_project_apart() -> None:
    verdicts: dict[bool, list[bool]] = {True: [], False: []}
    for cells in list(ROWS.values())[2:]:
        verdicts[cells[0] == script.EARLIER].append(cells[5] == "reproduced")
    papers, earlier = (f"{sum(verdicts[of])} of {len(verdicts[of])}" for of in (False, True))
    assert f"{papers} figures of papers and programs and {earlier} of {script.EARLIER}" in PAGE
