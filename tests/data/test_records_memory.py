"""What a file of records takes of memory: small ones that unpack to much are read piece by piece, or
refused in words.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

MEASURE = """
import os, resource, sys
from fp4train.data.huggingface import local_files, read_rows
from fp4train.errors import DataError

def measure(path):
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = 0
    try:
        for piece in read_rows(local_files(path), "text", path):
            size += len(piece.text)
    except DataError as error:
        print("refused:", error, end=" ")
    print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024, flush=True)

for line in sys.stdin:
    if not os.fork():
        measure(line.strip())
        os._exit(0)
    os.wait()
"""
"""For each path of standard input what a fork finds there, which has imported all and read nothing:
the characters of its texts, or why they are refused, and the megabytes that it takes beyond those
of its start.
"""


@pytest.fixture(scope="module")
def measure() -> Iterator[Callable[[Path], str]]:
    """The line that `MEASURE` prints of a path."""
    command = [sys.executable, "-c", MEASURE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asks = process.stdin
        answers = process.stdout

        def ask(path: Path) -> str:
            print(path, file=asks, flush=True)
            return answers.readline()

        yield ask
        asks.close()


def a_dictionary(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1_000_000] * 700}), path)


def a_page(path: Path) -> None:
    table = pyarrow.table({"text": ["x" * 1_000_000] * 600})
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="zstd")


def a_long_line(path: Path) -> None:
    with path.open("w") as file:
        file.write('{"text": "')
        for _ in range(400):
            file.write("z" * (1 << 20))
        file.write('"}\n')


def many_values(path: Path) -> None:
    path.write_text('{"text": "a", "x": [' + "{}," * 20_000_000 + "0]}\n")


BOMBS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "one value for 700 rows": ("a.parquet", a_dictionary, "700000000"),
    "a page of 600 MB": ("a.parquet", a_page, "refused: .*unpacks from"),
    "a line of 400 MB": ("a.jsonl", a_long_line, "refused: .*line 1: it is longer than 64 MB"),
    "a line of 20 million values": (
        "a.jsonl",
        many_values,
        "refused: .*line 1: it holds more than 2,097,152 values",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_costs_less_than_a_gigabyte(
    tmp_path: Path, kind: str, measure: Callable[[Path], str]
) -> None:
    name, write, words = BOMBS[kind]
    write(tmp_path / name)
    found = measure(tmp_path / name)
    assert re.search(words, found), found
    megabytes = int(found.split()[-1])
    assert megabytes < 600, f"{megabytes} MB more than before"
