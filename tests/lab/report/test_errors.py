"""Statistics become arrays by layer, operand and step; the worst layer comes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made import LAYERS, write_run, write_statistics
from matplotlib.colors import LogNorm

from fp4train.lab.report.errors import read_errors, worst_operand
from fp4train.lab.report.figures import RATIO, heat_maps, worst_layers
from fp4train.lab.report.svg import NARROW, WIDE
from fp4train.track import STATISTICS


def test_errors_are_arrays_and_the_worst_layer_comes_first(tmp_path: Path) -> None:
    found = read_errors(write_run(tmp_path / "a", errors=True), [])
    assert found is not None and found.steps == [10, 20, 30, 40]
    assert found.layers == list(LAYERS) and found.operands == ["fprop.x", "wgrad.dy"]
    assert found.values["sqnr_db"][0, 0].tolist() == [19, 18, 17, 16]
    assert found.values["sqnr_db"][1, 1].tolist() == [16, 15, 14, 13]
    assert found.relative_error[0, 0, 0] == pytest.approx(10 ** (-19 / 20))
    assert worst_operand(found.relative_error)[:, -1].tolist() == pytest.approx([10**-0.75, 10**-0.65])
    assert worst_layers(found) == [1, 0] and (found.gradient_to_noise == 3.0).all()


def test_a_ratio_that_spans_decades_has_a_logarithmic_map_with_plain_numbers(tmp_path: Path) -> None:
    found = read_errors(write_run(tmp_path / "a", errors=True), [])
    assert found is not None
    ratios = np.geomspace(0.5, 5000, found.gradient_to_noise.size).reshape(found.gradient_to_noise.shape)
    ratios.flat[0] = 0.0  # a gradient that vanished has no place on the scale
    for width in (WIDE, NARROW):
        figure = heat_maps(replace(found, gradient_to_noise=ratios))(width)
        figure.canvas.draw()
        panel = next(axes for axes in figure.axes if axes.get_title(loc="left") == RATIO)
        assert isinstance(panel.images[0].norm, LogNorm)
        assert np.ma.count_masked(panel.images[0].get_array()) == 1  # type: ignore[no-untyped-call]
        bar = panel.images[0].colorbar
        assert bar is not None and {"10", "1000"} <= {each.get_text() for each in bar.ax.get_yticklabels()}
    without = heat_maps(replace(found, gradient_to_noise=np.zeros_like(ratios)))(WIDE)
    assert RATIO not in [axes.get_title(loc="left") for axes in without.axes]


def test_what_was_not_measured_is_not_a_number(tmp_path: Path) -> None:
    write_statistics(tmp_path, [10])
    write_statistics(tmp_path, [20], ("z", LAYERS[0]))
    found = read_errors(tmp_path, [])
    assert found is not None and found.layers == [*LAYERS, "z"], "in the order of their first steps"
    measured = ~np.isnan(worst_operand(found.values["sqnr_db"]))
    assert measured.tolist() == [[True, True], [True, False], [False, True]]


def test_no_statistics_are_no_errors(tmp_path: Path) -> None:
    assert read_errors(tmp_path, []) is None
    (tmp_path / STATISTICS).write_bytes(b"torn")
    assert read_errors(tmp_path, []) is None
