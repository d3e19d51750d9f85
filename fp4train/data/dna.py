"""`data=dna data.path=FILE_OR_FOLDER`: DNA or RNA in FASTA files, plain or gzip; a record is a
document.

The bases are letters of the IUPAC code (Cornish-Bowden 1985); `-` is a gap. Validation never shares
a base with training: the held-out records, or the last part of all bases, are set apart before
reverse complements are made, which only training has.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

from fp4train.data.cache import CacheEntry
from fp4train.data.compressed import unpacked
from fp4train.data.files import PIECE_CHARACTERS, input_files, shown, stamp
from fp4train.data.source import TextSource, entry_of
from fp4train.data.tokens import Documents, Piece, TokenData, Tokenizer, token_data
from fp4train.errors import DataError
from fp4train.paths import CacheFolder, DataPaths
from fp4train.text import check_choice, near_miss, shortened

SUFFIXES = (".fa", ".fasta", ".fna", ".ffn", ".frn", ".fas", ".gz")
BASES = "ACGTURYSWKMBDHVN-"
PAIRED = "TGCAAYRSWMKVHDBN-"
"""Complement of each of `BASES` in DNA; in RNA, A pairs with U."""
_COMPLEMENT = str.maketrans(BASES + BASES.lower(), PAIRED + PAIRED.lower())
_COMPLEMENT_OF_RNA = _COMPLEMENT | str.maketrans("Aa", "Uu")
_NEITHER_BASE_NOR_SPACE = re.compile(rf"[^\s{re.escape(BASES + BASES.lower())}]")
_UNKNOWN = re.compile("[Nn]+")
CASES = ("upper", "keep")
UNKNOWN_BASES = ("keep", "split")


@dataclass(frozen=True, kw_only=True)
class Dna(TextSource):
    """FASTA files.

    Args:
        path: a file, or a folder, whose files with a suffix of FASTA, or `.gz`, are read in the
            order of their names; a pattern; or several of these.
        case: `upper`: lower case, by which assemblies mark repeats, is not kept. `keep`: it is.
        unknown: `split`: a document ends where bases are unknown (N), and these are left out.
            `keep`: N is a letter.
        reverse_complement: whether training also reads the other strand, a document after each
            document.
        held_out: names of records (the first word after `>`) that validation has; none: the last
            `val` of all bases.
        val: held out where `held_out` names no record: a share below 1, or a number of bases.
    """

    path: DataPaths
    case: str = "upper"
    unknown: str = "keep"
    reverse_complement: bool = False
    held_out: Sequence[str] = ()
    cache_dir: CacheFolder = "~/.cache/fp4train"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("data.case", self.case, CASES)
        check_choice("data.unknown", self.unknown, UNKNOWN_BASES)
        if isinstance(self.held_out, str):
            raise ValueError(
                f"data.held_out={self.held_out}: a list of records is needed, "
                f"data.held_out=[{self.held_out}]"
            )

    def corpus(self, run_dir: Path) -> "_Records":
        return _Records(self, input_files(self.path, SUFFIXES, "data.path"))


class _Records:
    """The documents of both parts; a tokenizer is trained on those of training.

    Args:
        paths: the files.
    """

    def __init__(self, settings: Dna, paths: Sequence[Path]) -> None:
        self.settings = settings
        self.paths = paths

    @property
    def documents(self) -> Documents:
        return self.training

    def entries(self, tokenizer: Tokenizer, seq_len: int) -> Sequence[CacheEntry]:
        settings = self.settings
        key = {
            "source": "dna",
            "files": stamp(self.paths),
            "settings": [
                settings.case,
                settings.unknown,
                settings.reverse_complement,
                settings.val,
                *settings.held_out,
            ],
        }
        parts: tuple[tuple[str, Documents], ...] = (
            ("train", self.training),
            ("val", self.validation),
        )
        return [
            entry_of(documents, tokenizer, settings.cache_dir, {**key, "part": part})
            for part, documents in parts
        ]

    def tokens(self, tokenizer: Tokenizer, seq_len: int) -> TokenData:
        settings = self.settings
        train, val = (entry.ids() for entry in self.entries(tokenizer, seq_len))
        if settings.held_out:
            rule = f"data.held_out=[{','.join(settings.held_out)}]"
        else:
            rule = f"data.val={settings.val:g}"
        named = shown(settings.path)
        if settings.unknown == "split" and not len(train):
            raise DataError(
                f"data.unknown=split leaves nothing of {named} to train on: all bases that "
                f"{rule} does not hold out are unknown (N). data.unknown=keep reads N as a letter"
            )
        count = len(self.paths)
        return token_data(
            train,
            val,
            vocab_size=tokenizer.vocab_size,
            seq_len=seq_len,
            tokenizer=tokenizer,
            description=f"{named}, {count} file{'s' if count > 1 else ''}",
            whole=f"{rule} is held out",
        )

    def training(self) -> Iterator[Piece]:
        for bases in self._chosen(held_out=False):
            strand: list[str] = []
            for piece in pieces(bases, split=self.settings.unknown == "split"):
                yield piece
                if self.settings.reverse_complement:
                    strand.append(piece.text)
                    if piece.ends_document:
                        other = other_strand("".join(strand))
                        strand.clear()
                        parts = range(0, len(other), PIECE_CHARACTERS)
                        yield from pieces(
                            (other[i : i + PIECE_CHARACTERS] for i in parts), split=False
                        )

    def validation(self) -> Iterator[Piece]:
        for bases in self._chosen(held_out=True):
            yield from pieces(bases, split=self.settings.unknown == "split")

    def _chosen(self, *, held_out: bool) -> Iterator[Iterator[str]]:
        """The bases of each record, or of its part, that training has, or validation."""
        for number, (_, bases) in enumerate(self._all()):
            count = self._training_bases[number]
            yield _cut(bases, count, held_out=held_out)

    @cached_property
    def _training_bases(self) -> list[int]:
        """How many bases of each record training has; the rest are held out. The files are read for
        it.
        """
        names: list[str] = []
        counts: list[int] = []
        for name, bases in self._all():
            names.append(name)
            counts.append(sum(map(len, bases)))
        if held_out := self.settings.held_out:
            for name in held_out:
                if name not in names:
                    raise DataError(
                        f"data.held_out: {shown(self.settings.path)} has no record "
                        f"{name!r}{near_miss(name, names)}"
                    )
            return [
                0 if name in held_out else count for name, count in zip(names, counts, strict=True)
            ]
        total = sum(counts)
        val = self.settings.val
        training = total - int(total * val if val < 1 else val)
        return [
            min(max(training - end + count, 0), count)
            for end, count in zip(accumulate(counts), counts, strict=True)
        ]

    def _all(self) -> Iterator[tuple[str, Iterator[str]]]:
        for path in self.paths:
            yield from read_records(path, upper=self.settings.case == "upper")


def _cut(bases: Iterator[str], count: int, *, held_out: bool) -> Iterator[str]:
    """The first `count` bases, or those that are held out after them."""
    seen = 0
    for text in bases:
        border = min(max(count - seen, 0), len(text))
        if kept := text[border:] if held_out else text[:border]:
            yield kept
        seen += len(text)


def other_strand(bases: str) -> str:
    """The reverse complement; of RNA, which U tells, it is RNA."""
    rna = "U" in bases or "u" in bases
    return bases.translate(_COMPLEMENT_OF_RNA if rna else _COMPLEMENT)[::-1]


def pieces(texts: Iterator[str], *, split: bool) -> Iterator[Piece]:
    """The pieces of one record; with `split` of a document for each part between unknown bases."""
    waiting = ""
    for text in texts:
        parts = _UNKNOWN.split(text) if split else [text]
        for number, part in enumerate(parts):
            if number and waiting:
                yield Piece(waiting)
                waiting = ""
            if part and waiting:
                yield Piece(waiting, ends_document=False)
            waiting = part or waiting
    if waiting:
        yield Piece(waiting)


def read_records(path: Path, *, upper: bool) -> Iterator[tuple[str, Iterator[str]]]:
    """Name and bases of each record of a FASTA file; the bases in texts of about
    `PIECE_CHARACTERS`.

    The bases of a record must be read before the next record is.

    Raises:
        DataError: the file is no FASTA of nucleic acids; with the line.
    """
    for (number, header), lines in groupby(_with_headers(path), key=itemgetter(0)):
        words = header[1:].split(maxsplit=1)
        if not words:
            raise DataError(f"{path}, line {number}: the record has no name after >")
        yield words[0], _bases(path, lines, upper=upper)


def _lines(path: Path) -> Iterator[str]:
    try:
        with unpacked(path) as stream, io.TextIOWrapper(stream, encoding="ascii") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no FASTA file: it holds the byte {error.object[error.start]:#04x}"
        ) from error


RecordHeader = tuple[int, str]
"""The line that begins a record, and its number."""


def _with_headers(path: Path) -> Iterator[tuple[RecordHeader, int, str]]:
    """The lines of a file and their numbers, each with the header of its record; that is a line of
    it, too.
    """
    header: RecordHeader | None = None
    for number, line in enumerate(_lines(path), 1):
        if line.startswith(">"):
            header = number, line
        elif line.startswith(";"):
            continue
        elif header is None and line.strip():
            raise DataError(
                f"{path}, line {number}: a record of FASTA begins with > and its name, "
                f"not {line[:20]!r}"
            )
        if header is not None:
            yield header, number, line
    if header is None:
        raise DataError(f"{path} holds no record of FASTA, which begins with > and its name")


def _bases(
    path: Path, lines: Iterator[tuple[RecordHeader, int, str]], *, upper: bool
) -> Iterator[str]:
    """The bases of the lines of one record."""
    _, header_number, header = next(lines)
    texts = []
    length = 0
    empty = True
    for _, number, text in lines:
        if strange := _NEITHER_BASE_NOR_SPACE.search(text):
            raise DataError(
                f"{path}, line {number}: {strange[0]!r} is no base of DNA or RNA "
                f"(IUPAC: {BASES}). A FASTA file of proteins, or of something else, is read "
                "by data=text"
            )
        if bases := "".join(text.split()):
            texts.append(bases.upper() if upper else bases)
            length += len(bases)
            empty = False
        if length >= PIECE_CHARACTERS:
            yield "".join(texts)
            texts = []
            length = 0
    if empty:
        raise DataError(
            f"{path}, line {header_number}: the record "
            f"{shortened(header[1:].strip(), 60)!r} has no bases"
        )
    if texts:
        yield "".join(texts)
