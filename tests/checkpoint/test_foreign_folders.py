"""Folders that somebody else wrote: what the format's own library refuses is refused, and small
files cost little.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError, safe_open

from fp4train import foreign_json
from fp4train.checkpoint import open_weights, read_header
from fp4train.checkpoint.model_folder import read_config
from fp4train.errors import UserError

SECONDS = 10.0
"""Most processor time that a foreign file may take before it is refused."""


def written(path: Path, header: Any, size: int) -> Path:
    """A file with a header and `size` bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    return path


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def read(path: Path) -> list[str]:
    with path.open("rb") as file:
        return sorted(read_header(file.fileno(), path.stat().st_size))


@given(
    bounds=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))),
        max_size=4,
    ),
    moved=st.booleans(),
    more=st.integers(0, 3),
)
def test_a_file_is_read_where_the_library_of_its_format_reads_it(
    tmp_path_factory: pytest.TempPathFactory, bounds: list[tuple[int, int]], moved: bool, more: int
) -> None:
    """Overlaps, gaps, bytes after the last tensor, in any order; `moved` lays the tensors one after
    another.
    """
    if not moved:
        ends = [sum(end - begin for begin, end in bounds[: n + 1]) for n in range(len(bounds))]
        bounds = [
            (last - (end - begin), last) for last, (begin, end) in zip(ends, bounds, strict=True)
        ]
    header = {f"t{number}": entry(*each) for number, each in enumerate(bounds)}
    size = max((end for _, end in bounds), default=0) + more
    path = written(tmp_path_factory.mktemp("file") / "model.safetensors", header, size)
    try:
        with safe_open(path, "pt") as file:
            theirs = sorted(file.keys())
    except SafetensorError:
        with pytest.raises(ValueError, match=r"one after another|outside of the file"):
            read(path)
    else:
        assert read(path) == theirs


MANY = 1_600_000
COSTLY: dict[str, Any] = {
    "a header of 1.6 million names": lambda: (
        b"{" + b",".join(b'"%d":{"dtype":"U8"}' % n for n in range(MANY)) + b"}"
    ),
    "a header of 1.6 million small values": lambda: b'{"a":[' + b"0," * MANY + b"0]}",
    "a header of empty lists": lambda: b'{"a":[' + b"[]," * (5 * MANY) + b"0]}",
    "a header of nested lists": lambda: b'{"a":' + b"[" * MANY + b"]" * MANY + b"}",
    "a header of lists in lists": lambda: (
        b'{"a":{"dtype":"U8","shape":' + b"[" * 300 + b"]" * 300 + b"}}"
    ),
    "a header with white space before it": lambda: b"  {}",
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_header_that_costs_much_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    written(tmp_path / "model.safetensors", COSTLY[kind](), 0)
    began = time.process_time()
    with pytest.raises(
        UserError, match=r"model\.safetensors is no whole safetensors file: "
    ) as refused:
        open_weights(tmp_path)
    assert time.process_time() - began < SECONDS
    assert len(str(refused.value)) < 500


@pytest.mark.long
def test_an_index_of_many_files_is_read_once(tmp_path: Path) -> None:
    """A name per tensor, each in one of many files: no file is compared with each name."""
    places = {f"t{number}": f"{number % 200}.safetensors" for number in range(40_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for number in range(200):
        header = {f"t{each}": entry(0, 0) for each in range(number, 40_000, 200)}
        written(tmp_path / f"{number}.safetensors", header, 0)
    began = time.process_time()
    assert len(open_weights(tmp_path)) == 40_000
    assert time.process_time() - began < SECONDS


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 40_000,
        b'{"a":' * 400 + b"1" + b"}" * 400,
        b"[" + b"[]," * 5_000_000 + b"1]",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xff\xfe{",
    ],
    ids=["nested", "tables in tables", "empty lists", "a number of 5,000 digits", "no text"],
)
def test_a_table_that_costs_much_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=r"config\.json is no JSON") as refused:
        read_config(tmp_path)
    assert len(str(refused.value)) < 500 and "set_int_max_str_digits" not in str(refused.value)


@pytest.mark.long
@settings(max_examples=8)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_ordinary_json_is_what_it_was(value: Any) -> None:
    assert foreign_json.parse(json.dumps(value).encode()) == value


def test_a_scale_of_another_shape_is_not_read(tmp_path: Path) -> None:
    """The header of a sparse file declares a tensor of 64 GB; opening reads none of it."""
    written(tmp_path / "model.safetensors", {"scale": entry(0, 1 << 36)}, 1 << 36)
    assert open_weights(tmp_path).shape("scale") == torch.Size([1 << 36])
