"""A picture is panels above one legend, in files of any width, with numbers that stand apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fp4train.errors import UserError
from fp4train.lab.analysis import PICTURE, new_figure, save
from fp4train.lab.analysis.figure import (
    COLOURS,
    Draw,
    Panel,
    common_look,
    gap_limits,
    grounds,
    loss_axis,
    loss_limits,
    picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "$x_1$ llama_tiny-nvfp4-hadamard=false-stochastic_rounding=true-lr=0.003-seed="


def drawing(count: int) -> Draw:
    """One panel with curves of long names, and two beside each other."""

    def paint(axes: Axes) -> None:
        for number in range(count):
            axes.plot([0, 1], [0, number], label=f"{NAME}{number}")

    panels = [Panel(title=f"{NAME} panel {i}", height=1.5, paint=paint) for i in range(3)]
    return picture([panels[:1], panels[1:]], NAME)


@pytest.mark.parametrize(("width", "count"), [(3.3, 24), (PICTURE, 1)])
def test_no_words_leave_a_picture_or_lie_on_a_panel_however_wide_it_is(
    width: float, count: int
) -> None:
    with common_look():
        figure = drawing(count)(width)
        figure.draw_without_rendering()
    drawn = figure.get_tightbbox()
    inches_wide, inches_high = figure.get_size_inches()
    assert drawn.x0 > -0.05 and drawn.x1 < inches_wide + 0.05
    assert drawn.y0 > -0.05 and drawn.y1 < inches_high + 0.05
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 < min(axes.get_window_extent().y0 for axes in figure.axes)
    named = [text.get_text().replace("\n", "") for text in legend.get_texts()]
    assert len(named) == count, "a label of several panels is named once"
    assert named[-1].replace(" ", "").endswith(f"seed={count - 1}"), "the whole name"
    assert all(axes.get_window_extent().height > 0.8 * figure.dpi for axes in figure.axes)


@pytest.mark.long
def test_several_files_have_the_same_picture(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b" / "c.png"]
    save(drawing(2), PICTURE, *paths)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"c\.png cannot be written"):
        save(drawing(2), PICTURE, paths[0] / "c.png")


@pytest.mark.parametrize("highest", [5.2, 80.0, 2e30])
@pytest.mark.parametrize("lowest", [5.0, 0.02])
def test_the_numbers_at_an_axis_of_losses_stand_apart(lowest: float, highest: float) -> None:
    """Of a run that diverged, too."""
    figure = new_figure(PICTURE, 3.2)
    axes = figure.subplots()
    losses = np.array([lowest, highest])
    axes.plot([0, 1], losses)
    loss_axis(axes, [losses])
    low, high = axes.get_ylim()
    numbers = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high]
    heights = [axes.transData.transform((0, number))[1] * 72 / figure.dpi for number in numbers]
    assert len(heights) >= 3 and np.diff(heights).min() > 8, numbers


def test_a_loss_that_falls_to_almost_nothing_stays_on_its_logarithmic_axis() -> None:
    """A margin of 3 % of the range below the lowest loss would make the axis limit negative."""
    falling = 6.0 * 0.9 ** np.arange(1, 60)
    low, high = loss_limits([falling]) or (0.0, 0.0)
    assert 0 < low < falling[-1] < high
    assert loss_limits([np.array([np.nan])]) is None


def test_every_gap_but_a_single_outlier_is_within_the_axis() -> None:
    few = np.array([1.0, 2.0, 9.0])
    many = np.linspace(-1.0, 1.0, 300)
    many[150] = 1000.0
    low, high = gap_limits([few, many])
    assert low < -0.9 and 9.0 < high < 20.0


def test_a_recipe_has_one_ground_and_no_colour_of_a_run() -> None:
    recipes = [f"recipe {i}" for i in range(24)]
    shapes = list(grounds([*recipes, *recipes]).values())
    assert len({tuple(shape.values()) for shape in shapes}) == len(recipes)
    assert not {shape["facecolor"] for shape in shapes} & set(COLOURS)
