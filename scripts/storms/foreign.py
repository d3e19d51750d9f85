"""Hugging Face folders that somebody else prepared: what is in them is read, or refused in one line within bounds.

A class of changes is an entry of `CHANGES`; each change takes the folder and the trial's random numbers.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storms.ground import TINY, Ground, Result, begin, end_measured, explained
from storms.surroundings import small_memory

SECONDS = 10.0
"""Processor time that a command may take with such a folder; with a sound one it takes one or
two.
"""
MEMORY = 10**9
"""Bytes of memory that it may hold, those that torch takes among them."""
Change = Callable[[Path, random.Random], str]
"""Changes a folder; returns in a few words how."""
VALUES: tuple[Any, ...] = (
    *(2**62, 10**9, 10**400, -1, 0, 1.5, 1e308, float("nan"), float("inf"), True, "4", "x" * 10**6),
    *([], [1], [[1]], {}, {"a": []}, [None] * 1000, None),
)
STRAY = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "modeling_own.py",
    "vocab.json",
    "added_tokens.json",
    "generation_config.json",
    "params.json",
    "notes.txt",
)
COMMANDS = (
    ("sample", "hf", "prompt=the", "tokens=2"),
    ("plan", "init=hf"),
    (*TINY, "init=hf", "run.name=c", "train.steps=1"),
    ("eval", "hf", "text=../text.txt"),
    ("verify", "hf", "against=runs/a"),
)


def _key(folder: Path, draw: random.Random) -> str:
    """A key of a table has another value, or is a new one."""
    path = folder / draw.choice(
        ("config.json", "config.json", "tokenizer_config.json", "generation_config.json")
    )
    table = json.loads(path.read_text())
    key = draw.choice([*table, "rope_theta", "layer_types", "quantization_config", "auto_map"])
    value = draw.choice(VALUES)
    path.write_text(json.dumps(table | {key: value}))
    return f"{path.name}: {key}={str(value)[:40]}"


def _model(folder: Path, draw: random.Random) -> str:
    """The configuration says that it is another family's."""
    path = folder / "config.json"
    kind = draw.choice(
        (
            "qwen2",
            "qwen3",
            "mixtral",
            "qwen3_moe",
            "glm4_moe",
            "dots1",
            "nemotron_h",
            "mamba2",
            "gemma3",
        )
    )
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model_type": kind, "architectures": None})
    )
    return kind


def _table(folder: Path, draw: random.Random) -> str:
    """A table costs much, or is none."""
    path = folder / draw.choice(("config.json", "tokenizer_config.json", "generation_config.json"))
    path.write_bytes(
        draw.choice(
            (b"[" * 10**6, b"[" + b"[]," * 4_000_000 + b"1]", b'{"a":' * 500, b"\xff\xfe", b"null")
        )
    )
    return path.name


def _header(folder: Path, draw: random.Random) -> str:
    """A tensor's place, shape, dtype or name is another, or the file has more bytes."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    name = draw.choice([key for key in header if key != "__metadata__"])
    how = draw.choice(("place", "shape", "dtype", "name", "more", "less", "many"))
    if how == "place":
        header[name]["data_offsets"] = [
            0,
            header[name]["data_offsets"][1] - header[name]["data_offsets"][0],
        ]
    elif how == "shape":
        header[name]["shape"] = draw.choice(
            ([2**62], [-1], [0], [1] * 1000, header[name]["shape"][::-1])
        )
    elif how == "dtype":
        header[name]["dtype"] = draw.choice(("I8", "F64", "C64", "F4", 3))
    elif how == "name":
        header[draw.choice(("../x", "a" * 10**6, "", "\x1b[2J"))] = header.pop(name)
    elif how == "many":
        header |= {
            f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(400_000)
        }
    text = json.dumps(header).encode()
    body = body + b"\0" * 64 if how == "more" else body[:-4] if how == "less" else body
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return f"{how} of {name}"


def _file(folder: Path, draw: random.Random) -> str:
    """A file is added, or one is a link, a pipe, huge or gone."""
    kind = draw.choice(("stray", "stray", "link", "pipe", "sparse", "gone"))
    if kind == "stray":
        name = draw.choice(STRAY)
        (folder / name).write_text(draw.choice(("{}", "", "[", "import os\n")))
        return f"{kind} {name}"
    path = folder / draw.choice(sorted(each.name for each in folder.iterdir()))
    if kind == "sparse":
        os.truncate(path, 1 << 36)
        return f"{kind} {path.name}"
    path.unlink()
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "pipe":
        os.mkfifo(path)
    return f"{kind} {path.name}"


CHANGES: dict[str, tuple[Change, ...]] = {
    "tables": (_key, _key, _key, _table, _model),
    "weights": (_header,),
    "files": (_file,),
}
"""Classes of changes by name."""


def foreign_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each class in turn, each command in turn."""
    folder = ground.copy(place) / "hf"
    kind = tuple(CHANGES)[number % len(CHANGES)]
    how = draw.choice(CHANGES[kind])(folder, draw)
    command = COMMANDS[number // len(CHANGES) % len(COMMANDS)]
    ended = end_measured(begin(place, *command, around=small_memory), place, 120.0)
    out = ended.out
    differs = ended.code == 1 and "differs from" in out and "Traceback" not in out
    told = explained(ended.code, out) or differs
    cheap = ended.seconds < SECONDS and ended.peak <= MEMORY
    passed = told and cheap and len(out) < 20_000 and "\x1b[2J" not in out
    cost = f"{ended.seconds:.0f} s, {ended.peak / 1e6:,.0f} MB"
    seen = f"{how}, {command[0]}: exit {ended.code}, {cost}: {out[-400:]}"
    return Result(kind, passed, "" if passed else seen)
