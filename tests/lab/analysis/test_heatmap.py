"""Statistics become arrays by layer, operand and step, and pictures, whatever a run can write."""

from pathlib import Path

import numpy as np
import pytest
from made import LAYERS, write_run, write_statistics
from matplotlib.colors import LogNorm

from fp4train.errors import UserError
from fp4train.lab.analysis import (
    LEAST_DB,
    NARROW,
    WIDE,
    Errors,
    decibels,
    draw_maps,
    draw_statistics,
    statistics_maps,
    worst_maps,
    worst_operand,
)
from fp4train.lab.analysis.heatmap import RATIO
from fp4train.track import GRADIENT, OPERAND, STATISTICS, Statistics, StatisticsLog, read_statistics


def write(run: Path, layers: int, steps: int, operands: int = 6) -> Path:
    log = StatisticsLog(run / STATISTICS)
    for step in range(steps):
        rows = np.zeros(layers * operands, OPERAND)
        rows["layer"], rows["operand"] = (
            np.repeat(np.arange(layers), operands),
            np.tile(np.arange(operands), layers),
        )
        rows["sqnr_db"] = np.where(rows["layer"] == 1, np.nan, 20 + step)
        gradients = np.zeros(layers, GRADIENT)
        gradients["layer"] = np.arange(layers)
        gradients["gradient"] = 1.0
        gradients["noise"] = np.arange(layers)
        names = tuple(f"fprop.{i}" for i in range(operands))
        own = tuple(f"blocks.{i}.$x$" for i in range(layers))
        log.log(
            Statistics(
                step=step, recipe="r", layers=own, names=names, operands=rows, gradients=gradients
            )
        )
    log.close()
    return run


@pytest.mark.parametrize(
    ("layers", "steps", "operands"),
    [(1, 1, 2), (3, 4, 6), pytest.param(120, 2, 3, marks=pytest.mark.long)],
)
def test_a_picture_is_drawn_of_few_and_of_many_layers_with_gaps(
    tmp_path: Path, layers: int, steps: int, operands: int
) -> None:
    path = draw_statistics(write(tmp_path, layers, steps, operands))
    assert path == tmp_path / "statistics.png" and path.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_statistics_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="errors_every"):
        draw_statistics(tmp_path)


def test_errors_are_arrays_and_the_worst_layer_comes_first(tmp_path: Path) -> None:
    found = Errors(read_statistics(write_run(tmp_path / "a", errors=True)))
    assert found.steps == [10, 20, 30, 40]
    assert found.layers == list(LAYERS) and found.operands == ["fprop.x", "wgrad.dy"]
    assert found.values["sqnr_db"][0, 0].tolist() == [19, 18, 17, 16]
    assert found.values["sqnr_db"][1, 1].tolist() == [16, 15, 14, 13]
    assert found.relative_error[0, 0, 0] == pytest.approx(10 ** (-19 / 20))
    assert worst_operand(found.relative_error)[:, -1].tolist() == pytest.approx(
        [10**-0.75, 10**-0.65]
    )
    assert found.worst_layers == [1, 0] and (found.gradient_to_noise == 3.0).all()


def test_a_ratio_that_spans_decades_has_a_logarithmic_map_with_plain_numbers(
    tmp_path: Path,
) -> None:
    found = Errors(read_statistics(write_run(tmp_path / "a", errors=True)))
    ratios = np.geomspace(0.5, 5000, found.gradient_to_noise.size).reshape(
        found.gradient_to_noise.shape
    )
    ratios.flat[0] = 0.0  # a gradient that vanished has no place on the scale
    found.gradient_to_noise = ratios
    for width in (WIDE, NARROW):
        figure = worst_maps(found)(width)
        figure.canvas.draw()
        panel = next(axes for axes in figure.axes if axes.get_title(loc="left") == RATIO)
        assert isinstance(panel.images[0].norm, LogNorm)
        assert np.ma.count_masked(panel.images[0].get_array()) == 1  # type: ignore[no-untyped-call]
        bar = panel.images[0].colorbar
        assert bar is not None and {"10", "1000"} <= {
            each.get_text() for each in bar.ax.get_yticklabels()
        }
    found.gradient_to_noise = np.zeros_like(ratios)
    without = worst_maps(found)(WIDE)
    assert RATIO not in [axes.get_title(loc="left") for axes in without.axes]


def test_what_was_not_measured_is_not_a_number(tmp_path: Path) -> None:
    write_statistics(tmp_path, [10])
    write_statistics(tmp_path, [20], ("z", LAYERS[0]))
    found = Errors(read_statistics(tmp_path))
    assert found.layers == [*LAYERS, "z"], "in the order of their first steps"
    measured = ~np.isnan(worst_operand(found.values["sqnr_db"]))
    assert measured.tolist() == [[True, True], [True, False], [False, True]]


def test_a_scale_spans_what_was_measured_and_nothing_unmeasured_has_a_panel(tmp_path: Path) -> None:
    found = Errors(read_statistics(write(tmp_path, layers=3, steps=4)))
    *noise, ratio = statistics_maps(found)
    assert len(noise) == 6 and "noise" in ratio.title
    assert {(map.scale["vmin"], map.scale["vmax"]) for map in noise} == {(19, 24)}, (
        "values from 20 to 23 dB"
    )
    found.gradient_to_noise[:] = np.nan
    found.values["sqnr_db"][:, 1] = np.nan
    assert [map.title for map in statistics_maps(found)] == [
        f"fprop.{i}, SQNR in dB" for i in (0, 2, 3, 4, 5)
    ]
    assert decibels(np.array([20.0])) == (18, 22) and decibels(np.array([np.nan])) == (
        0.0,
        LEAST_DB,
    )


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_panels_fill_their_rows(tmp_path: Path, count: int) -> None:
    found = Errors(read_statistics(write(tmp_path, layers=3, steps=4)))
    maps = statistics_maps(found)[:count]
    figure = draw_maps(maps, found.layers, found.steps, 4)(WIDE)
    figure.canvas.draw()
    ends = [axes.get_position().x1 for axes in figure.axes if axes.images]
    assert len(ends) == count and ends[-1] > max(ends) - 0.05, (
        "the last panel reaches the end of its row"
    )
    assert all(axes.axison for axes in figure.axes)
