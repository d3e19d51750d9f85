"""Figures that papers give of formats and roundings, beside what fp4train's quantisers make of them, on a CPU.

    python scripts/paper/published_figures.py [--out benchmarks/published_figures.md]

Prints the table, and writes it to the file. Each figure is the mean of PARTS draws, or of those of its source. The
table says of each whether it rounds to the published one, lies as near as one draw would (half a unit of the last
digit and two deviations of a draw), or is not reproduced, and what is known of the difference.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from figure_measures import (
    PARTS,
    AltoTable,
    bf16_above,
    bias,
    crest,
    crossover,
    e4m3_above,
    lossless_blocks,
    power_of_two_above,
    qsnr_gap,
    squared_error,
)

from fp4train.formats import get_format
from fp4train.quantize import QuantSpec

COTCODEC = "cotcodec, crest_prediction.py"
"""A script of github.com/Kevin-Liu-01/cotcodec, and its record."""
ALTO = "ALTO, Table 1"
ALTO_LEAST = 8.4
"""The SNR in dB that ALTO's test of its layer asks for, of y, dx and dw."""
DEVIATIONS = 2
"""Standard deviations of a draw that a figure may lie beyond its rounding: the published one is a
draw, too.
"""
COTCODEC_SEEDS = (42, 43, 44)
"""Of the draws that cotcodec's record averages, by numpy; of the crest factors it has the last."""
ROUNDED = "rounds to it"
SCATTER = "within the scatter of a draw"
MISSED = "not reproduced"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure and how to compute it.

    Args:
        source: number of the paper, or what else gives it.
        published: its value; `digits`: how many it has after the point; `unit`: what stands behind.
        measure: seed of a draw → the value here.
        seeds: seeds of the draws whose mean is compared.
        why: known reason of the difference where it is not reproduced; empty where it is.
    """

    source: str
    what: str
    published: float
    digits: int
    measure: Callable[[int], float]
    unit: str = ""
    seeds: Sequence[int] = range(PARTS)
    why: str = ""

    def draws(self) -> list[float]:
        return [self.measure(seed) for seed in self.seeds]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A figure, its mean over draws here, and the standard deviation of a draw."""

    figure: Figure
    here: float
    deviation: float

    @property
    def verdict(self) -> str:
        figure = self.figure
        if f"{self.here:.{figure.digits}f}" == f"{figure.published:.{figure.digits}f}":
            return ROUNDED
        room = half_unit(figure) + DEVIATIONS * self.deviation
        return SCATTER if abs(self.here - figure.published) <= room + 1e-12 else MISSED


def half_unit(figure: Figure) -> float:
    """Half a unit of the last digit that is published."""
    return 0.5 * 10.0**-figure.digits


def result(figure: Figure) -> Result:
    draws = figure.draws()
    deviation = stdev(draws) if len(draws) > 1 else 0.0
    return Result(figure=figure, here=fmean(draws), deviation=deviation)


