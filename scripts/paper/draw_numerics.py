"""Draw the pictures of docs/numerics.md with the package's own quantisers.

    python scripts/paper/draw_numerics.py [DIRECTORY]

    e2m1_grid.png            the fifteen values of E2M1, rounding to nearest, and the relative error
    stochastic_rounding.png  the mean of many roundings, the bias of a clipped block maximum, and the guarded scale
    hadamard.png             one outlier before and after a Hadamard transform, and what that costs and saves

Every random number is seeded, so the same package draws the same pictures.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image
from torch import Tensor

from fp4train.formats import E2M1, E4M3, decode, encode, value_table
from fp4train.lab.analysis import IN_RECIPE, INK, QUIET, TRAIN, VALIDATION, new_figure, save, style
from fp4train.measure.metrics import measure
from fp4train.quantize import Hadamard, QuantSpec, RandomKey, quantize, random_bits
from fp4train.quantize.rounding import round_to_values
from fp4train.quantize.transform import transform

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
MAGNITUDES = value_table(E2M1)[:8]
GUARD = 16 / 17


def draw_all(directory: Path) -> list[Path]:
    """Draw every picture into `directory`; the paths written."""
    return [save_small(draw(), directory / name) for name, draw in pictures().items()]


def pictures() -> dict[str, Callable[[], Figure]]:
    """File names, and what draws them."""
    return {
        "e2m1_grid.png": draw_grid,
        "stochastic_rounding.png": draw_stochastic,
        "hadamard.png": draw_hadamard,
    }


def save_small(figure: Figure, path: Path) -> Path:
    """A PNG with a palette of 64 colours: a third of the size, and no difference to the eye."""
    save(lambda _: figure, figure.get_figwidth(), path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64)
    small.save(path, optimize=True)
    return path


def signed(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def percent(value: float, _: int) -> str:
    return f"{value:.0%}".replace("-", "−")


def prepare(axes: Axes, title: str, x: str, y: str) -> None:
    """The look that all panels share."""
    style(axes, title)
    axes.set_xlabel(x, fontsize=8, color=INK)
    axes.set_ylabel(y, fontsize=8, color=INK)


def legend(axes: Axes, place: Literal["upper left", "upper right", "lower left"]) -> None:
    axes.legend(
        loc=place, fontsize=7.5, frameon=False, labelcolor=INK, handlelength=1.6, borderaxespad=0.2
    )


def plain_ticks(axes: Axes, ticks: list[float]) -> None:
    """These ticks on the x axis, as plain numbers."""
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(value)))


# --- the grid of E2M1 ---


def draw_grid() -> Figure:
    figure = new_figure(9.0, 4.4)
    grid = figure.add_gridspec(2, 2, height_ratios=(0.62, 2.0))
    _number_line(figure.add_subplot(grid[0, :]))
    _staircase(figure.add_subplot(grid[1, 0]))
    _relative_error(figure.add_subplot(grid[1, 1]))
    return figure


def _number_line(axes: Axes) -> None:
    style(
        axes, "E2M1: sign, two bits of exponent, one of mantissa. Fifteen values, dense near zero"
    )
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(False)
    axes.axhline(0, color=QUIET, linewidth=1, zorder=1)
    for code, value in enumerate(value_table(E2M1)):
        if code == E2M1.sign_bit:  # -0.0 shares its place with 0
            continue
        colour = TRAIN if code < E2M1.sign_bit else VALIDATION
        axes.plot([value], [0], "o", color=INK if value == 0 else colour, markersize=6, zorder=2)
        axes.text(value, 0.5, signed(value), ha="center", va="bottom", fontsize=8.5, color=INK)
        bits = f"{code:04b}" if value else "0000\n1000"
        size = 5.6 if abs(value) < 2 else 7
        axes.text(
            value, -0.45, bits, ha="center", va="top", fontsize=size, color=QUIET, linespacing=1.1
        )
    axes.set(xlim=(-6.4, 6.4), ylim=(-1.6, 1.6), yticks=[], xticks=[])


def _staircase(axes: Axes) -> None:
    prepare(
        axes, "nearest, ties to the even code; above 6 it saturates", "scaled value t", "rounded"
    )
    t = torch.linspace(0, 7.5, 6001)
    axes.plot(t, t, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), label="t itself")
    edges = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
    for value, left, right in zip(MAGNITUDES, [0.0, *edges], [*edges, 7.5], strict=True):
        axes.plot([left, right], [value, value], color=TRAIN, linewidth=2.2, solid_capstyle="butt")
    ties = torch.tensor(edges)
    chosen = decode(encode(ties, E2M1), E2M1)
    axes.plot(ties, chosen, "o", color=TRAIN, markersize=4.5, label="where a tie goes")
    axes.set(xlim=(0, 7.5), ylim=(-0.15, 6.6))
    axes.yaxis.set_major_locator(FixedLocator(MAGNITUDES))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(value)))
    plain_ticks(axes, [*edges, 7.0])
    axes.tick_params(axis="x", labelsize=7, labelrotation=45)
    legend(axes, "upper left")


def _relative_error(axes: Axes) -> None:
    prepare(
        axes,
        "what that costs: the error relative to t",
        "scaled value t (logarithmic)",
        "|rounded − t| / t",
    )
    t = torch.logspace(-4, 3, 8001, base=2.0)
    for fmt, colour, name in ((E2M1, TRAIN, "E2M1"), (E4M3, IN_RECIPE, "E4M3, for comparison")):
        error = (decode(encode(t, fmt), fmt) - t).abs() / t
        axes.plot(t, error, color=colour, linewidth=1.6, label=name)
    axes.axhline(0.2, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(2**-3.9, 0.21, "20 %", fontsize=7, color=QUIET, va="bottom")
    axes.axvspan(6, 8, color=VALIDATION, alpha=0.12, linewidth=0)
    axes.text(
        6.93, 0.55, "saturates", fontsize=7, color=VALIDATION, rotation=90, ha="center", va="center"
    )
    axes.text(0.125, 0.94, "below ¼: zero", fontsize=7.5, color=INK, ha="center", va="top")
    axes.set_xscale("log", base=2)
    axes.set(xlim=(2**-4, 8), ylim=(0, 1.04))
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    plain_ticks(axes, [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 6, 8])
    axes.legend(
        loc="upper right", bbox_to_anchor=(0.93, 0.98), fontsize=7.5, frameon=False, labelcolor=INK
    )


# --- stochastic rounding ---


def draw_stochastic() -> Figure:
    figure = new_figure(9.0, 3.6)
    left, right = figure.subplots(1, 2)
    _mean_of_roundings(left)
    _bias_of_block_maximum(right)
    return figure


def _mean_of_roundings(axes: Axes, draws: int = 4096) -> None:
    prepare(
        axes,
        f"the mean of {draws} stochastic roundings is the value",
        "scaled value t",
        "mean after rounding",
    )
    axes.grid(False)
    t = torch.linspace(0, 7, 113)
    bits = random_bits(RandomKey(seed=0, step=0, layer=0, operand=0), draws, len(t))
    rounded = round_to_values(t.expand(draws, -1), E2M1, bits)
    axes.axvspan(
        6,
        6.375,
        color=VALIDATION,
        alpha=0.14,
        linewidth=0,
        label="t of a clipped maximum: up to 6 · 17/16",
    )
    axes.plot([0, 7], [0, 7], color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), label="unbiased")
    fine = torch.linspace(0, 7, 7001)
    axes.plot(
        fine,
        decode(encode(fine, E2M1), E2M1),
        color=INK,
        linewidth=0.9,
        alpha=0.55,
        label="to nearest",
    )
    axes.plot(t, rounded.mean(0), "o", color=TRAIN, markersize=2.6, label="stochastic")
    axes.set(xlim=(0, 7), ylim=(0, 7))
    plain_ticks(axes, [0, 1, 2, 3, 4, 5, 6, 7])
    legend(axes, "upper left")


def block_maximum_bias(ideal: Tensor, guard: float, draws: int) -> Tensor:
    """Mean relative error of a block's stochastically rounded maximum, for block scales that E4M3
    has yet to round.

    One tensor a scale: its first block holds the amax that makes S_enc 1, the others one value
        ideal * 6 * guard.
    """
    spec = QuantSpec(rounding="stochastic", guard=guard)
    largest = E2M1.max * guard
    errors = []
    for step, scale in enumerate(ideal.tolist()):
        x = torch.zeros(draws + 1, 16)
        x[0, 0] = spec.global_bound * largest
        x[1:, 0] = scale * largest
        y = quantize(x, spec, key=RandomKey(seed=0, step=step, layer=0, operand=0)).dequantize()
        errors.append((y[1:, 0] / x[1:, 0] - 1).mean())
    return torch.stack(errors)


def _bias_of_block_maximum(axes: Axes, draws: int = 16384) -> None:
    prepare(
        axes,
        "but a block scale rounded down clips the maximum",
        "block scale before it is rounded to E4M3, in units of its binade",
        "mean error of the block's maximum",
    )
    scale = torch.linspace(64, 128, 1025)
    rounded = decode(encode(scale, E4M3), E4M3)
    axes.plot(
        scale / 64,
        (rounded / scale - 1).clamp(max=0),
        color=VALIDATION,
        linewidth=0.9,
        alpha=0.7,
        label="clipping alone: E4M3(s)/s − 1 where below 0",
    )
    at = torch.linspace(64, 128, 65)
    for guard, colour, name in (
        (1.0, VALIDATION, "TE's scale, rounded stochastically"),
        (GUARD, TRAIN, "guarded: range 6 · 16/17"),
    ):
        axes.plot(
            at / 64,
            block_maximum_bias(at, guard, draws),
            "o",
            color=colour,
            markersize=3,
            label=name,
        )
    axes.axhline(0, color=QUIET, linewidth=0.9)
    axes.axhline(-1 / 17, color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(1.99, -1 / 17 - 0.001, "−1/17", fontsize=7.5, color=QUIET, ha="right", va="top")
    axes.set(xlim=(0.99, 2.01), ylim=(-0.067, 0.027))
    plain_ticks(axes, [1 + i / 8 for i in range(9)])
    axes.yaxis.set_major_formatter(FuncFormatter(percent))
    legend(axes, "upper right")


# --- the Hadamard transform ---


def draw_hadamard() -> Figure:
    figure = new_figure(9.0, 5.6)
    before, after, underflow, error = figure.subplots(2, 2).flat
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[0, 4] = 16.0
    _block(before, x, "a block with an outlier: small values become zero")
    _block(
        after,
        transform(x, Hadamard()),
        "the same block transformed: none does, and the grid is finer",
    )
    sizes = torch.logspace(0, 2, 17)
    results = {
        hadamard: [_outlier(size.item(), hadamard) for size in sizes]
        for hadamard in (None, Hadamard())
    }
    for axes, column, title, y in (
        (underflow, 0, "nonzero elements that become zero", "share of all elements"),
        (error, 1, "relative error of the whole tensor: no smaller", "|error| / |x|, 2-norms"),
    ):
        prepare(axes, title, "size of one outlier in 16, others N(0, 1)", y)
        for hadamard, colour, name in (
            (None, VALIDATION, "without"),
            (Hadamard(), TRAIN, "Hadamard 16"),
        ):
            axes.plot(
                sizes,
                [r[column] for r in results[hadamard]],
                color=colour,
                linewidth=1.8,
                label=name,
            )
        axes.set_xscale("log")
        axes.set_xlim(1, 100)
        axes.set_ylim(0)
        axes.yaxis.set_major_formatter(FuncFormatter(percent))
        plain_ticks(axes, [1, 2, 5, 10, 20, 50, 100])
        legend(axes, "upper left" if column == 0 else "lower left")
    return figure


def _block(axes: Axes, x: Tensor, title: str) -> None:
    prepare(axes, title, "element of the block", "value")
    q = quantize(x, QuantSpec())
    y = q.dequantize()[0].numpy()
    decode = q.global_decode()
    assert decode is not None
    step = (q.block_scales() * decode).item()
    for value in value_table(E2M1):
        axes.axhline(value * step, color=QUIET, linewidth=0.5, alpha=0.55, zorder=1)
    at = np.arange(16)
    axes.grid(False)
    axes.bar(at, x[0].float().numpy(), width=0.62, color=TRAIN, alpha=0.38, zorder=2, label="value")
    lost = y == 0
    axes.plot(at[~lost], y[~lost], "o", color=TRAIN, markersize=4, zorder=3, label="quantised")
    axes.plot(
        at[lost], y[lost], "o", color=VALIDATION, markersize=4, zorder=3, label="quantised to zero"
    )
    top = 6.9 * step
    axes.set(xlim=(-0.7, 15.7), ylim=(-0.42 * top if x.float().min() > -0.4 * top else -top, top))
    axes.xaxis.set_major_locator(FixedLocator(list(range(0, 16, 3))))
    if lost.any():
        legend(axes, "upper right")


def _outlier(size: float, hadamard: Hadamard | None) -> tuple[float, float]:
    """(underflow, relative error) of groups of 16 with one outlier of about `size`."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2048, 16, generator=generator)
    x[:, 4] = size * (1 + 0.2 * torch.randn(2048, generator=generator))
    metrics = measure(x, QuantSpec(hadamard=hadamard))
    return metrics.underflow, metrics.relative_error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        default=IMAGES,
        help="docs/images unless another is named",
    )
    for path in draw_all(parser.parse_args().directory):
        print(path)
