"""A tiny trained run that studies look at."""

from pathlib import Path
from typing import Any

import pytest
from finished_runs import FinishedRuns

from fp4train.run.record import directory as run_directory


@pytest.fixture(scope="session")
def trained(finished: FinishedRuns) -> Path:
    """A run directory with checkpoints of steps 3 and 6; tests leave it as it is."""
    tokenizer = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300")
    return finished(*tokenizer, "checkpoint.every=3")


@pytest.fixture
def config_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The saved configurations that are read and checked, each time."""
    read = list[Path]()
    plain = run_directory.saved_config

    def saved_config(path: Path) -> dict[str, Any]:
        read.append(path)
        return plain(path)

    monkeypatch.setattr(run_directory, "saved_config", saved_config)
    return read
