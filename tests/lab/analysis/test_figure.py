"""A figure is one description: a PNG file, and SVG inside of a page whose names are text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fp4train.lab.analysis import (
    INK,
    NARROW,
    WIDE,
    inches_of,
    inline_svg,
    lines_within,
    loss_axis,
    new_figure,
    save,
    style,
)
from fp4train.text import fold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "$x_1$ <b>&"


def draw(width: float) -> Figure:
    figure = new_figure(width, 2.0)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=INK, marker="o")
    axes.set_yticks([0, 1], [NAME, "b"])
    style(axes, NAME)
    return figure


def test_a_page_has_text_variables_of_its_style_and_names_that_are_its_own() -> None:
    wide, narrow = (
        inline_svg(f"a-{width}", draw, width, "what it shows") for width in (WIDE, NARROW)
    )
    assert wide.count("$x_1$ &lt;b&gt;&amp;") == 2, "the title and the name at the axis"
    assert (
        "var(--ink)" in wide
        and INK not in wide
        and "<style" not in wide
        and "<metadata" not in wide
    )
    assert 'role="img"' in wide and 'aria-label="what it shows"' in wide
    ids = [re.findall(r' id="([^"]+)"', each) for each in (wide, narrow)]
    assert ids[0] and len({*ids[0], *ids[1]}) == len(ids[0]) + len(ids[1])
    assert set(re.findall(r"url\(#([^)]+)\)", wide)) <= set(ids[0])


def test_several_files_have_the_same_picture(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b" / "c.png"]
    save(draw, WIDE, *paths)
    assert paths[0].read_bytes() == paths[1].read_bytes() and paths[0].read_bytes().startswith(
        b"\x89PNG"
    )


def test_a_bar_has_a_whole_name_in_lines_or_none() -> None:
    name = "NVFP4 with fprop in BF16"
    assert lines_within(name, inches_of(name)) == [name]
    assert " ".join(lines_within(name, inches_of("with fprop"))) == name
    assert lines_within(name, inches_of("NVFP4") / 2) == lines_within("", 1.0) == []


@given(st.text(st.sampled_from("ab-_=/ "), max_size=200), st.integers(1, 30))
def test_a_folded_name_is_whole_and_within_its_room(name: str, room: int) -> None:
    lines = fold(name, room)
    assert "".join(lines).replace(" ", "") == name.replace(" ", "")
    assert max(map(len, lines), default=0) <= room


@pytest.mark.parametrize("highest", [5.2, 11.0, 80.0, 3e3, 6e8, 2e30])
@pytest.mark.parametrize("lowest", [5.0, 1.3, 0.02])
def test_the_numbers_at_an_axis_of_losses_stand_apart(lowest: float, highest: float) -> None:
    """Of a run that diverged, too."""
    figure = new_figure(WIDE, 3.2)
    axes = figure.subplots()
    losses = np.array([lowest, highest])
    axes.plot([0, 1], losses)
    loss_axis(axes, "loss", [losses])
    low, high = axes.get_ylim()
    numbers = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high]
    heights = [axes.transData.transform((0, number))[1] * 72 / figure.dpi for number in numbers]
    assert len(heights) >= 3 and np.diff(heights).min() > 8, numbers
    figure.canvas.draw()
    words = [label.get_text() for label in axes.yaxis.get_majorticklabels()]
    assert axes.yaxis.get_offset_text().get_text() == "" and len(set(words)) == len(words)
