"""What a directory that somebody else prepared can do to fp4train: nothing but be refused."""

import gc
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fp4train import files
from fp4train.files import Folder, NotPlain


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def strange(run: Path, kind: str, victim: Path) -> None:
    """Put a thing that is no regular file at run/thing."""
    thing = run / "thing"
    if kind == "a link":
        thing.symlink_to(victim)
    elif kind == "a pipe":
        os.mkfifo(thing)
    elif kind == "a folder":
        thing.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(thing))


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a folder", "a socket"])
def test_what_is_no_regular_file_is_neither_read_nor_opened(
    run: Path, victim: Path, kind: str
) -> None:
    strange(run, kind, victim)
    with Folder.open(run) as folder:
        with pytest.raises(NotPlain, match=f"it is {kind}, not a file") as raised:
            folder.read("thing", 100)
        assert raised.value.filename == str(run / "thing")
        for flags in (os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND):
            with pytest.raises(NotPlain):
                folder.descriptor_of("thing", flags)
        assert not folder.has_file("thing")
    assert victim.read_text() == "precious"


def test_writing_replaces_a_link_itself_and_not_what_it_points_to(run: Path, victim: Path) -> None:
    (run / "thing").symlink_to(victim)
    files.write(run / "thing", b"new")
    assert victim.read_text() == "precious"
    assert (run / "thing").read_bytes() == b"new" and not (run / "thing").is_symlink()


def test_a_folder_is_never_entered_over_a_link(run: Path, tmp_path: Path, victim: Path) -> None:
    (run / "inner").symlink_to(tmp_path)
    with Folder.open(run) as folder:
        for act in (lambda: folder.folder("inner"), lambda: folder.folder("inner", create=True)):
            with pytest.raises(NotPlain, match="it is a link, not a folder"):
                act()
        with pytest.raises(NotPlain):
            folder.remove_folder("inner")
        assert not folder.has_folder("inner")
    assert victim.exists()


def test_the_directory_that_the_user_names_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(run)
    files.write(tmp_path / "short" / "a", b"1")
    assert (run / "a").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["", ".", "..", "../victim", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_stays_in_its_folder(run: Path, name: str) -> None:
    with Folder.open(run) as folder, pytest.raises(OSError, match="not a name in a folder"):
        folder.read(name, 100)


def test_removing_a_folder_removes_links_and_not_what_they_point_to(
    run: Path, victim: Path, tmp_path: Path
) -> None:
    inner = run / "inner" / "deep"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    (inner / "to_file").symlink_to(victim)
    (inner / "to_folder").symlink_to(tmp_path)
    os.mkfifo(inner / "pipe")
    with Folder.open(run) as folder:
        folder.remove_folder("inner")
        folder.remove_folder("inner")
    assert list(run.iterdir()) == [] and victim.read_text() == "precious"


def test_what_is_read_is_bounded(run: Path) -> None:
    (run / "small").write_bytes(b"12345")
    with (run / "huge").open("wb") as file:
        file.truncate(1 << 40)
    assert files.read(run / "small", 5) == b"12345"
    for name, limit in (("small", 4), ("huge", 1 << 20)):
        with pytest.raises(OSError, match="are not read"):
            files.read(run / name, limit)


def test_a_write_that_fails_leaves_what_was_there_and_no_litter(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(run / "a", b"old")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            files.write(run / "a", b"new")
    assert (run / "a").read_bytes() == b"old" and os.listdir(run) == ["a"]


def test_nobody_can_guess_a_temporary_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = Folder.rename

    def rename(folder: Folder, old: str, new: str) -> None:
        seen.append(old)
        original(folder, old, new)

    monkeypatch.setattr(Folder, "rename", rename)
    for _ in range(2):
        files.write(run / "a", b"x")
    assert len(set(seen)) == 2 and all(len(name) > 20 for name in seen)


def test_litter_of_a_killed_process_goes_and_what_may_be_in_use_stays(run: Path) -> None:
    old = f".a.{'0' * 16}.tmp"
    young = f".b.{'1' * 16}.tmp"
    other = ".mine.tmp"
    for name in (old, young, other):
        (run / name).write_text("x")
    for name in (old, other):
        os.utime(run / name, (0, 0))
    with Folder.open(run) as folder:
        folder.remove_litter()
    assert sorted(os.listdir(run)) == sorted([young, other])


def test_files_have_the_usual_rights(run: Path) -> None:
    files.write(run / "a", b"x")
    assert stat.S_IMODE((run / "a").stat().st_mode) & ~0o644 == 0


@pytest.mark.long
def test_what_is_read_takes_the_memory_that_it_has_bytes_and_not_its_limit(run: Path) -> None:
    """As under `ulimit -v`, or on a machine that has less memory than a file may have."""
    (run / "thing").write_bytes(b"precious")
    code = (
        "import resource, runpy, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "print(runpy.run_path(sys.argv[1])['read'](Path(sys.argv[2]), 1 << 34))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, files.__file__, str(run / "thing")],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "b'precious'\n", done.stderr


def test_lines_are_read_in_pieces_and_one_that_is_too_long_is_the_last(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 7)
    monkeypatch.setattr(files, "LINE", 20)
    text = b"one\n\ntwo, which is longer\ntorn"
    (run / "thing").write_bytes(text)
    with Folder.open(run) as folder:
        assert b"".join(folder.pieces("thing", 100)) == text
        assert list(folder.lines("thing", 100)) == [
            b"one\n",
            b"\n",
            b"two, which is longer\n",
            b"torn",
        ]
        with pytest.raises(OSError, match="30 bytes; more than 29 are not read"):
            list(folder.lines("thing", 29))
        (run / "thing").write_bytes(b"one\n" + b"x" * 50 + b"\ntwo\n")
        assert list(folder.lines("thing", 100)) == [b"one\n", b"x" * 24]


def test_a_folder_that_nobody_holds_any_more_is_closed(tmp_path: Path) -> None:
    """The folder of a run that is over: a sweep of many runs in one process opens no file more."""
    folder = Folder.open(tmp_path)
    descriptor = folder.descriptor
    assert os.path.samestat(os.fstat(descriptor), tmp_path.stat())
    del folder
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_folder_is_listed_whole_after_a_forked_process_is_killed_while_it_lists(
    run: Path,
) -> None:
    expected = [f"{number:05d}.bin" for number in range(12)]
    for name in expected:
        (run / name).touch()
    with Folder.open(run) as folder:
        if (child := os.fork()) == 0:

            def killed(place: int) -> list[str]:
                entries = os.scandir(place)
                next(entries)
                os._exit(0)  # before the place in the directory is the first again

            os.listdir = killed  # type: ignore[assignment]
            folder.names()
        os.waitpid(child, 0)
        assert folder.names() == expected
