"""docs/moe.md: its commands run, on a smaller model, and its keys exist; so do the policies that
are ranked.
"""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from family_pages import check_commands, listed_keys

from fp4train.models.moe import Balance, ExpertShape


@pytest.mark.long
def test_every_command_works_in_the_order_of_the_page(working_folder: Path) -> None:
    np.zeros(1000, dtype="<u2").tofile("tokens.bin")
    check_commands("moe.md", 7)


def test_the_page_names_every_key_that_is_the_family_s_own() -> None:
    parts = {"experts": ExpertShape, "balance": Balance}
    keys = {f"model.{part}.{each.name}" for part, kind in parts.items() for each in fields(kind)}
    assert listed_keys("moe.md") == keys | {"model.dense", "model.hidden"}
