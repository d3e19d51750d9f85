"""The files that a path of the user's means, and the text in them; errors suggest the near miss."""

import glob
import io
import logging
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

from fp4train.data.compressed import plain_name, unpacked
from fp4train.data.containers import HEAD, TAIL, container
from fp4train.data.stored import Stamp, stamp_of
from fp4train.data.tokens import Piece
from fp4train.errors import DataError, check_local, data_errors, reason
from fp4train.stores import StorePath
from fp4train.text import counted, first_few, nearest

PIECE_CHARACTERS = 1 << 16
ON_STORES = ("data.path", "data.val_path")
"""Keys whose files may lie on an object store."""

_log = logging.getLogger(__name__)


def expanded(path: str, key: str) -> Path:
    """`path` with ~ and ~somebody written out; of data it may lie on a store.

    Raises:
        DataError: it is empty, as an unset variable of a shell leaves it, lies in another storage,
            or there is no such user.
    """
    if not path.strip():
        raise DataError(f"{key}= is empty: give a path; . is the working directory")
    check_local(path, key, stores=key in ON_STORES)
    path = path.removeprefix("file://")
    # somebody who is not there
    with data_errors(RuntimeError, before=f"{key}={path} does not exist: "):
        return (StorePath if "://" in path else Path)(path).expanduser()


def existing_path(path: str, key: str) -> Path:
    """`path` if it exists; otherwise an error that names the closest thing there is."""
    place = expanded(path, key)
    with data_errors(OSError, before=f"{key}={path} cannot be read: ", message=reason):
        if place.exists():
            return place
    if isinstance(place, StorePath):
        raise DataError(f"{key}={path} does not exist: the store has no object that begins so")
    parent = place.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    missing = place.absolute().relative_to(parent).parts[0]
    try:
        there = sorted(os.listdir(parent))
    except OSError:
        there = []
    alike = {Path(name).stem: name for name in there}  # a common suffix makes no names alike
    near = alike.get(nearest(Path(missing).stem, alike) or "")
    if near:
        hint = f" Did you mean {parent / near}?"
    else:
        hint = f" {parent} holds no {missing}."
    raise DataError(f"{key}={path} does not exist.{hint}")


def input_files(paths: str | Sequence[str], suffixes: Sequence[str], key: str) -> list[Path]:
    """The files that `paths` mean, in order: each is a file, a folder (`files_of`) or a pattern (*,
    ?, [), whose matches are sorted; none of them empty.

    Raises:
        DataError: one means nothing, or nothing that is data; or two mean the same file.
    """
    if isinstance(paths, str):
        paths = (paths,)
    inputs: list[Path] = []
    for path in paths:
        files = files_of(path, suffixes, key)
        if (folder := expanded(path, key)).is_dir():
            _refuse_parts(folder, files, key)
        inputs += files
    if not inputs:
        raise DataError(f"{key}=[] names no file")
    seen: dict[str, Path] = {}
    for file in inputs:
        same = seen.setdefault(os.path.realpath(file), file)
        if same is not file:
            raise DataError(
                f"{key} names {file} twice: what is held out for validation would be trained on"
            )
    _refuse_copies(inputs, key)
    return inputs


def shown(paths: str | Sequence[str]) -> str:
    """Paths as they are typed: one alone, several as [a,b]."""
    if isinstance(paths, str):
        return paths
    return f"[{','.join(paths)}]"


def _refuse_copies(inputs: Sequence[Path], key: str) -> None:
    """Refuse a file beside a compressed one of the same name: one is most likely a copy of the
    other.
    """
    by_name: dict[Path, Path] = {}
    for file in inputs:
        other = by_name.setdefault(file.with_name(plain_name(file)), file)
        if other is not file:
            raise DataError(
                f"{key}: {file} and {other} have one name: what is held out for validation "
                "would be trained on. Remove one, or name the files that are meant"
            )


