"""`data=hf`: a data set of the Hugging Face hub (`data.name=…`), or local Parquet and JSON Lines files (`data.path=…`).

`datasets` streams the rows in their stored order, one document per row, and they are tokenised once into the cache, up
to `max_tokens`. The library's own shuffle is not used: its buffer cannot be resumed exactly. The loader shuffles.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fp4train.data.files import existing_path, files_of, stamp
from fp4train.data.source import TextSource, text_data
from fp4train.data.tokens import Piece, TokenData
from fp4train.errors import DataError, data_errors
from fp4train.paths import PathOrHubName, PathText

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


@dataclass(frozen=True, kw_only=True)
class HuggingFace(TextSource):
    """Rows of `name` (a hub data set) or of `path` (local files), whose `column` holds the text."""

    name: PathOrHubName | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    path: PathText | None = None
    column: str = "text"
    max_tokens: int | None = 200_000_000
    max_documents: int | None = None
    val: float = 0.01
    cache_dir: PathText = "~/.cache/fp4train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.name is None) == (self.path is None):
            raise ValueError(
                f"data.name={self.name}, data.path={self.path}: exactly one is needed, "
                "a hub name or a .parquet, .jsonl file or folder"
            )
        hub = {"config": self.config, "revision": self.revision, "split": None if self.split == "train" else self.split}
        if self.path is not None and (given := [key for key, value in hub.items() if value is not None]):
            raise ValueError(
                f"data.{given[0]}={hub[given[0]]}: local files (data.path) have no {given[0]}, a hub data set has "
                "(data.name); give the files of that part as data.path"
            )
        for key, bound in (("max_tokens", self.max_tokens), ("max_documents", self.max_documents)):
            if bound is not None and bound < 1:
                raise ValueError(f"data.{key}={bound}: allowed are whole numbers from 1, or null for no bound")

    def build(self, run_dir: Path, seq_len: int, seed: int) -> TokenData:
        arguments, key, what = self._source()
        return text_data(
            self,
            lambda: islice(read_rows(arguments, self.column, what), self.max_documents),
            run_dir,
            seq_len,
            what,
            cache_dir=self.cache_dir,
            key={"source": key, "column": self.column, "max_documents": self.max_documents},
            max_tokens=self.max_tokens,
        )

    def _source(self) -> tuple[dict[str, Any], list[Any], str]:
        """Arguments for `load_dataset`, the cache's key for them, and what an error calls them."""
        if self.path is None:
            named = {"path": self.name, "name": self.config, "split": self.split, "revision": self.revision}
            what = " ".join(str(part) for part in (self.name, self.config, self.split) if part)
            return named, ["hub", *named.values()], what
        paths = files_of(existing_path(self.path, "data.path"), list(READERS), "data.path")
        readers = {READERS.get(path.suffix.lower()) for path in paths}
        if None in readers or len(readers) > 1:
            raise DataError(
                f"data.path={self.path} holds {', '.join(sorted({path.suffix or path.name for path in paths}))}: "
                "data=hf reads .parquet, or .jsonl and .json (text is for data=text, token files are for data=tokens)"
            )
        local = {"path": readers.pop(), "data_files": [str(path) for path in paths], "split": "train"}
        return local, ["files", *stamp(paths)], self.path


def read_rows(arguments: dict[str, Any], column: str, what: str) -> Iterator[Piece]:
    """The text of each row, one document per row; rows without text are passed over."""
    with data_errors(ImportError, before="data=hf needs the package datasets (", after="): pip install datasets"):
        import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs of a damaged file is raised as well
    try:
        rows = iter(datasets.load_dataset(**arguments, streaming=True))
        for number, row in enumerate(rows):
            if column not in row:
                raise DataError(f"data.column={column} is not in {what}. Its columns: {', '.join(row)}.")
            text = row[column]
            if text is not None and not isinstance(text, str):
                raise DataError(f"data.column={column} of {what} holds {type(text).__name__} in row {number}, not text")
            if text:
                yield Piece(text)
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"{what} cannot be reached: {_first_line(error)}. Without a network use data=stdlib, data=text, or local "
            "files with data=hf data.path=FILE.parquet."
        ) from error
    except Exception as error:  # whatever else the library, or one of its readers, makes of a data set or a file
        raise DataError(f"{what} cannot be read: {_first_line(error)} ({type(error).__name__})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
