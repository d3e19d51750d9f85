"""Tables of a Hugging Face folder that are no small files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from configured import points_of

from fp4train.cli.launch import settings
from fp4train.data import find_template
from fp4train.errors import DataError, UserError
from fp4train.run.record.generation import keep_generation


def begin(folder: Path, run: Path) -> object:
    """The configuration of a run that begins with a folder."""
    words = ["data=text", "data.path=none", f"init={folder}"]
    (point,) = points_of(words)
    return settings(point).config


def template(folder: Path, run: Path) -> object:
    """The chat template of a folder."""
    return find_template(None, str(folder), run)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(6 << 30)


SPARSE = "6,442,450,944 bytes; more than"
PIPE = "it is a pipe, not a file"


@pytest.mark.parametrize(
    ("name", "make", "read", "message"),
    [
        ("config.json", sparse, begin, SPARSE),
        ("config.json", os.mkfifo, begin, PIPE),
        ("generation_config.json", sparse, keep_generation, SPARSE),
        ("generation_config.json", os.mkfifo, keep_generation, PIPE),
        ("tokenizer_config.json", sparse, begin, SPARSE),
        ("tokenizer_config.json", os.mkfifo, begin, PIPE),
        ("tokenizer_config.json", sparse, template, SPARSE),
        ("chat_template.jinja", sparse, template, SPARSE),
    ],
)
def test_a_table_that_is_no_small_file_is_refused_in_one_line(
    folders: dict[str, Path],
    tmp_path: Path,
    name: str,
    make: Callable[[Path], None],
    read: Callable[[Path, Path], object],
    message: str,
) -> None:
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "folder"))
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises((UserError, DataError)) as refused:
        read(folder, tmp_path / "run")
    text = str(refused.value)
    assert message in text and name in text
    assert "\n" not in text and len(text) < 500


def test_a_pipe_is_no_chat_template(folders: dict[str, Path], tmp_path: Path) -> None:
    """A folder whose chat_template.jinja is a pipe has no template of its own, and nobody waits."""
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "folder"))
    os.mkfifo(folder / "chat_template.jinja")
    found = find_template(None, str(folder), tmp_path / "run")
    assert found.source == find_template(None, str(folders["llama"]), tmp_path / "other").source
