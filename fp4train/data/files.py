"""The files that a path of the user's means, and the text in them; errors suggest the near miss."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp4train.data.tokens import Piece
from fp4train.errors import DataError, data_errors, reason
from fp4train.text import nearest

PIECE_CHARACTERS = 1 << 16


def expanded(path: str, key: str) -> Path:
    """`path` with ~ and ~somebody written out."""
    with data_errors(RuntimeError, before=f"{key}={path} does not exist: "):  # somebody who is not there
        return Path(path).expanduser()


def existing_path(path: str, key: str) -> Path:
    """`path` if it exists; otherwise an error that names the closest thing there is."""
    found = expanded(path, key)
    with data_errors(OSError, before=f"{key}={path} cannot be read: ", message=reason):
        if found.exists():
            return found
    parent = found.absolute().parent
    while not parent.is_dir():
        parent = parent.parent
    wanted = found.absolute().relative_to(parent).parts[0]
    try:
        there = sorted(os.listdir(parent))
    except OSError:
        there = []
    suffix = Path(wanted).suffix  # names that share no more than it are not alike
    alike = {name.removesuffix(suffix): name for name in there if name.endswith(suffix)}
    others = [name for name in there if not name.endswith(suffix)]
    near = alike.get(nearest(wanted.removesuffix(suffix), alike) or "") or nearest(wanted, others)
    hint = f" Did you mean {parent / near}?" if near else f" {parent} holds no {wanted}."
    raise DataError(f"{key}={path} does not exist.{hint}")


def files_of(path: Path, suffixes: Sequence[str], key: str) -> list[Path]:
    """`path` itself if it is a file, or the files below it with one of `suffixes`, sorted; none of them empty.

    Hidden files and folders are passed over, links to folders are not followed.
    """
    if path.is_file():
        if not path.stat().st_size:
            raise DataError(f"{key}={path} is empty")
        return [path]
    found: list[Path] = []
    others: Counter[str] = Counter()
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if not name.startswith(".")]
        for file in (Path(folder, file) for file in files if not file.startswith(".")):
            if file.suffix.lower() in suffixes:
                found.append(file)
            else:
                others[file.suffix.lower() or "no suffix"] += 1
    if not found:
        there = ", ".join(f"{count} with {suffix}" for suffix, count in others.most_common(5)) or "no files at all"
        raise DataError(f"{key}={path} holds no file with one of the suffixes {', '.join(suffixes)}; it holds {there}")
    filled = sorted(file for file in found if file.stat().st_size)
    if not filled:
        raise DataError(f"{key}={path}: every file in it with one of the suffixes {', '.join(suffixes)} is empty")
    return filled


def stamp(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file: what tokenised data is known by without reading the files again."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def read_pieces(path: Path) -> Iterator[Piece]:
    """The pieces of a UTF-8 text file. Newlines stay as they are; an empty file has none."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)
            while text:
                if "\0" in text:
                    raise DataError(f"{path} holds NUL characters: binary data, not text. Leave it out of data.path.")
                following = file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)
                yield Piece(text, ends_document=not following)
                text = following
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason}, byte {error.object[error.start] if error.object else 0:#04x}). "
            "Convert it (iconv -t utf-8) or leave it out of data.path."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
