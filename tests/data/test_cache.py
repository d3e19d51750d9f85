"""The token cache while a run reads it, and entries that somebody has prepared."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fp4train.data import DataError, Loader, Text, TokenData
from fp4train.data.stored import BLOCK

LINES = "".join(f"line {number} of the text, and what it says\n" for number in range(8000))


def build(folder: Path) -> TokenData:
    if not (folder / "a.txt").exists():
        (folder / "a.txt").write_text(LINES)
        os.utime(folder / "a.txt", ns=(1, 1))
    return Text(path=str(folder / "a.txt"), cache_dir=str(folder / "cache")).build(
        folder / "run", 64, 0
    )


def entry(folder: Path, name: str = "00000.bin") -> Path:
    (path,) = (folder / "cache").glob(f"*/{name}")
    return path


def read_all(data: TokenData) -> np.ndarray:
    loader = Loader(data.train, batch_size=8, seq_len=64, seed=0)
    return loader.rows(0, sum(loader.sequences))[0].numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


@settings(max_examples=10)
@given(place=st.integers(0, len(LINES) - 1))
def test_a_row_that_is_read_is_the_text_that_was_tokenised_or_an_error(
    folder: Path, place: int
) -> None:
    """One id is changed in place while the data is open: no row of its block is given, and all
    others are.
    """
    data = build(folder)
    size = len(data.train)
    loader = Loader(data.train, batch_size=1, seq_len=64, seed=0)
    good = read_all(data)
    path = entry(folder)
    before = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(2 * place)
        file.write(b"\x07\x00" if before[2 * place] != 7 else b"\x08\x00")
    block = 2 * place // BLOCK
    for position in range(0, sum(loader.sequences), 37):
        first = int(loader.starts(position, 1)[0])
        touched = 2 * first // BLOCK <= block <= (2 * (first + 65) - 1) // BLOCK
        if touched:
            with pytest.raises(
                DataError, match=r"\.bin was changed after it was written: bytes [\d,]+ to"
            ):
                loader.rows(position, 1)
        else:
            assert np.array_equal(loader.rows(position, 1)[0][0], good[position])
    path.write_bytes(before)
    assert len(build(folder).train) == size


@pytest.mark.parametrize("way", ["written in place", "put in its place"])
def test_another_text_of_equal_path_size_and_time_is_tokenised_anew(
    tmp_path: Path, way: str
) -> None:
    old = build(tmp_path)
    text = tmp_path / "a.txt"
    if way == "put in its place":
        text.rename(tmp_path / "old.txt")
    text.write_text(LINES.upper())
    os.utime(text, ns=(1, 1))
    new = build(tmp_path)
    assert new.fingerprint != old.fingerprint
    assert build(tmp_path).fingerprint == new.fingerprint
    assert len(list((tmp_path / "cache").glob("*/*.bin"))) == 2


@pytest.mark.parametrize("left", [0, 1, BLOCK - 1, BLOCK, 100_000])
def test_a_cache_that_is_cut_off_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, left: int
) -> None:
    data = build(tmp_path)
    os.truncate(entry(tmp_path), left)
    with pytest.raises(
        DataError, match=r"\.bin was cut off after the run had opened it: [\d,]+ bytes are missing"
    ):
        read_all(data)


def test_who_may_not_write_in_a_damaged_cache_is_sent_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command would find the same damage."""
    data = build(tmp_path)
    entry(tmp_path).write_bytes(bytes(4 * len(data.train)))
    with pytest.raises(DataError, match="Start the command again"):
        read_all(data)

    def refuse(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(DataError, match=r"another user's: .* another data\.cache_dir"):
        read_all(data)


def test_an_entry_that_is_replaced_or_removed_is_read_to_the_end_as_it_was(tmp_path: Path) -> None:
    data = build(tmp_path)
    good = read_all(data)
    other = tmp_path / "other"
    other.write_bytes(bytes(entry(tmp_path).stat().st_size))
    other.replace(entry(tmp_path))
    assert np.array_equal(read_all(data), good)
    entry(tmp_path).unlink()
    assert np.array_equal(read_all(data), good)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 6 << 30)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a pipe": pipe,
    "sparse": sparse,
    "deeply nested": lambda path: path.write_text("[" * 1_000_000),
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "huge numbers": lambda path: path.write_text('{"dtype": "<u2", "tokens": 1e300, "parts": []}'),
    "more ids than there are": lambda path: path.write_text(
        '{"dtype": "<u2", "tokens": 99, "parts": []}'
    ),
    "objects": lambda path: path.write_text('{"dtype": "O", "tokens": 9, "parts": [[9]]}'),
    "no width": lambda path: path.write_text('{"dtype": "V0", "tokens": 9, "parts": [[9]]}'),
    "a long type": lambda path: path.write_text(
        '{"dtype": "%s", "tokens": 9, "parts": []}' % ("x" * 10**6)
    ),
    "no parts": lambda path: path.write_text('{"dtype": "<u2", "tokens": 312000, "parts": 7}'),
}


@pytest.mark.parametrize("name", ["index.json", "00000.bin", "00000.crc"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_no_run_has_written_is_tokenised_anew_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, name: str
) -> None:
    good = read_all(build(tmp_path))
    path = entry(tmp_path, name)
    path.unlink()
    HOSTILE[kind](path)
    assert np.array_equal(read_all(build(tmp_path)), good)
    assert (
        "is damaged" in caplog.text
        and "tokenising again" in caplog.text
        and len(caplog.text) < 2000
    )
    assert path.is_file() and not path.is_symlink()