def figures() -> list[Figure]:
    """All of them, in the order of the table."""
    rows = AltoTable()
    stochastic = QuantSpec(rounding="stochastic")
    four_over_six = QuantSpec(four_over_six="mse", global_bound=256)
    return [
        *(
            Figure(
                source="2601.22813",
                what=f"MSE of N(0, 1), {what}",
                published=published,
                digits=1,
                unit="e-3",
                measure=squared_error(spec),
            )
            for what, published, spec in (
                ("1×16 nearest", 9.0, QuantSpec()),
                ("four over six, MSE, bound 256", 7.6, four_over_six),
                ("four over six, MAE, bound 256", 7.8, replace(four_over_six, four_over_six="mae")),
                ("16×16 nearest", 12.4, QuantSpec(block=(16, 16))),
                ("1×16 stochastic", 18.8, stochastic),
                ("1×16 stochastic, guard 16/17", 23.5, replace(stochastic, guard=16 / 17)),
            )
        ),
        *(
            Figure(
                source="2504.20634",
                what=f"bias of {bits} random bits, {name} to {element.upper()}",
                published=published,
                digits=3,
                unit=" ulp",
                measure=bias(element, bits, dtype),
            )
            for bits, name, dtype, element, published in (
                (2, "FP16", torch.float16, "e2m1", -0.124),
                (3, "BF16", torch.bfloat16, "e5m2", -0.047),
            )
        ),
        *(
            Figure(
                source=COTCODEC,
                what=f"crest factor of N(0, 1), blocks of {columns}",
                published=published,
                digits=2,
                measure=crest(columns),
                seeds=COTCODEC_SEEDS[-1:],
            )
            for columns, published in ((16, 2.07), (32, 2.32))
        ),
        *(
            Figure(
                source="2510.25602",
                what=f"crest factor where {names} are equal, by its error model",
                published=published,
                digits=2,
                measure=crossover(columns, ratio, get_format("e2m1"), 4),
            )
            for names, columns, ratio, published in (
                ("MXINT4 and MXFP4", None, 1.5, 2.04),
                ("NVINT4 and NVFP4", 16, 1.05, 2.39),
            )
        ),
        *(
            Figure(
                source=COTCODEC,
                what=f"QSNR of E2M1 − INT4, Gaussian, {name} per {columns}, rounded up",
                published=published,
                digits=2,
                unit=" dB",
                measure=qsnr_gap(rounding, columns),
                seeds=COTCODEC_SEEDS,
            )
            for name, columns, rounding, published in (
                ("E8M0", 32, power_of_two_above, 1.82),
                ("E8M0", 16, power_of_two_above, 1.27),
                ("E4M3", 16, e4m3_above, -0.69),
                ("BF16", 32, bf16_above, -0.34),
            )
        ),
        Figure(
            source="ModelOpt 1372",
            what="blocks of MXFP4 that are NVFP4 without loss",
            published=100,
            digits=0,
            unit=" %",
            measure=lossless_blocks,
        ),
        *(
            Figure(
                source=ALTO,
                what=f"SNR of {tensor}, {row}",
                published=published,
                digits=2,
                unit=" dB",
                measure=rows.cell(column, transformed, stochastic),
            )
            for row, transformed, stochastic, published_row in (
                ("32×32 weights", False, False, (13.48, 11.80, 13.02)),
                ("with the transform", True, False, (13.48, 11.80, 13.25)),
                ("with the transform, stochastic", True, True, (13.48, 11.02, 13.04)),
            )
            for column, (tensor, published) in enumerate(
                zip(("y", "dx", "dw"), published_row, strict=True)
            )
        ),
    ]


def table(results: Sequence[Result]) -> list[str]:
    lines = [
        "| source | figure | published | its rounding | here | ± | |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in results:
        figure = entry.figure
        if figure.source[0].isdigit():
            source = f"[{figure.source}](https://arxiv.org/abs/{figure.source})"
        else:
            source = figure.source
        reason = figure.why if entry.verdict == MISSED else ""
        lines.append(
            f"| {source} | {figure.what} | {figure.published:.{figure.digits}f}{figure.unit} | "
            f"± {half_unit(figure):.{figure.digits + 1}f} | "
            f"{entry.here:.{figure.digits + 1}f}{figure.unit} | "
            f"{entry.deviation:.{figure.digits + 2}f} | "
            f"{': '.join(filter(None, (entry.verdict, reason)))} |"
        )
    return lines


def report(results: Sequence[Result]) -> str:
    verdicts = Counter(entry.verdict for entry in results)
    lines = [
        "# Published figures",
        "",
        f"By `python scripts/paper/published_figures.py` on a CPU: the mean of {PARTS} draws of 1024 × 1024 values, or "
        "of the draws of the source where its program says them (cotcodec); ± is the standard deviation of a draw. "
        "The published ones are draws, too, so beside those that round to the same digits the table tells which "
        f"lie within half a unit of the last digit and {DEVIATIONS} deviations.",
        "",
        f"{len(results)} figures: {verdicts[ROUNDED]} round to the published one, {verdicts[SCATTER]} more lie within "
        f"the scatter of a draw, {verdicts[MISSED]} are not reproduced.",
        "",
        *table(results),
        "",
        f"ALTO's own test asks for an SNR above {ALTO_LEAST} dB of y, dx and dw; the least here is "
        f"{min(entry.here for entry in results if entry.figure.source == ALTO):.2f} dB.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/published_figures.md"))
    args = parser.parse_args()
    text = report([result(figure) for figure in figures()])
    print(text)
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
