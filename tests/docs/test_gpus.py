"""docs/gpus.md: the parts of the check, which GPU multiplies what, and the keys that it names."""

import re
from pathlib import Path

import pytest
from configured import composed_of, recipe_named
from gpu_check import PARTS, nine_steps

from fp4train import backends
from fp4train.backends import Table
from fp4train.hardware import Device
from fp4train.precision import Layer, Recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
LAYER = Layer(name="layer", in_features=4096, out_features=4096, block=0, blocks=1)
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose header begins so, without its header."""
    table = PAGE.partition(f"\n| {header}")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def recipe_of(name: str) -> Recipe:
    return recipe_named(name)


def runs(table: Table, backend: str, device: Device) -> bool:
    try:
        backends.Request(table, LAYER, backend, device).choices()
    except ValueError:
        return False
    return True


def test_the_parts_of_the_check_are_those_of_the_script() -> None:
    assert {name.strip("`"): text for name, text in rows("part of `gpu_check.sh`")} == PARTS


def test_the_page_lists_the_steps_of_the_first_visit_in_order_and_when_each_has_ended_at_the_latest() -> (
    None
):
    ends = {}
    seconds = 0.0
    for step in nine_steps(Path("my_gpu")):
        seconds += step.limit or 0
        files = {
            Path(each.words[each.words.index("--out") + 1]).name for each in (step, *step.beside)
        }
        ends[int(seconds)] = files
    listed = {
        int(re.split("–", row[0])[-1]): set(re.findall(r"`(my_gpu-\w+\.json)`", row[2]))
        for row in rows("seconds | what")
    }
    assert listed == ends and list(listed) == list(ends)


@pytest.mark.parametrize(("names", "cells"), [(row[0], row[1:]) for row in rows("recipe | 8.0")])
def test_the_page_says_which_gpu_multiplies_what(names: str, cells: list[str]) -> None:
    """The backends that run all three GEMMs of a layer of the recipe, or what takes their place."""
    for name in re.findall(r"`(\w+)`", names):
        table = recipe_of(name).table()
        for capability, cell in zip(CAPABILITIES, cells, strict=True):
            device = Device(type="cuda", name="GPU", capability=capability, here=False)
            chosen = {
                choice.backend
                for choice in backends.Request(table, LAYER, "auto", device).choices().values()
            }
            native = {backend for backend in ("te", "native") if runs(table, backend, device)}
            said = {"emulated": {"emulate"}, "torch": {"torch"}}.get(cell, set(cell.split(", ")))
            assert said == (native if table.quantised and native else chosen), (name, capability)


@pytest.mark.long
def test_the_keys_of_the_page_are_keys_of_a_run() -> None:
    switches = [re.findall(r"`([^`]+)`", row[0])[0] for row in rows("key | what it does")]
    assert len(switches) > 4
    for switch in switches:
        composed_of(switch)
