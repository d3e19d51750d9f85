"""`data=stdlib`: the sources of the Python standard library, real text that is on every machine
already.

About 11 MB without the tests, one document per module. The modules come in the order of a hash of
their names: mixed, so that the held-out last part is of the same kind as the rest, and the same on
every start.
"""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp4train.data.source import Texts, TextSource
from fp4train.data.tokens import Piece
from fp4train.errors import DataError

LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, kw_only=True)
class Stdlib(TextSource):
    """The running interpreter's own standard library, tokenised in memory at the start of each
    run.
    """

    def corpus(self, run_dir: Path) -> Texts:
        root = Path(sysconfig.get_path("stdlib"))
        paths = modules(root)
        if not paths:
            raise DataError(
                f"data=stdlib finds no .py files in {root}. Use data=text data.path=FILE_OR_FOLDER."
            )

        def documents() -> Iterator[Piece]:
            for path in paths:
                try:
                    text = path.read_bytes().decode()
                except (OSError, UnicodeDecodeError):  # a few installations hold a Latin-1 module
                    continue
                if text:
                    yield Piece(text)

        what = f"standard library of Python {sysconfig.get_python_version()}, {len(paths)} modules"
        return Texts(documents=documents, val=self.val, description=what)


def modules(root: Path) -> list[Path]:
    """Every module below `root` but the tests, in the order of a hash of its name."""
    paths: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT]
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    names_of_paths = [path.relative_to(root).as_posix() for path in paths]
    numbered = sorted([(zlib.crc32(name.encode()), name) for name in names_of_paths])
    return [root / name for _, name in numbered]
