"""docs/hybrid.md: its commands run, on a smaller model, and its keys exist."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from family_pages import check_commands, listed_keys

from fp4train.models.hybrid import Hybrid, ScanShape


@pytest.mark.long
def test_every_command_works_in_the_order_of_the_page(working_folder: Path) -> None:
    np.zeros(1000, dtype="<u2").tofile("tokens.bin")
    check_commands("hybrid.md", 6)


def test_the_page_names_every_key_that_is_the_family_s_own() -> None:
    own = set(Hybrid.__annotations__) - {"scan", "draw"}
    keys = {f"model.{name}" for name in own} | {
        f"model.scan.{each.name}" for each in fields(ScanShape)
    }
    assert listed_keys("hybrid.md") == keys
