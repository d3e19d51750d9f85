"""A figure is one description: a PNG file, and SVG inside of a page whose names are text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fp4train.lab.analysis.figure import INK, NARROW, WIDE, first_words, inline_svg, new_figure, save, style

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
    wide, narrow = (inline_svg(f"a-{width}", draw, width, "what it shows") for width in (WIDE, NARROW))
    assert wide.count("$x_1$ &lt;b&gt;&amp;") == 2, "the title and the name at the axis"
    assert "var(--ink)" in wide and INK not in wide and "<style" not in wide and "<metadata" not in wide
    assert 'role="img"' in wide and 'aria-label="what it shows"' in wide
    ids = [re.findall(r' id="([^"]+)"', each) for each in (wide, narrow)]
    assert ids[0] and len({*ids[0], *ids[1]}) == len(ids[0]) + len(ids[1])
    assert set(re.findall(r"url\(#([^)]+)\)", wide)) <= set(ids[0])


def test_several_files_have_the_same_picture(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b" / "c.png"]
    save(draw, WIDE, *paths)
    assert paths[0].read_bytes() == paths[1].read_bytes() and paths[0].read_bytes().startswith(b"\x89PNG")


def test_a_bar_that_is_too_short_for_a_recipe_has_its_first_words() -> None:
    assert first_words("NVFP4 with fprop in BF16", 16) == "NVFP4 with…"
    assert first_words("NVFP4 with fprop in BF16", 7) == "NVFP4…" and first_words("NVFP4 with fprop in BF16", 5) == ""
    assert first_words("BF16", 4) == "BF16" and first_words("", 3) == ""
