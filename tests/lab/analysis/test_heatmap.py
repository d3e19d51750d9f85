"""RUN/statistics.png is drawn from any statistics that a run can write."""

import math
from pathlib import Path

import numpy as np
import pytest

from fp4train.errors import UserError
from fp4train.lab.analysis.heatmap import draw_statistics, grid
from fp4train.track import STATISTICS, Statistics
from fp4train.track.statistics import GRADIENT, OPERAND, StatisticsLog


def write(run: Path, layers: int, steps: int, operands: int = 6) -> Path:
    log = StatisticsLog(run / STATISTICS)
    for step in range(steps):
        rows = np.zeros(layers * operands, OPERAND)
        rows["layer"], rows["operand"] = np.repeat(np.arange(layers), operands), np.tile(np.arange(operands), layers)
        rows["sqnr_db"] = np.where(rows["layer"] == 1, np.nan, 20 + step)
        gradients = np.zeros(layers, GRADIENT)
        gradients["layer"], gradients["gradient"] = np.arange(layers), 1.0
        gradients["noise"] = np.arange(layers)
        names = tuple(f"fprop.{i}" for i in range(operands))
        own = tuple(f"blocks.{i}.$x$" for i in range(layers))
        log.log(Statistics(step=step, recipe="r", layers=own, names=names, operands=rows, gradients=gradients))
    log.close()
    return run


@pytest.mark.parametrize(("layers", "steps", "operands"), [(1, 1, 2), (3, 4, 6), (120, 2, 3)])
def test_a_picture_is_drawn_of_few_and_of_many_layers_with_gaps(
    tmp_path: Path, layers: int, steps: int, operands: int
) -> None:
    path = draw_statistics(write(tmp_path, layers, steps, operands))
    assert path == tmp_path / "statistics.png" and path.read_bytes().startswith(b"\x89PNG")


def test_what_was_not_measured_stays_empty() -> None:
    rows = {"layer": np.array(["a", "b", "b"]), "step": np.array([10, 10, 30])}
    table = grid(rows, np.array([1.0, 2.0, 3.0]), ["a", "b"], np.array([10, 20, 30]))
    assert table.tolist()[0][0] == 1 and table[1].tolist()[::2] == [2, 3]
    assert all(map(math.isnan, [table[0, 1], table[0, 2], table[1, 1]]))


def test_a_run_without_statistics_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="errors_every"):
        draw_statistics(tmp_path)
