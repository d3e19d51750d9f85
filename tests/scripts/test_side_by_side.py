"""scripts/side_by_side.py compares two checkouts; here one with itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_checkout_beside_itself_costs_the_same() -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts/side_by_side.py"),
        str(ROOT),
        str(ROOT),
        "times=1",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"^(.+?) +([\d.]+) +([\d.]+) +([\d.]+)$", shown, re.MULTILINE)
    assert [name for name, *_ in rows] == ["import fp4train", "fp4train plan", "a linear layer"]
    assert all(0.1 < float(old) < 600 and 0.2 < float(ratio) < 5 for _, old, _, ratio in rows), (
        shown
    )
