"""The shards of the cache: equal in every bit whoever makes them, and whoever is killed meanwhile."""

import errno
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from limits import set_limit

from fp4train import files
from fp4train.data import DataError, HuggingFace, Ids, Text, token_chunks
from fp4train.data.cache import CacheEntry, opened
from fp4train.data.source import TextSource
from fp4train.data.stored import BLOCK, checksums
from fp4train.data.tokenizers import Bytes


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "characters of a shard", 5000)


DRAW = random.Random(5)
TEXTS = [
    " ".join(str(DRAW.randrange(9999)) for _ in range(DRAW.randrange(1, 300))) + " ä€\n"
    for _ in range(60)
]


def text_files(folder: Path) -> TextSource:
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"texts/{number:02d}.txt").write_text(text * (9 if number == 30 else 1))
    return Text(path=str(folder / "texts"), cache_dir=str(folder / "cache"))


def json_lines(folder: Path, **settings: Any) -> HuggingFace:
    """Two records in a line, one without text, a long one, and no line break at the end."""
    lines = [json.dumps({"text": text, "n": [1]}, ensure_ascii=False) for text in TEXTS]
    lines[3:5] = [lines[3] + " " + lines[4], '{"text": null}', "", '{"other": 1}']
    lines[20] = json.dumps({"text": TEXTS[20] * 40})
    (folder / "rows.jsonl").write_text("\ufeff" + "\n".join(lines))
    return HuggingFace(
        path=str(folder / "rows.jsonl"),
        cache_dir=str(folder / "cache"),
        max_tokens=None,
        **settings,
    )


def parquet(folder: Path) -> HuggingFace:
    table = pa.table({"text": [*TEXTS, None], "other": list(range(len(TEXTS) + 1))})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    return HuggingFace(path=str(folder / "rows.parquet"), cache_dir=str(folder / "cache"))


def mixed(folder: Path) -> HuggingFace:
    """A folder of files of several kinds, one of which is no data."""
    (folder / "rows").mkdir()
    json_lines(folder / "rows")
    parquet(folder / "rows")
    (folder / "rows/stats.json").write_text('{"rows": 9}\n' * 3)
    return HuggingFace(path=str(folder / "rows"), cache_dir=str(folder / "cache"))


SOURCES = {"text": text_files, "JSON Lines": json_lines, "Parquet": parquet, "a folder": mixed}


def in_order(source: TextSource, folder: Path) -> list[int]:
    """The ids of the documents, read from the first on."""
    chunks = token_chunks(source.corpus(folder).documents(), Bytes())  # type: ignore[arg-type]
    return [number for chunk in chunks for number in chunk.tolist()]


def entry_of(source: TextSource, folder: Path) -> CacheEntry:
    (entry,) = source.entries(folder, 8)
    return entry


def entry_files(folder: Path) -> dict[str, bytes]:
    """What the one entry of a cache holds; nothing that is half written."""
    (entry,) = (folder / "cache").iterdir()
    found = {path.name: path.read_bytes() for path in entry.iterdir()}
    assert not any(name.endswith(".tmp") for name in found)
    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_shards_are_equal_in_every_bit_with_any_number_of_workers(
    tmp_path: Path, kind: str
) -> None:
    source = SOURCES[kind](tmp_path)
    expected = in_order(source, tmp_path)
    first: dict[str, bytes] = {}
    for workers in (1, 2, 7):
        object.__setattr__(source, "workers", workers)
        assert entry_of(source, tmp_path).ids().tolist() == expected
        there = entry_files(tmp_path)
        assert sum(name.endswith(".bin") for name in there) > 5
        assert there == (first or there)
        first = there
        (tmp_path / "cache").rename(tmp_path / f"cache{workers}")


