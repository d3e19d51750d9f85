"""`data=text data.path=FILE_OR_FOLDER`: UTF-8 text files, one document per file, in the order of
their names.

Tokenised once into the cache, known there by the files' names and stamps (`stored.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from fp4train.data.compressed import plain_name
from fp4train.data.files import input_files, read_pieces, shown, stamp
from fp4train.data.parts import CorpusPart, joined_parts
from fp4train.data.source import Texts, TextSource, Workers, check_workers
from fp4train.errors import DataError
from fp4train.paths import CacheFolder, DataPaths

RECORDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")


@dataclass(frozen=True, kw_only=True)
class Text(TextSource):
    """A text file, every file below a folder whose suffix is one of `suffixes`, what a pattern
    matches, or several of these; plain, gzip or zstd.
    """

    path: DataPaths
    suffixes: Sequence[str] = (".txt", ".md")
    cache_dir: CacheFolder = "~/.cache/fp4train"
    workers: Workers = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_workers(self.workers)
        if isinstance(self.suffixes, str) or not self.suffixes:
            raise ValueError(
                f"data.suffixes={self.suffixes!r}: a list is needed, for instance "
                "data.suffixes=[.txt,.py]"
            )
        self._refuse_records((self.path,) if isinstance(self.path, str) else self.path)

    def _refuse_records(self, paths: Iterable[str]) -> None:
        for path in paths:
            suffix = Path(plain_name(Path(path))).suffix
            if suffix in RECORDS and suffix not in self._suffixes:
                raise DataError(
                    f"data.path={path} holds records, whose syntax would be trained on: data=hf "
                    "data.column=text reads the text of JSON Lines and Parquet "
                    f"(data.suffixes=[{suffix}]: as it is)"
                )

    @property
    def _suffixes(self) -> list[str]:
        return [f".{suffix.lower().lstrip('.')}" for suffix in self.suffixes]

    def corpus(self, run_dir: Path) -> Texts:
        paths = input_files(self.path, self._suffixes, "data.path")
        self._refuse_records(map(str, paths))

        def parts() -> list[CorpusPart]:
            return joined_parts(
                CorpusPart(path.stat().st_size, (partial(read_pieces, path),)) for path in paths
            )

        return Texts(
            documents=lambda: chain.from_iterable(map(read_pieces, paths)),
            val=self.val,
            description=f"{shown(self.path)}, {len(paths)} file{'s' if len(paths) > 1 else ''}",
            cache_dir=self.cache_dir,
            key={"source": "text", "files": stamp(paths)},
            parts=parts,
            workers=self.workers,
        )
