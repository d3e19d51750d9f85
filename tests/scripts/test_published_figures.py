"""scripts/published_figures.py: figures that it calls reproduced come out, and the page says so."""

import math
import re
from pathlib import Path

import published_figures as script
import pytest
import torch
from figure_measures import (
    decibels,
    error_split,
    share_of_the_mean,
    shares_of_the_mean,
    with_outliers,
)

from fp4train.lab.ledger import ledger

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks" / "published_figures.md").read_text(encoding="utf-8")


def cells_of(line: str) -> list[str]:
    """The cells of a row of a table in Markdown."""
    return [cell.strip() for cell in line.strip("|").split("|")]


ROWS = {cells[1]: cells for line in PAGE.splitlines() if len(cells := cells_of(line)) == 7}
"""The cells of the page, by figure: source, figure, published, its rounding, here, deviation, verdict."""
LAYERS = "SNR of"
"""Begins figures of whole layers, which take seconds."""


def number(cell: str) -> float:
    found = re.match(r"[-+.\d]+", cell)
    assert found is not None
    return float(found[0])


def test_a_draw_of_each_figure_is_what_the_page_says_and_the_page_says_how_near_it_is() -> None:
    figures = script.figures()
    assert [figure.what for figure in figures] == list(ROWS)[2:]
    for figure in figures:
        _, _, published, rounding, here, deviation, verdict = ROWS[figure.what]
        half = 10.0**-figure.digits / 2
        room = 2 * number(deviation) + half
        distance = abs(number(here) - figure.published)
        shown = half / 5  # a unit of the digits of the page
        assert number(published) == figure.published
        assert number(rounding.removeprefix("± ")) == pytest.approx(half)
        if distance < half - shown:
            assert verdict == script.ROUNDED, figure.what
        elif half + shown < distance < room - shown:
            assert verdict == script.SCATTER, figure.what
        elif distance > room + shown:
            assert verdict == f"{script.MISSED}: {figure.why}" and figure.why, figure.what
        if not figure.what.startswith(LAYERS):
            drawn = figure.measure(figure.seeds[0])
            assert abs(drawn - number(here)) <= room, figure.what


def test_a_verdict_tells_rounding_from_scatter_from_a_miss() -> None:
    figure = script.Figure(
        source="x", what="x", published=1.82, digits=2, measure=lambda seed: 1.0, why="unknown"
    )
    for here, deviation, verdict in (
        (1.8249, 0.0, script.ROUNDED),
        (1.8151, 0.0, script.ROUNDED),
        (1.8140, 0.0, script.MISSED),
        (1.8140, 0.001, script.SCATTER),
        (1.8000, 0.001, script.MISSED),
    ):
        assert script.Result(figure=figure, here=here, deviation=deviation).verdict == verdict


@pytest.mark.long
def test_the_page_is_what_the_script_prints() -> None:
    """But for the last digit of what was computed here: CPUs add the products of a GEMM in
    different orders.
    """
    results = [script.result(figure) for figure in script.figures()]
    rows = [cells_of(line) for line in script.table(results)]
    assert [cells[1] for cells in rows] == list(ROWS)
    for cells, result in zip(rows[2:], results, strict=True):
        on_page = ROWS[cells[1]]
        assert [*cells[:4], cells[6]] == [*on_page[:4], on_page[6]]
        digits = result.figure.digits
        unit_here = 10.0 ** -(digits + 1)
        unit_deviation = 10.0 ** -(digits + 2)
        assert number(cells[4]) == pytest.approx(number(on_page[4]), rel=0, abs=1.5 * unit_here)
        assert number(cells[5]) == pytest.approx(
            number(on_page[5]), rel=0, abs=1.5 * unit_deviation
        )


def test_the_signal_of_altos_snr_is_the_quantised_tensor() -> None:
    """`calc_snr` of its alto/kernels/fp4/testing_utils.py at 74e251d, called with it first."""
    quantised, high = torch.tensor([3.0, 0.0]), torch.tensor([4.0, 1.0])
    assert decibels(quantised, high) == pytest.approx(10 * math.log10(9 / 2))


def test_tensors_of_one_seed_are_alike_but_for_their_outliers() -> None:
    """As those of ALTO's `prepare_data`, which seeds a generator before each tensor."""
    few, many = with_outliers((32, 64), 1).flatten(), with_outliers((64, 64), 1).flatten()
    differ = few != many[: len(few)]
    assert 0.002 < differ.float().mean() < 0.02
    assert not torch.equal(few.abs() > 8, many[: len(few)].abs() > 8)