@pytest.mark.parametrize("most", [1, 7777, 20_000, 10**9])
@pytest.mark.parametrize("workers", [1, 3])
def test_ids_end_at_max_tokens_and_no_shard_behind_it_stays(
    tmp_path: Path, most: int, workers: int
) -> None:
    source = json_lines(tmp_path, workers=workers)
    expected = in_order(source, tmp_path)[:most]
    object.__setattr__(source, "max_tokens", most)
    assert entry_of(source, tmp_path).ids().tolist() == expected
    there = entry_files(tmp_path)
    cut = entry_of(source, tmp_path).prepare(0, 1, verify=False).endswith("data.max_tokens")
    assert cut == (most < 10**9)
    counts = json.loads(there["index.json"])["parts"]
    assert sum(map(len, counts)) == sum(name.endswith(".bin") for name in there)


def test_a_corpus_that_cannot_be_divided_is_cut_as_it_is_read(tmp_path: Path) -> None:
    source = json_lines(tmp_path, max_documents=40)
    assert entry_of(source, tmp_path).ids().tolist() == in_order(source, tmp_path)
    assert {"00000.bin", "00000-1.bin", "00000-5.bin"} <= set(entry_files(tmp_path))


class Slow(Bytes):
    """Bytes that take a while."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        time.sleep(0.01)
        return super().encode_batch(texts)


def beside(entry: CacheEntry) -> int:
    """Another process that makes an entry."""
    if (process := os.fork()) == 0:
        try:
            entry.ids()
        finally:
            os._exit(0)
    return process


@pytest.mark.parametrize("documents", [None, 55])
def test_a_process_that_is_killed_loses_the_shard_that_it_was_making(
    tmp_path: Path, documents: int | None
) -> None:
    """At moments that are drawn; a part in several shards goes on behind those that are there."""
    source = json_lines(tmp_path, tokenizer=Slow(), max_documents=documents)
    expected = in_order(source, tmp_path)
    entry = entry_of(source, tmp_path)
    inodes: dict[str, int] = {}
    draw = random.Random(documents)
    for _ in range(6):
        process = beside(entry)
        time.sleep(draw.uniform(0, 0.15))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        shards = {path.name: path.stat().st_ino for path in (tmp_path / "cache").glob("*/*.crc")}
        written = [json.loads(p.read_text()) for p in (tmp_path / "cache").glob("*/0*.json")]
        kept = sum(len(part["shards"]) for part in written)
        assert kept <= len(shards) <= kept + 1
        assert len(inodes) - 1 <= sum(shards[name] == inodes[name] for name in inodes)
        inodes = shards
    assert entry.ids().tolist() == expected
    left = entry_files(tmp_path)
    (tmp_path / "cache").rename(tmp_path / "killed")
    assert entry.ids().tolist() == expected and entry_files(tmp_path) == left


def test_several_processes_share_one_entry_and_each_shard_is_made_once(tmp_path: Path) -> None:
    source = json_lines(tmp_path, tokenizer=Slow())
    entry = entry_of(source, tmp_path)
    made = tmp_path / "made"
    write = files.Folder.write

    def counted(folder: files.Folder, name: str, data: Any, **options: Any) -> None:
        with made.open("a") as file:
            file.write(f"{os.getpid()} {name}\n")
        write(folder, name, data, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Folder, "write", counted)
        processes = [beside(entry) for _ in range(2)]
        ids = entry.ids()
        for process in processes:
            os.waitpid(process, 0)
    assert ids.tolist() == in_order(source, tmp_path)
    lines = [line.split() for line in made.read_text().splitlines()]
    shards = [name for _, name in lines if name.endswith(".bin")]
    assert len(shards) == len(set(shards)) and len({process for process, _ in lines}) == 3


def test_parts_of_a_job_array_are_whole_when_all_have_come(tmp_path: Path) -> None:
    source = json_lines(tmp_path)
    entry = entry_of(source, tmp_path)
    said = [entry.prepare(part, 3, verify=False) for part in (2, 0, 1)]
    assert all(text.endswith("its share is there, other parts are not") for text in said[:2])
    expected = in_order(source, tmp_path)
    assert f": {len(expected):,} ids in " in said[2]
    assert entry.ids().tolist() == expected


def test_a_full_disk_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = json_lines(tmp_path)
    entry = entry_of(source, tmp_path)
    room = 60_000
    write_all = files.write_all

    def full(descriptor: int, data: files.Buffer) -> None:
        nonlocal room
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_all", full)
        with pytest.raises(
            DataError, match=r"No space left on device\. .*what is finished is kept"
        ):
            entry.ids()
    there = entry_files(tmp_path)
    assert there.keys() >= {"00000.bin", "00002.json"} and "index.json" not in there
    assert entry.ids().tolist() == in_order(source, tmp_path)
    assert there.items() <= entry_files(tmp_path).items()


def made_entry(folder: Path) -> tuple[Any, Any, dict[str, bytes], Path]:
    """A source, its entry, the files of the entry once it is made, and their folder."""
    source = json_lines(folder)
    entry = entry_of(source, folder)
    entry.ids()
    return source, entry, entry_files(folder), next((folder / "cache").iterdir())


def test_a_damaged_shard_alone_is_made_anew_and_verify_finds_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, entry, good, folder = made_entry(tmp_path)
    inodes = {path.name: path.stat().st_ino for path in folder.glob("*.bin")}
    changed = sorted(inodes)[3]
    gone = sorted(inodes)[6]
    data = bytearray(good[changed])
    data[100] ^= 4
    (folder / changed).write_bytes(data)
    (folder / gone).unlink()
    assert "ids in" in entry.prepare(0, 1, verify=True)
    assert entry_files(tmp_path) == good
    said = {name for name in inodes if f"{name} is damaged (" in caplog.text}
    assert said == {changed, gone}
    kept = {path.name for path in folder.glob("*.bin") if path.stat().st_ino == inodes[path.name]}
    assert kept >= inodes.keys() - said


def test_a_good_cache_that_cannot_be_written_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, entry, good, _ = made_entry(tmp_path)

    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.Folder, "remove", read_only)
    assert "ids in" in entry.prepare(0, 1, verify=True)
    assert entry_files(tmp_path) == good and "damaged" not in caplog.text


def test_shards_of_another_tokenizer_are_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, entry, good, folder = made_entry(tmp_path)
    other = json.loads(good["00002.json"])
    (folder / "00002.json").write_text(json.dumps({**other, "entry": "another"}))
    (folder / "00002.bin").write_bytes(bytes(len(good["00002.bin"])))
    (folder / "index.json").unlink()
    assert entry.ids().tolist() == in_order(source, tmp_path)
    assert "00002.json is of another text or tokenizer, and is not used" in caplog.text
    assert entry_files(tmp_path) == good


def test_ten_trillion_ids_are_opened_by_the_index_and_read_anywhere(tmp_path: Path) -> None:
    """Of sparse files: 100 of 1e11 ids each."""
    each = 10**11
    index = {"entry": tmp_path.name, "dtype": "<u4", "tokens": 100 * each, "parts": [[each]] * 100}
    (tmp_path / "index.json").write_text(json.dumps(index))
    size = 4 * each
    for part in range(100):
        for suffix, length in ((".bin", size), (".crc", -(-size // BLOCK) * 4)):
            path = tmp_path / f"{part:05d}{suffix}"
            path.touch()
            os.truncate(path, length)
    place = 37 * each + 123_456_789_012 % each
    block = 4 * (place % each) // BLOCK
    with (tmp_path / "00037.crc").open("r+b") as file:
        file.seek(4 * block)
        file.write(np.repeat(checksums(bytes(BLOCK)), 3).tobytes())
    ids = opened(files.Folder.open(tmp_path))
    assert ids is not None and len(ids) == 10**13
    assert ids.take(np.arange(place, place + 1025)).tolist() == [0] * 1025
    with pytest.raises(DataError, match="was changed after it was written"):
        ids[len(ids) - 5 :].tolist()
