"""Texts reach their keys as they are typed, and paths of another storage are refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fp4train.config.command_line import CommandLine, read_line
from fp4train.config.composition import Composed, composed
from fp4train.config.schema import plain, to_config
from fp4train.errors import UserError
from fp4train.files import new_folder

LIKE_NUMBERS = ["20261128_0834", "3.10", "1e5", "0x10", "true", "1_000", "nan", "-5", "007"]


def values(*words: str) -> dict[str, Any]:
    """The configuration of a command."""
    (composition,) = composed([*words])
    return plain(composition.cfg)


@pytest.mark.parametrize("text", LIKE_NUMBERS)
def test_a_text_that_looks_like_a_number_reaches_its_key_as_typed(text: str) -> None:
    assert values(f"run.name={text}")["run"] == {
        "name": text,
        "dir": f"runs/{text}",
        "seed": 0,
        "overwrite": False,
    }
    config = values(
        *("data=hf", f"data.path=[{text},b]", f"data.column={text}", f"data.cache_dir={text}"),
        *(f"init={text}", "train.steps=1_000", "gpu=null"),
        *("data/tokenizer=pretrained", f"data.tokenizer.name={text}"),
    )
    assert config["data"]["path"] == [text, "b"]
    assert config["data"]["column"] == config["data"]["cache_dir"] == config["init"] == text
    assert config["data"]["tokenizer"]["name"] == text
    assert config["train"]["steps"] == 1000 and config["gpu"] is None


@pytest.mark.parametrize("text", ["Müller.txt", "a(1).txt", "a#b", "a!b", "データ", "a]b", "ü b"])
def test_a_text_outside_of_hydras_grammar_needs_no_quotes(text: str) -> None:
    config = values("data=hf", f"data.path={text}", f"run.name={text}", "data.cache_dir='a#b'")
    assert config["data"]["path"] == config["run"]["name"] == text
    assert config["data"]["cache_dir"] == "a#b"
    if "]" not in text:
        assert values("data=hf", f"data.path=[{text},b]")["data"]["path"] == [text, "b"]


def test_null_is_null_where_a_key_may_be_null_and_its_like_a_text_elsewhere() -> None:
    assert values("run.name=NULL", "init=NULL")["run"]["name"] == "NULL"
    assert values("run.name=NULL", "init=NULL")["init"] is None
    assert values("run.name=null")["run"]["name"] is None  # which is refused where it is bound


def test_texts_of_a_sweep_reach_their_points_as_typed() -> None:
    points: list[Composed] = [*composed(["-m", "data=text", "data.path=1_0,[2_0,x],'3_0'"])]
    assert [point.cfg.data.path for point in points] == ["1_0", ["2_0", "x"], "3_0"]
    assert [point.cfg.run.name.rpartition("=")[2] for point in points][::2] == ["1_0", "3_0"]


def test_a_number_of_a_file_in_the_place_of_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    option = tmp_path / "data" / "mine.yaml"
    words = ("--config-dir", str(tmp_path), "data=mine")
    for written, read in (("2026_01", 202601), ("1e5", 100000.0), ("true", True)):
        option.write_text(f"_target_: fp4train.data.Text\npath: {written}\n")
        with pytest.raises(UserError, match=f"data.path is text, and YAML reads {read}, .* quotes"):
            values(*words)
    option.write_text("_target_: fp4train.data.Text\npath: ['2026_01', x]\n")
    assert values(*words)["data"]["path"] == ["2026_01", "x"]


@dataclass(frozen=True, kw_only=True)
class Options(CommandLine):
    out: Path = Path("x")


@pytest.mark.parametrize("scheme", ["s3", "gs", "hf", "https", "file"])
def test_a_path_of_another_storage_is_refused_wherever_it_is_given(
    scheme: str, working_folder: Path
) -> None:
    place = f"{scheme}://bucket/a"
    said = f"{place}: {scheme}:// is no path here, .* copy it to a disk, or mount it"
    with pytest.raises(UserError, match=f"^out={said}"):
        read_line([f"out={place}"], Options, "fp4train x")
    with pytest.raises(UserError, match=f"^{said}"):
        _ = read_line([place], Options, "fp4train x").run
    with pytest.raises(UserError, match=f"{scheme}:// is no path"), new_folder(Path(place)):
        pass
    for words in (
        *(["run.dir"], ["run.name"], ["resume"], ["init"], ["teacher"]),
        *(["data.path", "data=text"], ["data.cache_dir", "data=text", "data.path=a"]),
    ):
        key, *others = words
        for folder in ("mine/",) if key == "data.path" else ("", "mine/"):
            with pytest.raises(UserError, match=f"^({key}=|run.dir=runs/)?{folder}{said}"):
                to_config(next(composed([*others, f"{key}={folder}{place}"])).cfg)
    assert not list(working_folder.iterdir())


def test_an_entry_is_added_to_a_section_that_has_any_number_of_them() -> None:
    late = "{_target_: fp4train.precision.Phase, start: 2, recipe: {_target_: fp4train.precision.MXFP8}}"
    phases = values("phases=none", f"+phases.late={late}")["phases"]
    assert list(phases) == ["late"] and phases["late"]["start"] == 2
    assert list(values(f"+phases.late={late}", "phases.late.start=3")["phases"])[-1] == "late"
