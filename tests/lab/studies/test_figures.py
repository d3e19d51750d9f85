"""The picture of a sensitivity is drawn from its result; its numbers are plain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made import write_run, write_sensitivity

from fp4train.lab.analysis.figure import NARROW, WIDE
from fp4train.lab.studies.figures import DamageMap, sensitivity
from fp4train.lab.studies.results import SensitivityResult
from fp4train.sealed import unsealed


def test_a_map_in_the_picture_and_bars_in_a_page_have_the_layers_and_plain_numbers(tmp_path: Path) -> None:
    found = SensitivityResult(unsealed(write_sensitivity(write_run(tmp_path / "a")).read_bytes())[0])
    damage = DamageMap(["blocks.0", "blocks.1"], ["mlp.up", "mlp.down"], np.array([[1e-2, 1e-4], [1e-3, np.nan]]), [1])
    for drawn, wanted in (
        (sensitivity(found, damage)(WIDE), {"blocks.0", "blocks.1", "mlp.up", "mlp.down", "0.01", "fprop.x"}),
        (sensitivity(found)(WIDE), {"blocks.0.mlp.up", "blocks.1.mlp.up", "fprop.x"}),
        (sensitivity(found)(NARROW), {"blocks.0.mlp.up", "blocks.1.mlp.up", "fprop.x"}),
    ):
        drawn.canvas.draw()
        labels = [label for axes in drawn.axes for label in (*axes.get_yticklabels(), *axes.get_xticklabels())]
        words = {label.get_text() for label in labels}
        assert wanted <= words and not [word for word in words if "$" in word]
