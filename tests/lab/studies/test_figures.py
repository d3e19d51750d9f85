"""The picture of a sensitivity is drawn from its result; its numbers are plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made import write_ranking, write_run, write_sensitivity

from fp4train.lab.analysis import NARROW, WIDE
from fp4train.lab.studies import RankResult, SensitivityResult
from fp4train.lab.studies.figures import DamageMap, ranking, sensitivity
from fp4train.lab.studies.stored import bound
from fp4train.sealed import unsealed


def test_a_map_in_the_picture_and_bars_in_a_page_have_the_layers_and_plain_numbers(
    tmp_path: Path,
) -> None:
    found = bound(
        unsealed(write_sensitivity(write_run(tmp_path / "a")).read_bytes()), SensitivityResult
    )
    damage = DamageMap(
        ["blocks.0", "blocks.1"],
        ["mlp.up", "mlp.down"],
        np.array([[1e-2, 1e-4], [1e-3, np.nan]]),
        [1],
    )
    for drawn, wanted in (
        (
            sensitivity(found, damage)(WIDE),
            {"blocks.0", "blocks.1", "mlp.up", "mlp.down", "0.01", "fprop.x"},
        ),
        (sensitivity(found)(WIDE), {"blocks.0.mlp.up", "blocks.1.mlp.up", "fprop.x"}),
        (sensitivity(found)(NARROW), {"blocks.0.mlp.up", "blocks.1.mlp.up", "fprop.x"}),
    ):
        drawn.canvas.draw()
        labels = [
            label
            for axes in drawn.axes
            for label in (*axes.get_yticklabels(), *axes.get_xticklabels())
        ]
        words = {label.get_text() for label in labels}
        assert wanted <= words and not [word for word in words if "$" in word]


def test_the_legend_of_a_ranking_names_what_is_drawn_and_nothing_else(tmp_path: Path) -> None:
    for runs, others in ((("runs/a",), set[str]()), (("runs/a", "runs/b"), {"one checkpoint"})):
        body = unsealed(write_ranking(write_run(tmp_path / str(len(runs))), runs=runs).read_bytes())
        for candidate in body["candidates"]:
            candidate["gaps"] = (
                [candidate["gap"]["mean"]] * len(runs) if candidate.get("gap") else []
            )
        figure = ranking(bound(body, RankResult), named=True)(WIDE)
        shown = {text.get_text() for text in figure.legends[0].get_texts()}
        always = {
            "told apart from the reference",
            "gap, and its own 95% interval",
            "the reference",
            "in high precision",
        }
        assert always | others <= shown and "not told apart" not in shown
        assert ("one checkpoint" in shown) == bool(others)
        axes = figure.axes[0]
        low, high = axes.get_xlim()
        assert all(
            low < x < high for line in axes.lines for x in line.get_xdata() if x not in (0, 1)
        )
