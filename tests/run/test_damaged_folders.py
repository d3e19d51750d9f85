"""Random damage to a Hugging Face folder: its weights are loaded, or the folder is refused; nothing
else happens.
"""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configured import points_of

from fp4train.checkpoint import ALONE
from fp4train.cli.launch import settings
from fp4train.data import find_template, planned_vocab_size
from fp4train.errors import DataError, UserError
from fp4train.run.build import build_model
from fp4train.run.initial import open_init
from fp4train.run.record.generation import keep_generation

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        3,
        2.5,
        float("inf"),
        float("nan"),
        1 << 70,
        "",
        "x",
        "\x1b[31m",
        [],
        {},
        [1],
        {"a": 1},
    ),
    *([[[[]]]], "9" * 500, ["full_attention"], "F64", "BF16"),
)


def changed(node: Any, draw: random.Random) -> None:
    """Sets one value somewhere in JSON values."""
    while inner := [
        each
        for each in (node.values() if isinstance(node, dict) else node)
        if isinstance(each, dict | list)
    ]:
        if draw.random() < 0.4 or not (inner := [each for each in inner if each]):
            break
        node = draw.choice(inner)
    if isinstance(node, dict):
        node[draw.choice([*node, "new"])] = draw.choice(VALUES)
    else:
        node[draw.randrange(len(node))] = draw.choice(VALUES)


def damage(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    if draw.random() < 0.3:
        held = bytearray(data)
        for _ in range(3):
            held[draw.randrange(len(held))] = draw.randrange(256)
        path.write_bytes(bytes(held[: draw.randrange(len(held))] if draw.random() < 0.3 else held))
        return
    size = int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
    start = 8 if size else 0
    values = json.loads(data[start : start + size] if size else data)
    changed(values, draw)
    text = json.dumps(values).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :] if size else text)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_damaged_folder_is_loaded_or_refused(
    folders: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "folder"
    draw = random.Random(seed)
    shutil.copytree(folders["llama"], folder)
    (point,) = points_of(["data=text", "data.path=none", f"init={folder}"])
    ends: Counter[str] = Counter()
    for _ in range(240 if seed else 80):
        shutil.rmtree(folder)
        shutil.copytree(folders[draw.choice(sorted(folders))], folder)
        damage(
            draw.choice(
                [
                    path
                    for path in sorted(folder.iterdir())
                    if path.suffix in (".json", ".safetensors")
                ]
            ),
            draw,
        )
        try:
            config = settings(point).config
            init = open_init(config, ALONE)
            assert init is not None
            init.load(build_model(config, planned_vocab_size(config.data), torch.device("cpu")))
            ends["loaded"] += 1
        except UserError:
            ends["refused"] += 1
    assert ends["loaded"] > 5 and ends["refused"] > 30


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
