"""docs/data.md: the commands about object stores run, in their order, on an S3 server of this machine."""

from pathlib import Path

import fsspec
import numpy as np
import pytest
from object_store import serving
from shown import commands, shortened

from fp4train.cli import main

COMMANDS = [words[1:] for words in commands("data.md") if any("s3://" in word for word in words)]
TEXT = b"some words of it\n" * 2000


@pytest.mark.long
def test_the_commands_about_object_stores_run(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(monkeypatch):
        store = fsspec.filesystem("s3")
        store.pipe("lake/texts/a.txt", TEXT)
        store.pipe("lake/rows/a.jsonl", b'{"text": "some words of it"}\n' * 1000)
        store.pipe("lake/ids/a.bin", (np.arange(20_000) % 257).astype("<u2").tobytes())
        assert len(COMMANDS) > 2
        for words in COMMANDS:
            trains = any(word.startswith("data=") for word in words)
            with pytest.raises(SystemExit) as ended:
                main([*(shortened(words) if trains else words), "data.cache_dir=cache"])
            assert ended.value.code == 0, words
