"""The pictures of studies show what was found, with plain numbers, and name what they draw."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from made import write_ranking, write_run, write_sensitivity

from fp4train.lab.analysis import PICTURE
from fp4train.lab.analysis.figure import common_look
from fp4train.lab.studies import RankResult, SensitivityResult
from fp4train.lab.studies.figures import ranking, sensitivity
from fp4train.lab.studies.results import bound
from fp4train.sealed import unsealed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> T:
    return bound(unsealed(path.read_bytes()), kind)


def drawn_sensitivity(study: SensitivityResult) -> Figure:
    with common_look():
        figure = sensitivity(study)(PICTURE)
        figure.draw_without_rendering()
    return figure


def names(axes: Axes) -> tuple[list[str], list[str]]:
    rows, columns = (axes.get_yticklabels(), axes.get_xticklabels())
    return [label.get_text() for label in rows], [label.get_text() for label in columns]


def test_a_map_has_the_damage_of_the_layers_of_each_block(tmp_path: Path) -> None:
    study = read(write_sensitivity(write_run(tmp_path / "a")), SensitivityResult)
    damage, scale, points = drawn_sensitivity(study).axes
    assert names(damage) == (["blocks.0", "blocks.1"], ["mlp.up"])
    assert damage.images[0].get_array().ravel().tolist() == pytest.approx([0.079, 0.009])
    assert points.lines[0].get_xydata().tolist() == [[0.0, 0.1], [50.0, 0.02]]
    assert "0.01" in names(scale)[0], "a plain number, though the scale is logarithmic"


def test_the_legend_of_a_ranking_names_what_is_drawn_and_nothing_else(tmp_path: Path) -> None:
    for runs, others in ((("runs/a",), set[str]()), (("runs/a", "runs/b"), {"one checkpoint"})):
        study = read(write_ranking(write_run(tmp_path / str(len(runs))), runs=runs), RankResult)
        figure = ranking(study)(PICTURE)
        shown = {text.get_text() for text in figure.legends[0].get_texts()}
        assert shown == others | {
            "floor of the noise, |FP32 − BF16|",
            "the reference",
            "gap, 95% interval: told apart from the reference",
            "95% interval of all pairs together",
            "in high precision",
        }
        axes = figure.axes[0]
        assert names(axes)[0] == ["bf16", "mxfp8"]
        assert axes.texts[0].get_text() == "+0.00200 ± 0.00025  b"
        low, high = axes.get_xlim()
        assert low < 0 < 0.003 < high


def test_in_a_column_of_a_paper_names_and_gaps_stand_above_the_intervals(tmp_path: Path) -> None:
    path = write_ranking(write_run(tmp_path / "a"), name="nvfp4_per_token-hadamard=false")
    with common_look():
        figure = ranking(read(path, RankResult))(3.3)
        figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_window_extent().width > 0.85 * figure.bbox.width
    assert figure.get_tightbbox().x1 < 3.35
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["bf16", "nvfp4_per_token…rd=false", "+0.00200 ± 0.00025  b"]