def files_of(path: str, suffixes: Sequence[str], key: str) -> list[Path]:
    """The files that one path means, sorted; none of them empty.

    A pattern means its matches, unless there is a file of that very name; a folder the files below
    it with one of `suffixes`, which .gz or .zst may follow. Hidden files and folders are passed
    over, and so are run directories that the path does not name: a run that reads the folder in
    which it is written would change its own data. Links to folders are not followed.

    Raises:
        DataError: it means nothing, or nothing that is data.
    """
    place = expanded(path, key)
    is_pattern = glob.has_magic(str(place)) and not os.path.lexists(place)
    if is_pattern:
        matches = sorted(
            place.listed("glob")
            if isinstance(place, StorePath)
            else map(Path, glob.glob(str(place), recursive=True))
        )
        place = Path(*takewhile(lambda part: not glob.has_magic(part), place.parts))
    else:
        matches = [existing_path(path, key)]
    if not matches:
        raise DataError(f"{key}={path} matches nothing{_listing(place)}")
    inputs, others = _with_suffixes(matches, suffixes, key)
    if not inputs:
        there = [f"{count} with {suffix}" for suffix, count in others.most_common(5)]
        raise DataError(
            f"{key}={path} holds no file with one of the suffixes {', '.join(suffixes)}; it "
            f"holds {', '.join(there) or 'no files at all'}"
        )
    of_data = _outside_of_runs(inputs, place, key)
    if not of_data:
        raise DataError(
            f"{key}={path}: all of its files lie in run directories, which are left out: name the "
            "files"
        )
    filled = [file for file in of_data if _size(file, key)]
    if not filled:
        what = " is empty" if of_data == [place] else ": each of its files is empty"
        raise DataError(f"{key}={path}{what}")
    if isinstance(filled[0], StorePath):
        _log.info("%s=%s: its objects are known by %s", key, path, filled[0].known_by)
    return filled


def _listing(folder: Path) -> str:
    """What a folder holds, for the end of a message."""
    if not folder.is_dir():
        return ""
    return f"; {folder} holds {first_few(sorted(os.listdir(folder)), 5) or 'nothing'}"


def _with_suffixes(
    matches: Sequence[Path], suffixes: Sequence[str], key: str
) -> tuple[list[Path], Counter[str]]:
    """Files, with those below folders that have one of `suffixes`; how many have another."""
    inputs: list[Path] = []
    others: Counter[str] = Counter()

    def refuse(error: OSError) -> None:
        if Path(str(error.filename)).name != "lost+found":
            raise DataError(f"{key}: {error.filename} cannot be read: {error.strerror}") from error

    for match in matches:
        if not match.is_dir():
            inputs.append(match)
            continue
        below: list[Path] = []
        versions: dict[str, str] = {}
        if isinstance(match, StorePath):
            below += [file for file in match.listed("find") if "/." not in str(file)]
        for folder, names, files in () if below else os.walk(match, onerror=refuse):
            names[:] = [name for name in names if not name.startswith(".")]
            if _OF_DATASETS in files:
                files = _once(folder, files, versions, key)
            below += [Path(folder, file) for file in files if not file.startswith(".")]
        for file in sorted(below):
            suffix = file.suffix.lower()
            if suffix in suffixes or Path(plain_name(file)).suffix in suffixes:
                inputs.append(file)
            else:
                others[suffix or "no suffix"] += 1
    return inputs, others


def _once(folder: str, files: Sequence[str], versions: dict[str, str], key: str) -> list[str]:
    """The data files of a folder of `datasets` without those that it computed from the others.

    Args:
        versions: parent → the folder of the cache that was seen there.

    Raises:
        DataError: the cache has its data set in another folder, too, of another revision.
    """
    other = versions.setdefault(os.path.dirname(folder), folder)
    if other != folder and "state.json" not in files:
        raise DataError(f"{key}: {other} and {folder} hold one data set twice: name one of them")
    data = [file for file in files if not (file.startswith("cache-") and file.endswith(".arrow"))]
    if len(data) < len(files):
        text = "%s: what `datasets` computed from other files of %s is left out (%s)"
        _log.info(text, key, folder, counted(len(files) - len(data), "file"))
    return [file for file in data if file != _OF_DATASETS]


def _outside_of_runs(files: Sequence[Path], place: Path, key: str) -> list[Path]:
    """The files without those of run directories below `place`."""

    @cache
    def run_of(folder: Path) -> Path | None:
        if place not in folder.parents:
            return None
        return folder if _is_run(folder) else run_of(folder.parent)

    outside = [file for file in files if run_of(file.parent) is None]
    if runs := {run for file in files if (run := run_of(file.parent)) is not None}:
        _log.info(
            "%s: run directories are left out (%s)", key, first_few(sorted(map(str, runs)), 3)
        )
    return outside


