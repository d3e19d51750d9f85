"""Data on object stores: an S3 server on this machine, and fsspec's store in memory."""

import gzip
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from object_store import Store, serving

from fp4train.config import bind
from fp4train.data import Chat, Dna, HuggingFace, Text, TokenData, Tokens
from fp4train.data.loader import Feed
from fp4train.data.stored import joined
from fp4train.errors import UserError
from fp4train.paths import DataPaths, PathText

DOCUMENTS = [f"document {i}: " + "some words of it, " * 20 for i in range(200)]
TALK = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with serving(monkeypatch) as store:
        yield store


@pytest.fixture
def memory() -> Iterator[Any]:
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


def test_an_object_is_read_where_nothing_else_may_be_asked_for(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As S3 answers who may get objects and not list them: what is not there is forbidden."""
    memory.pipe("/lake/rows.jsonl", b'{"text": "to be"}\n' * 900)
    original = type(memory).info

    def info(store: Any, path: str, **options: Any) -> Any:
        if not path.endswith("/rows.jsonl"):
            raise PermissionError("Forbidden")
        return original(store, path, **options)

    monkeypatch.setattr(type(memory), "info", info)
    source = HuggingFace(path="memory://lake/rows.jsonl", cache_dir=str(tmp_path))
    assert len(ids(source.build(tmp_path / "run", 16, 0))) == 900 * 6
    with pytest.raises(UserError, match=r"^memory://lake/none cannot be read: Forbidden"):
        HuggingFace(path="memory://lake/none").build(tmp_path / "run", 16, 0)


@pytest.mark.long
def test_an_object_is_known_by_its_etag_and_tokenised_again_where_that_differs(
    s3: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = fsspec.filesystem("s3")
    first, second = ("\n".join(texts).encode() for texts in (DOCUMENTS, DOCUMENTS[::-1]))
    lake.pipe("lake/a.txt", first)
    with caplog.at_level(logging.INFO, "fp4train"):
        expected = ids(text_of("s3://lake/a.txt", tmp_path))
    assert "data.path=s3://lake/a.txt: its objects are known by ETag" in caplog.messages
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


IDS = np.random.default_rng(0).integers(0, 300, 40_000)


def token_files(folder: Path) -> None:
    """Two raw files, an array of NumPy, datatrove's and Megatron's files, of all of `IDS` each."""
    folder.mkdir()
    raw = IDS.astype("<u2")
    raw[:15_001].tofile(folder / "a.bin")
    raw[15_001:].tofile(folder / "b.bin")
    np.save(folder / "c.npy", raw)
    IDS.astype("<u4").tofile(folder / "d.ds")
    (folder / "d.ds.metadata").write_text("gpt2|4\n40000\n40 K tokens")
    np.array([20_000, 40_000], "<u8").tofile(folder / "d.ds.index")
    raw.tofile(folder / "e.bin")
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
    lengths = np.array([10_000, 30_000], "<i4").tobytes()
    offsets = np.array([0, 20_000, 0, 1, 2], "<i8").tobytes()
    (folder / "e.idx").write_bytes(index + lengths + offsets)


def tokens_of(place: Any, run: Path) -> TokenData:
    return Tokens(path=place, vocab_size=300).build(run, 64, 0)


def batches(data: TokenData) -> list[Any]:
    loader = data.training(batch_size=16, seq_len=64, seed=1)
    return [[rows.tolist() for rows in loader.batch(step)] for step in range(4)]


@pytest.mark.parametrize("name", ["[ab].bin", "c.npy", "d.ds", "e.idx", "e"])
def test_token_files_on_a_store_give_the_rows_of_local_ones(
    memory: Any, tmp_path: Path, name: str
) -> None:
    token_files(tmp_path / "lake")
    memory.put(f"{tmp_path}/lake/", "/lake/", recursive=True)
    local = tokens_of(f"{tmp_path}/lake/{name}", tmp_path / "run")
    remote = tokens_of(f"memory://lake/{name}", tmp_path / "run")
    assert ids(remote) == ids(local) == IDS.tolist()
    assert batches(remote) == batches(local)
    assert remote.train.ids[-1] == IDS[len(remote.train) - 1]
    with pytest.raises(IndexError):
        remote.train.ids[len(remote.train)]


def test_a_batch_is_one_call_of_rows_alone_and_further_ones_are_fetched_meanwhile(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_files(tmp_path / "lake")
    memory.put(f"{tmp_path}/lake/", "/lake/", recursive=True)
    data = tokens_of(["memory://lake/a.bin", "memory://lake/b.bin"], tmp_path / "run")
    loader = data.training(batch_size=16, seq_len=64, seed=1)
    calls: list[int] = []
    original = type(memory).cat_ranges

    def cat_ranges(store: Any, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        calls.append(sum(ends) - sum(starts))
        return original(store, paths, starts, ends, **options)

    monkeypatch.setattr(type(memory), "cat_ranges", cat_ranges)
    feed = Feed(loader, torch.device("cpu"))
    expected = [loader.batch(step)[0].tolist() for step in range(6)]
    assert calls == [16 * 65 * 2] * 6
    calls.clear()
    for step in range(2):
        assert feed.problem(step * 16, 16) is None
        assert feed.rows(step * 16, 16, then=step * 16 + 16)[0].tolist() == expected[step]
    assert feed.problem(5 * 16, 16) is None  # all before it are fetched, in order
    assert len(calls) == 6
    feed.close()


def test_a_mixture_of_files_on_a_store_and_here_asks_the_store_once_a_batch(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_files(tmp_path / "lake")
    memory.put(f"{tmp_path}/lake/", "/lake/", recursive=True)
    places = ["memory://lake/d.ds", f"{tmp_path}/lake/e.bin", "memory://lake/c.npy"]
    parts = [tokens_of(place, tmp_path / "run").train.ids for place in places]
    calls = []
    original = type(memory).cat_ranges
    monkeypatch.setattr(
        type(memory),
        "cat_ranges",
        lambda *args, **options: calls.append(0) or original(*args, **options),
    )
    everything = joined(parts)
    whole = np.concatenate([np.asarray(part) for part in parts])
    calls.clear()
    places_BT = np.random.default_rng(1).integers(0, len(whole) - 8, 30)[:, None] + np.arange(8)
    assert np.array_equal(everything.take(places_BT), whole[places_BT])
    assert len(calls) == 2
    assert np.array_equal(
        everything[100:39_700].take(places_BT % 39_000), whole[100:][places_BT % 39_000]
    )


@pytest.mark.long
def test_token_files_on_s3_are_read_by_ranges_through_faults_and_what_changes_is_seen(
    s3: Store, tmp_path: Path
) -> None:
    lake = fsspec.filesystem("s3")
    big = IDS.astype("<u2")
    lake.pipe("lake/a.bin", big.tobytes())
    data = tokens_of("s3://lake/a.bin", tmp_path / "run")
    s3.asked.clear()
    first = batches(data)
    assert (
        len(s3.read()) < 70
        and max(
            int(end) - int(start)
            for _, _, asked in s3.read()
            for start, end in [asked[6:].split("-")]
        )
        == 65 * 2 - 1
    )
    s3.faults = ["503", "cut", "slow"]
    assert batches(data) == first and not s3.faults
    assert tokens_of("s3://lake/a.bin", tmp_path / "run").fingerprint == data.fingerprint
    lake.pipe("lake/a.bin", (big + 1).astype("<u2").clip(0, 299).tobytes())
    assert tokens_of("s3://lake/a.bin", tmp_path / "run").fingerprint != data.fingerprint
    lake.pipe("lake/a.bin", big[:100].tobytes())
    with pytest.raises(UserError, match=r"s3://lake/a\.bin cannot be read: "):
        batches(data)
    lake.rm("lake/a.bin")
    with pytest.raises(UserError, match=r"^s3://lake/a\.bin: the store lacks it$"):
        batches(data)
