"""Statistics become arrays by layer, operand and step, and pictures, whatever a run can write."""

from pathlib import Path

import numpy as np
import pytest
from made import LAYERS, write_run, write_statistics

from fp4train.errors import UserError
from fp4train.lab.analysis import PICTURE, Errors
from fp4train.lab.analysis.figure import common_look, picture
from fp4train.lab.analysis.heatmap import (
    LEAST_DB,
    decibels,
    draw_statistics,
    heat_map,
    statistics,
)
from fp4train.track import read_statistics


def test_a_run_without_statistics_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="errors_every"):
        draw_statistics(tmp_path)


def test_errors_are_arrays_by_layer_operand_and_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", errors=True)
    errors = Errors(read_statistics(run))
    assert errors.steps == [10, 20, 30, 40]
    assert errors.layers == list(LAYERS) and errors.operands == ["fprop.x", "wgrad.dy"]
    assert errors.sqnr_db[0, 0].tolist() == [19, 18, 17, 16]
    assert errors.sqnr_db[1, 1].tolist() == [16, 15, 14, 13]
    assert (errors.gradient_to_noise == 3.0).all()
    assert draw_statistics(run).read_bytes().startswith(b"\x89PNG")
    with common_look():
        place = statistics(errors, "")(3.3).axes[0].get_subplotspec()
    assert place is not None and place.get_gridspec().ncols == 1, "none beside it in a column"


def test_what_was_not_measured_is_not_a_number_and_has_no_map(tmp_path: Path) -> None:
    write_statistics(tmp_path, [10])
    write_statistics(tmp_path, [20], ("z", LAYERS[0]))
    errors = Errors(read_statistics(tmp_path))
    assert errors.layers == [*LAYERS, "z"], "in the order of their first steps"
    measured = ~np.isnan(errors.sqnr_db[:, 0])
    assert measured.tolist() == [[True, True], [True, False], [False, True]]
    errors.sqnr_db[:, 0] = np.nan
    errors.gradient_to_noise[:] = 0.0
    titles = [axes.get_title(loc="left") for axes in statistics(errors, "")(PICTURE).axes]
    assert [title for title in titles if title] == ["wgrad.dy, SQNR in dB"]


def test_a_scale_spans_all_but_the_outermost_and_no_less_than_a_few_decibels() -> None:
    assert decibels(np.array([20.0, 23.0, np.nan])) == (19, 24)
    assert decibels(np.array([20.0])) == (18, 22)
    assert decibels(np.array([np.nan])) == (0.0, LEAST_DB)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (300, 3)])
def test_a_map_names_rows_and_steps_at_their_places(rows: int, columns: int) -> None:
    values = np.arange(rows * columns, dtype=float).reshape(rows, columns)
    names = [f"blocks.{i}" for i in range(rows)]
    steps = [10 * i for i in range(columns)]
    (axes, _) = picture([[heat_map("map", values, names, steps, {})]])(PICTURE).axes
    rows_named = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    assert all(label.get_text() == names[int(place)] for place, label in rows_named)
    steps_named = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert all(label.get_text() == str(steps[int(place)]) for place, label in steps_named)
    assert len(axes.get_yticks()) <= 48 and 1 <= len(axes.get_xticks()) <= 6
