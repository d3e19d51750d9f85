"""Gaps and their intervals can be checked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made import write_run

from fp4train.lab.analysis import Comparison, compare
from fp4train.lab.analysis.groups import gap_curve, loss_curve


def comparison(tmp_path: Path, *levels: tuple[str, float, int, str]) -> Comparison:
    return compare(
        [
            write_run(tmp_path / name, level, seed=seed, recipe=recipe)
            for name, level, seed, recipe in levels
        ]
    )


def test_equal_seeds_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """The seeds differ by 10 % and the recipes by 1 % and 2 %: t(1) = 12.706, standard error .5
    %.
    """
    found = comparison(
        tmp_path,
        ("a0", 2.0, 0, "A"),
        ("a1", 2.2, 1, "A"),
        ("b1", 2.2 * 1.02, 1, "B"),
        ("b0", 2.0 * 1.01, 0, "B"),
    )
    gap = found.means[1].gap
    assert gap is not None and found.at == ("val/loss", 40)
    assert gap.mean == pytest.approx(0.015)
    assert gap.half_width() == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert gap.show("+.2%") == "+1.50% ± 6.35%"


def test_other_seeds_are_compared_by_their_means(tmp_path: Path) -> None:
    """Welch: standard errors .1 and .1 of means 2.0 and 2.2, the first scaled by 1.1; 1.98 degrees
    of freedom → 1.
    """
    found = comparison(
        tmp_path, ("a0", 1.9, 0, "A"), ("a1", 2.1, 1, "A"), ("b2", 2.1, 2, "B"), ("b3", 2.3, 3, "B")
    )
    gap = found.means[1].gap
    assert gap is not None and found.at == ("val/loss", 40)
    assert gap.mean == pytest.approx(0.1)
    assert gap.half_width() == pytest.approx(12.706 * math.hypot(0.1 * 1.1, 0.1) / 2.0, rel=1e-3)


def test_single_runs_have_no_interval(tmp_path: Path) -> None:
    found = comparison(tmp_path, ("a", 2.0, 0, "A"), ("b", 2.1, 0, "B"))
    gap = found.means[1].gap
    assert gap is not None and found.at == ("val/loss", 40)
    assert gap.mean == pytest.approx(0.05) and gap.half_width() is None
    curve = gap_curve(*found.groups, "val/loss")
    assert curve.steps.tolist() == [10, 20, 30, 40] and curve.values == pytest.approx([5.0] * 4)
    assert curve.bounds is not None and np.isnan(curve.bounds[0]).all()


def test_a_curve_is_the_mean_over_seeds_with_its_interval(tmp_path: Path) -> None:
    (group,) = comparison(tmp_path, ("a0", 2.0, 0, "A"), ("a1", 2.2, 1, "A")).groups
    validation = loss_curve(group, "val/loss")
    assert group.name == "a0, a1" and validation.values.tolist() == pytest.approx([2.1] * 4)
    assert validation.bounds is not None
    assert (validation.bounds[1] - validation.values).tolist() == pytest.approx(
        [12.706 * 0.1] * 4, rel=1e-3
    )


def test_a_second_run_of_a_seed_is_no_other_seed(tmp_path: Path) -> None:
    assert (
        len(comparison(tmp_path, ("a", 2.0, 0, "A"), ("b", 2.2, 0, "A"), ("c", 2.2, 1, "A")).groups)
        == 2
    )
