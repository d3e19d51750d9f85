"""`data=hf`: a data set of the Hugging Face hub (`data.name=…`), or local files of records
(`data.path=…`).

`datasets` streams the rows of the hub in their stored order; local files are read here
(`records.py`). A row's text is a document. They are tokenised once into the cache, up to
`max_tokens`. The library's own shuffle is not used: its buffer cannot be resumed exactly. The
loader shuffles.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.data.compressed import plain_name
from fp4train.data.files import expanded, input_files, shown, stamp
from fp4train.data.parts import SHARD, CorpusPart, joined_parts
from fp4train.data.records import read_records, stretches
from fp4train.data.source import Texts, TextSource, Workers, check_workers
from fp4train.data.tables import ALL, FileStretch, OtherFile
from fp4train.data.tokens import Piece
from fp4train.errors import DataError, data_errors, reason
from fp4train.paths import CacheFolder, DataPaths, PathOrHubName
from fp4train.text import first_line

SUFFIXES = (".parquet", ".jsonl", ".json", ".ndjson", ".arrow")
STATE_LIMIT = 1 << 22
_HALF = re.compile("[\ud800-\udfff]")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HuggingFace(TextSource):
    """Rows of `name` (a hub data set) or of `path` (local files), whose `column` holds the text."""

    name: PathOrHubName | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    path: DataPaths | None = None
    column: str = "text"
    max_tokens: int | None = 200_000_000
    max_documents: int | None = None
    val: float = 0.01
    cache_dir: CacheFolder = "~/.cache/fp4train"
    workers: Workers = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_workers(self.workers)
        if (self.name is None) == (self.path is None):
            raise ValueError(
                f"data.name={self.name}, data.path={self.path}: exactly one is needed, "
                "a hub name or a .parquet, .jsonl file or folder"
            )
        hub = {
            "config": self.config,
            "revision": self.revision,
            "split": None if self.split == "train" else self.split,
        }
        if self.path is not None and (
            keys_given := [key for key, value in hub.items() if value is not None]
        ):
            raise ValueError(
                f"data.{keys_given[0]}={hub[keys_given[0]]}: local files (data.path) have no "
                f"{keys_given[0]}, a hub data set has (data.name); give the files of that part "
                "as data.path"
            )
        for key, bound in (("max_tokens", self.max_tokens), ("max_documents", self.max_documents)):
            if bound is not None and bound < 1:
                raise ValueError(
                    f"data.{key}={bound}: allowed are whole numbers from 1, or null for no bound"
                )

    def corpus(self, run_dir: Path) -> Texts:
        parts = None
        if self.path is None:
            named = {
                "path": self.name,
                "name": self.config,
                "split": self.split,
                "revision": self.revision,
            }
            key: list[Any] = ["hub", *named.values()]
            what = " ".join(str(part) for part in (self.name, self.config, self.split) if part)
        else:
            paths = local_files(self.path)
            key = ["files", *stamp(paths)]
            what = shown(self.path)
            if self.max_documents is None:
                parts = partial(_parts, paths, self.column, self.path)

        def documents() -> Iterator[Piece]:
            if self.path is None:
                rows = read_hub(named, self.column, what)
            else:
                rows = read_rows(paths, self.column, self.path)
            return islice(rows, self.max_documents)

        return Texts(
            documents=documents,
            val=self.val,
            description=what,
            cache_dir=self.cache_dir,
            key={"source": key, "column": self.column, "max_documents": self.max_documents},
            parts=parts,
            workers=self.workers,
            max_tokens=self.max_tokens,
            if_empty=_empty(self.path, self.column) if self.path else "",
        )


def local_files(path: str | Sequence[str]) -> list[Path]:
    """The files that hold the records of `data.path` (`record_files`), none with the suffix of
    something else.
    """
    paths = record_files(path)
    for file in paths:
        if Path(plain_name(file)).suffix not in SUFFIXES and file.suffix.lower() not in (
            "",
            ".gz",
            ".zst",
        ):
            raise DataError(
                f"data.path={file} holds {file.suffix}: data=hf reads .parquet, .arrow, or "
                ".jsonl and .json "
                "(text is for data=text, token files are for data=tokens)"
            )
    return paths


def record_files(path: str | Sequence[str]) -> list[Path]:
    """The files that `data.path` means, whatever their suffixes; of a folder that `datasets` saved,
    those that it lists.
    """
    named: list[str] = []
    for place in (path,) if isinstance(path, str) else path:
        named += saved_files(expanded(place, "data.path")) or [place]
    return input_files(named, SUFFIXES, "data.path")


def saved_files(folder: Path) -> list[str]:
    """The files that `Dataset.save_to_disk` wrote to a folder, in order; none: it did not."""
    if folder.is_file():
        return []
    parts = folder / "dataset_dict.json"
    if parts.is_file():
        names = ", ".join(sorted(entry.name for entry in folder.iterdir() if entry.is_dir()))
        raise DataError(
            f"data.path={folder} holds a data set in parts: {names}. Name one, "
            f"data.path={folder}/train"
        )
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return []
    strange = (OSError, ValueError, KeyError, TypeError, RecursionError)
    with data_errors(*strange, before=f"{folder / 'state.json'} cannot be read: ", message=reason):
        entries = json.loads(files.read(folder / "state.json", STATE_LIMIT))["_data_files"]
        return [str(folder / Path(str(entry["filename"])).name) for entry in entries]


def read_rows(paths: Sequence[Path], column: str, named: str | Sequence[str]) -> Iterator[Piece]:
    """The text of each record of local files, one document per record; records without text are
    passed over.

    A .json file that lies beside others and whose first record has no text in the column is passed
    over with a warning: statistics, settings, a description.

    Args:
        named: paths that the user names; a file that is named itself is not passed over.
    """
    empty = True
    for path in paths:
        for piece in _read_file(path, column, beside=_is_beside(path, paths, named)):
            empty = False
            yield piece
    if empty:
        raise DataError(_empty(named, column))


def _empty(named: str | Sequence[str], column: str) -> str:
    return f"data.path={shown(named)}: no record has text in data.column={column}"


def _is_beside(path: Path, paths: Sequence[Path], named: str | Sequence[str]) -> bool:
    """Whether a file may hold something else than records, and is passed over then."""
    explicit = {named} if isinstance(named, str) else set(named)
    other = len(paths) > 1 and str(path) not in explicit
    return other and Path(plain_name(path)).suffix == ".json"


def _parts(paths: Sequence[Path], column: str, named: str | Sequence[str]) -> list[CorpusPart]:
    """The records of files in parts that are read apart."""
    small = []
    for path in paths:
        if _is_beside(path, paths, named):
            read = partial(_read_file, path, column, beside=True)
            small.append(CorpusPart(path.stat().st_size, (read,)))
            continue
        for size, stretch in stretches(path, column, SHARD):
            read = partial(_read_file, path, column, stretch)
            small.append(CorpusPart(size, (read,)))
    return joined_parts(small)


def _read_file(
    path: Path, column: str, stretch: FileStretch = ALL, *, beside: bool = False
) -> Iterator[Piece]:
    """The text of each record of a file, or of a stretch of it; see `read_rows`.

    Args:
        beside: whether the file is passed over where it holds something else.
    """
    rows = read_records(path, column, stretch)
    try:
        first_row = next(rows, None)
    except OtherFile as error:
        if not beside:
            raise
        _log.warning("%s. The file is passed over", str(error).rstrip("."))
        return
    if first_row is None:
        return
    if beside and not isinstance(first_row[1], str | None):
        _log.warning("%s: its column %s holds no text. The file is passed over", path, column)
        return
    for place, text in chain([first_row], rows):
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"{path}, {place}: data.column={column} holds {type(text).__name__}, not text"
            )
        if text and (half := _HALF.search(text)):
            raise DataError(
                f"{path}, {place}: it holds half of a UTF-16 pair, {half[0]!a}, which is no "
                "character"
            )
        if text:
            yield Piece(text)


def read_hub(arguments: dict[str, Any], column: str, what: str) -> Iterator[Piece]:
    """The text of each row, one document per row; rows without text are passed over."""
    with data_errors(
        ImportError, before="data=hf needs the package datasets (", after="): pip install datasets"
    ):
        import datasets
    # what it logs of a damaged file is raised as well
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        of_builder = {key: value for key, value in arguments.items() if key != "split"}
        settings = datasets.load_dataset_builder(**of_builder).config
        if "columns" in {field.name for field in fields(settings)}:
            alone = {"columns": [column]}
        else:
            alone = {}
        rows = iter(datasets.load_dataset(**arguments, **alone, streaming=True))
        for number, row in enumerate(rows):
            if column not in row:
                raise DataError(
                    f"data.column={column} is not in {what}. Its columns: {', '.join(row)}."
                )
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise DataError(
                    f"data.column={column} of {what} holds {type(text).__name__} in row "
                    f"{number}, not text"
                )
            if text:
                yield Piece(text)
    except DataError:
        raise
    # no network, or whatever the library or one of its readers makes of a data set
    except Exception as error:
        raise DataError(
            f"{what} cannot be read: {first_line(error).rstrip('.')} ({type(error).__name__}). Local "
            "files are read by data=hf data.path=FILE.parquet or data=text"
        ) from error