def test_parts_of_the_error_are_those_of_the_page_and_add_up() -> None:
    shares = error_split("even")
    assert sum(shares) == pytest.approx(100)
    assert f"| even | {' | '.join(f'{share:.1f} %' for share in shares)} |" in PAGE


def test_figures_of_the_ledger_are_those_of_the_page() -> None:
    computed = [(entry, figure) for entry in ledger() for figure in entry.figures if figure.here]
    assert computed
    for entry, figure in computed:
        source, _, published, _, here, _, verdict = ROWS[figure.what]
        missed = ", not reproduced" if verdict.startswith(script.MISSED) else ""
        assert (figure.published, figure.here) == (published, here + missed)
        if entry.arxiv is None:
            assert source.partition(",")[0] in entry.title
        else:
            assert source == f"[{entry.arxiv}]({entry.link})"


def test_the_page_counts_figures_of_papers_and_those_of_this_project_apart() -> None:
    verdicts: dict[bool, list[str]] = {True: [], False: []}
    for cells in list(ROWS.values())[2:]:
        verdicts[cells[0] == script.EARLIER].append(cells[6].partition(":")[0])
    for source, kinds in (("Papers and programs", verdicts[False]), ("An earlier", verdicts[True])):
        line = next(line for line in PAGE.splitlines() if line.startswith(f"- {source}"))
        assert f"{len(kinds)} figures: {kinds.count(script.ROUNDED)} round to" in line
        assert f"{kinds.count(script.SCATTER)} more lie within the scatter" in line
        assert f"{kinds.count(script.MISSED)} are not reproduced" in line


@pytest.mark.parametrize("rounding", ["rceil", "even", "floor"])
def test_parts_of_the_error_are_those_of_their_definition(rounding: str) -> None:
    """By a float64 rounding to the values of E2M1, and scales of a power of two."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(4)).double()
    blocks = x.reshape(-1, 32)
    amax = blocks.abs().amax(1, keepdim=True)
    power = {
        "rceil": torch.ceil(torch.log2(amax / 6)),
        "even": torch.floor(torch.log2(amax / 1.75)) - 1,
        "floor": torch.floor(torch.log2(amax)) - 2,
    }[rounding]
    error_of_mxfp4 = nearest_e2m1(blocks / 2**power) * 2**power - blocks
    rounded = nearest_e2m1(blocks / amax * 6) * amax / 6
    error = (rounded - blocks).square()
    energy = error_of_mxfp4.square().sum()
    dead = 100 * float(error[blocks.abs() * 24 <= amax].sum() / energy)
    grid = 100 * float(error[blocks.abs() * 24 > amax].sum() / energy)
    assert error_split(rounding, x.float()) == pytest.approx(
        [100 - dead - grid, dead, grid], abs=0.05
    )
    assert 100 - dead - grid > 5 > dead > 0.5


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest values of E2M1, float64; numbers halfway between two do not come."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = (x.abs().unsqueeze(-1) - values).abs().argmin(-1)
    return values[nearest] * x.sign()


def test_the_share_of_the_mean_is_what_the_variance_leaves() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(5))
    x += torch.linspace(-1, 1, 64)
    variance = float(x.var(0, correction=0).sum() / x.square().sum(1).mean())
    assert share_of_the_mean(x) == pytest.approx(100 * (1 - variance), rel=1e-4)
    assert share_of_the_mean(x - x.mean(0)) == pytest.approx(0, abs=1e-6)
    assert share_of_the_mean(torch.ones(8, 4)) == pytest.approx(100)


def test_the_share_of_the_mean_is_given_for_each_layer_of_the_default_model(
    small_run: Path,
) -> None:
    shares = dict(shares_of_the_mean(small_run))
    layers = (
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "mlp.gate",
        "mlp.down",
    )
    assert {f"blocks.0.{name}" for name in layers} <= set(shares)
    assert all(0 < share < 100 for share in shares.values())
    assert shares["blocks.0.attention.wq"] == shares["blocks.0.attention.wv"], "they read one x"
    header = "| block | attention.wq | attention.wo | mlp.gate | mlp.down |"
    assert header in PAGE and header in script.by_block(list(shares.items()))[0]