_OF_DATASETS = "dataset_info.json"
"""The file of every folder that `datasets` made."""
_HISTORY = "history.jsonl"
_CONFIG = "config.yaml"
_FIRST_LINE = b"# fp4train run "
"""The files that every run directory has, and how its configuration begins
(`run/record/trust.py`).
"""


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    try:
        if not (folder / _HISTORY).is_file():
            return False
        with (folder / _CONFIG).open("rb") as file:
            return file.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:
        return False


def _refuse_parts(folder: Path, files: Sequence[Path], key: str) -> None:
    """Refuse a folder with files for training and for something else by their names, as the hub,
    llm.c and nanoGPT have them.
    """
    if len(files) < 2:
        return
    parts = {file: _part(file.relative_to(folder)) for file in files}
    train = next((file for file, part in parts.items() if part in _TRAINING), None)
    other = next((file for file, part in parts.items() if part in _HELD_OUT), None)
    if train is None or other is None:
        return
    raise DataError(
        f"{key}={folder} holds files for training and for {_HELD_OUT[parts[other]]} "
        f"({train.relative_to(folder)}, {other.relative_to(folder)}), which would be one "
        "text. Name those that are "
        f"meant: {key}={shlex.quote(_pattern(folder, train, parts[train]))}"
    )


def _part(name: Path) -> str:
    """The part of a data set that a file's name, or a folder of it, says; empty: it says none."""
    if name.suffix in (".py", ".ipynb"):  # a train.py trains, and a test.py tests
        return ""
    for part in (*name.parts[:-1], plain_name(name)):
        for word in _words(part):
            if word in _TRAINING or word in _HELD_OUT:
                return word
    return ""


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z]+", name.lower())


def _pattern(folder: Path, file: Path, part: str) -> str:
    """What names the files of a part: the folder of that name, or a pattern."""
    name = file.relative_to(folder)
    for number, parent in enumerate(name.parts[:-1], start=1):
        if part in _words(parent):
            return str(folder.joinpath(*name.parts[:number]))
    return str(file.parent / f"*{part}*")


_TRAINING = ("train", "training")
_HELD_OUT = {
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    **dict.fromkeys(("test", "testing"), "a test"),
}


def _size(path: Path, key: str) -> int:
    """The bytes of a regular file.

    Raises:
        DataError: it is something else, which has no end or cannot be read twice, or it is not
            there.
    """
    with data_errors(OSError, before=f"{key}={path} cannot be read: ", message=reason):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{key}={path} is no regular file, and data is read more than once: write it to one first"
        )
    return status.st_size


def stamp(paths: Sequence[Path]) -> list[tuple[str, Stamp]]:
    """Name and stamp of each file: what tokenised data is known by without reading the files
    again.
    """
    with data_errors(
        OSError, message=lambda error: f"{error.filename} cannot be read: {error.strerror}"
    ):
        return [(str(path.resolve()), stamp_of(path.stat())) for path in paths]


def read_pieces(path: Path) -> Iterator[Piece]:
    """The pieces of a UTF-8 text file, plain or compressed. Newlines stay as they are; an empty
    file has none.
    """
    line = 1
    try:
        with (
            unpacked(path) as stream,
            io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as file,
        ):
            text = file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)
            while text:
                if "\0" in text:
                    line += text.count("\n", 0, text.index("\0"))
                    raise DataError(
                        f"{path}, line {line}: it holds a NUL character: binary data, not "
                        "text. Leave the file out"
                    )
                line += text.count("\n")
                following = file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)
                yield Piece(text, ends_document=not following)
                text = following
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, after line {line}: it is not UTF-8 text ({error.reason}, byte "
            f"{error.object[error.start] if error.object else 0:#04x}). Convert the file "
            "(iconv -t utf-8) or leave it "
            "out"
        ) from error


def container_of(path: Path) -> str | None:
    """What kind of container a file is, in words that follow "is"; None: none that is known.

    Raises:
        DataError: it cannot be read.
    """
    with (
        data_errors(OSError, before=f"{path} cannot be read: ", message=reason),
        path.open("rb") as file,
    ):
        head = file.read(HEAD)
        size = file.seek(0, os.SEEK_END)
        file.seek(-min(TAIL, size), os.SEEK_END)
        kind = container(head, file.read())
    if kind is None and head.startswith(b"PAR1") and path.suffix.lower() == ".parquet":
        return "a Parquet file"  # a damaged one, which its reader says
    return kind
