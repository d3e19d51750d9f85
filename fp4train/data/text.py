"""`data=text data.path=FILE_OR_FOLDER`: UTF-8 text files, one document per file, in the order of
their names.

Tokenised once into the cache, known there by the files' names and stamps (`stored.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from fp4train.data.compressed import plain_name
from fp4train.data.files import input_files, read_pieces, shown, stamp
from fp4train.data.parts import CorpusPart, joined_parts
from fp4train.data.source import Texts, TextSource, Workers, check_workers
from fp4train.paths import CacheFolder, DataPaths


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
        for path in (self.path,) if isinstance(self.path, str) else self.path:
            suffix = Path(plain_name(Path(path))).suffix
            if suffix in (".jsonl", ".json", ".parquet") and suffix not in self.suffixes:
                raise ValueError(
                    f"data.path={path} holds records, whose syntax would be trained on: "
                    f"data=hf data.path={path} "
                    f"data.column=text reads their text (data.suffixes=[{suffix}]: as it is)"
                )

    def corpus(self, run_dir: Path) -> Texts:
        suffixes = [f".{suffix.lower().lstrip('.')}" for suffix in self.suffixes]
        paths = input_files(self.path, suffixes, "data.path")

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
