"""Documents as pieces of text, so that neither a huge file nor a huge folder need fit into memory.

A piece holds whole lines of one document; the piece that ends its document says so. Tokens are those of the pieces, one
after another, with the tokenizer's end-of-document id after the last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp4train.errors import DataError

PIECE_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one document, and whether the document ends with it."""

    text: str
    ends_document: bool = True


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


def read_files(paths: Iterable[Path]) -> Iterator[Piece]:
    """The documents in `paths`, one a file, in that order."""
    for path in paths:
        yield from read_pieces(path)
