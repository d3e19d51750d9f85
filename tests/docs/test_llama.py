"""docs/llama.md: its commands run, on a smaller model, its keys are those of the shapes, and its
sizes those of the files.
"""

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from configured import shape_of
from family_models import parameters
from family_pages import check_commands, listed_keys
from shown import DOCS

from fp4train.models.common import DecoderShape, PreNormShape, RotaryShape
from fp4train.models.hybrid import Hybrid
from fp4train.models.hyena import Hyena
from fp4train.models.llama import Llama
from fp4train.models.moe import MixtureOfExperts
from fp4train.models.olmo2 import Olmo2

PAGE = (DOCS / "llama.md").read_text(encoding="utf-8")


def keys_of(kind: type) -> set[str]:
    return {f"model.{each.name}" for each in fields(kind)}


@pytest.mark.long
def test_every_command_works_in_the_order_of_the_page(working_folder: Path) -> None:
    np.zeros(1000, dtype="<u2").tofile("tokens.bin")
    check_commands("llama.md", 8)


def test_the_page_names_every_key_and_which_families_have_it() -> None:
    assert listed_keys("llama.md") == keys_of(Llama)
    rows = re.findall(r"^\| (`model\..*?) \| ([^|]+) \|", PAGE, re.MULTILINE)
    of = {
        families: {
            key for names, each in rows if each == families for key in re.findall(r"`(.*?)`", names)
        }
        for _, families in rows
    }
    assert of["all"] == keys_of(DecoderShape)
    rotated = of["all"] | of["Llama, OLMo 2, mixtures"]
    assert rotated == keys_of(RotaryShape)
    assert rotated | of["Llama, mixtures"] == keys_of(PreNormShape)
    assert rotated | of["Llama, OLMo 2"] == keys_of(Olmo2)
    assert all(keys_of(DecoderShape) <= keys_of(kind) for kind in (Hybrid, Hyena, MixtureOfExperts))


def test_pages_of_families_lead_to_their_other_keys() -> None:
    own = {"moe.md": MixtureOfExperts, "hybrid.md": Hybrid, "hyena.md": Hyena}
    for page, kind in own.items():
        listed = {
            key.rpartition(".")[0] if key.count(".") > 1 else key for key in listed_keys(page)
        }
        assert keys_of(kind) <= listed | listed_keys("llama.md"), page
        assert "The others are [those of a Llama](llama.md#keys)" in (DOCS / page).read_text(
            encoding="utf-8"
        )


@pytest.mark.long
def test_the_sizes_are_those_of_the_files() -> None:
    rows = re.findall(
        r"^\| `((?:llama|olmo2)_\w+)` \| ([\d.]+) ([MB]) \| (\d+) \| (\d+) \| ([\d,]+)",
        PAGE,
        re.MULTILINE,
    )
    folder = Path(__file__).parents[2] / "configs" / "model"
    files = [*folder.glob("llama_*.yaml"), *folder.glob("olmo2_*.yaml")]
    assert {name for name, *_ in rows} == {path.stem for path in files}
    for name, count, unit, layers, width, vocabulary in rows:
        shape = shape_of(name)
        assert (shape.layers, shape.width) == (int(layers), int(width))
        found = parameters(shape, int(vocabulary.replace(",", ""))) / {"M": 1e6, "B": 1e9}[unit]
        assert f"{found:.{len(count.partition('.')[2])}f}" == count, name


@pytest.mark.parametrize("page", ["llama.md", "moe.md", "hybrid.md", "hyena.md"])
def test_what_is_promised_of_ranks_leads_to_their_number_and_its_condition(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "change no bit where [scale.md](scale.md#what-is-equal) says so" in text
    equal = " ".join((DOCS / "scale.md").read_text(encoding="utf-8").split())
    assert f"]({page})" in equal or page == "llama.md"
    assert "two shards or replicas of one microbatch each, two stages" in equal
    assert "where each rank's part of every tensor has a multiple of 16 elements" in equal
