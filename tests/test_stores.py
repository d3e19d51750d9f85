"""Data on object stores: an S3 server on this machine, and fsspec's store in memory."""

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from object_store import Store, serving

from fp4train import stores
from fp4train.config import bind
from fp4train.data import Chat, Dna, HuggingFace, Text, TokenData
from fp4train.errors import UserError
from fp4train.paths import DataPaths, PathText

DOCUMENTS = [f"document {i}: " + "some words of it, " * 20 for i in range(200)]
TALK = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(stores, "PAUSES", (0.01,))
    with serving(monkeypatch) as store:
        yield store


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(stores, "PAUSES", ())
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/lake", recursive=True)


def write_corpus(folder: Path) -> None:
    """Text, packed text, JSON Lines and Parquet, and a hidden file."""
    (folder / "rows").mkdir(parents=True)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("\n".join(DOCUMENTS))
    (folder / "texts" / "b.md.gz").write_bytes(gzip.compress(DOCUMENTS[0].encode()))
    packed = pyarrow.compress("\n".join(DOCUMENTS[:50]).encode(), "zstd", asbytes=True)
    (folder / "texts" / "c.txt.zst").write_bytes(packed)
    (folder / "texts" / ".d.txt").write_text("hidden")
    (folder / "rows" / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    )
    table = pyarrow.table({"text": DOCUMENTS, "other": list(range(200))})
    pyarrow.parquet.write_table(table, folder / "rows" / "b.parquet", row_group_size=50)
    with pyarrow.ipc.new_file(str(folder / "rows" / "c.arrow"), table.schema) as writer:
        writer.write_table(table)


def text_of(place: str, cache: Path, **settings: Any) -> TokenData:
    return Text(path=place, cache_dir=str(cache), **settings).build(cache / "run", 16, 0)


def ids(data: TokenData) -> list[int]:
    return np.concatenate([data.train.ids, data.val.ids]).tolist()


@pytest.mark.parametrize("store", [pytest.param("s3", marks=pytest.mark.long), "memory", "file"])
def test_text_json_lines_and_tables_on_a_store_have_the_ids_of_local_files(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "lake"
    write_corpus(folder)
    place = f"file://{folder}"
    if store != "file":
        request.getfixturevalue(store)
        place = f"{store}://lake"
        fsspec.filesystem(store).put(f"{folder}/", f"{place}/", recursive=True)
    for workers in (1, 2):
        caches = tmp_path / f"local{workers}", tmp_path / f"remote{workers}"
        local, remote = (
            text_of(f"{at}/texts", cache, workers=workers)
            for at, cache in zip((folder, place), caches, strict=True)
        )
        assert ids(remote) == ids(local) and len(ids(local)) > 80_000
        local, remote = (
            HuggingFace(path=f"{at}/rows/*", cache_dir=str(cache), workers=workers).build(
                cache / "run", 16, 0
            )
            for at, cache in zip((folder, place), caches, strict=True)
        )
        assert ids(remote) == ids(local) and len(ids(local)) > 200_000


def test_conversations_and_dna_are_read_from_a_store(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/lake/talks.jsonl", (json.dumps(TALK) + "\n").encode() * 50)
    memory.pipe("/lake/genome.fna", b">one\n" + b"ACGTTGCA\n" * 200)
    cache = {"cache_dir": str(tmp_path)}
    chat = Chat(path="memory://lake/talks.jsonl", val=0.2, **cache).build(tmp_path / "run", 128, 0)
    assert isinstance(chat, TokenData) and len(chat.train) > 1000
    dna = Dna(path="memory://lake/genome.fna", **cache).build(tmp_path / "run", 16, 0)
    assert isinstance(dna, TokenData) and len(ids(dna)) == 1602


@pytest.mark.long
@pytest.mark.parametrize("faults", [["503"], ["cut"], ["slow"], ["503", "cut", "503"]])
def test_faults_that_pass_cost_time_alone(s3: Store, tmp_path: Path, faults: list[str]) -> None:
    fsspec.filesystem("s3").pipe("lake/a.txt", "\n".join(DOCUMENTS * 10).encode())
    expected = ids(text_of("s3://lake/a.txt", tmp_path / "first"))
    s3.faults = list(faults)
    assert ids(text_of("s3://lake/a.txt", tmp_path / "second")) == expected
    assert not s3.faults


@pytest.mark.long
def test_faults_that_stay_end_the_start_and_what_is_finished_is_kept(
    s3: Store, tmp_path: Path
) -> None:
    fsspec.filesystem("s3").pipe("lake/a.txt", "\n".join(DOCUMENTS).encode())
    s3.faults = ["403"] * 99
    denied = r"^s3://lake/a\.txt cannot be read: AccessDenied \(PermissionError\)$"
    with pytest.raises(UserError, match=denied) as error:
        text_of("s3://lake/a.txt", tmp_path)
    assert "\n" not in str(error.value)
    s3.faults = []
    assert len(ids(text_of("s3://lake/a.txt", tmp_path))) > 50_000


@pytest.mark.long
def test_what_is_not_there_or_denied_is_refused_in_one_line(s3: Store, tmp_path: Path) -> None:
    fsspec.filesystem("s3").pipe("lake/rows.bin", b"1")
    for place, reason in {
        "s3://lake/none": "does not exist: the store has no object that begins so",
        "s3://other/none": "does not exist: the store has no object that begins so",
        "s3://lake/*.txt": "matches nothing",
        "s3://lake": "holds no file with one of the suffixes",
    }.items():
        with pytest.raises(UserError, match=rf"^data\.path={place.replace('*', '.')} {reason}"):
            text_of(place, tmp_path)
    s3.faults = ["403"] * 99
    s3.everywhere = True
    with pytest.raises(UserError, match=r"s3://lake/a cannot be read: Forbidden \(Perm"):
        text_of("s3://lake/a", tmp_path)


@pytest.mark.long
def test_an_object_is_known_by_its_etag_and_tokenised_again_where_that_differs(
    s3: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = fsspec.filesystem("s3")
    first, second = ("\n".join(texts).encode() for texts in (DOCUMENTS, DOCUMENTS[::-1]))
    lake.pipe("lake/a.txt", first)
    with caplog.at_level(logging.INFO, "fp4train"):
        expected = ids(text_of("s3://lake/a.txt", tmp_path))
    assert "data.path=s3://lake/a.txt: 1 objects, known by ETag" in caplog.messages
    s3.asked.clear()
    lake.pipe("lake/a.txt", first)  # another time, the same bytes
    assert ids(text_of("s3://lake/a.txt", tmp_path)) == expected
    assert not s3.read("a.txt")
    lake.pipe("lake/a.txt", second)
    assert ids(text_of("s3://lake/a.txt", tmp_path)) != expected


def test_only_data_lie_on_stores_and_only_on_those_that_fsspec_knows() -> None:
    for place in ("s3://lake/a", "gs://lake/a", "hf://datasets/a/b", "memory://a", "file:///a"):
        assert bind(place, DataPaths, "data.path") == place
        with pytest.raises(UserError, match="where only files of this machine are read"):
            bind(place, PathText, "data.cache_dir")
    with pytest.raises(UserError, match=r"x9://a: x9:// is no path here, where only .* fsspec"):
        bind("x9://a", DataPaths, "data.path")
