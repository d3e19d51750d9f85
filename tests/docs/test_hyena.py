"""docs/hyena.md: its commands run, on a smaller model, and its keys exist."""

from dataclasses import fields
from pathlib import Path

import pytest
from family_pages import check_commands, listed_keys
from hf_folders import write_evo2

from fp4train.models.hyena import FilterShape, Hyena


@pytest.mark.long
def test_every_command_works_in_the_order_of_the_page(working_folder: Path) -> None:
    Path("genome.fa").write_text(">a\n" + "ACGTTGCA" * 400 + "\n")
    write_evo2(Path("evo2"))
    check_commands("hyena.md", 8)


def test_the_page_names_every_key_that_is_the_family_s_own() -> None:
    own = set(Hyena.__annotations__) - {"filters", "draw"}
    keys = {f"model.{name}" for name in own} | {
        f"model.filters.{each.name}" for each in fields(FilterShape)
    }
    assert listed_keys("hyena.md") == keys
