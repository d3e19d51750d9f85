"""A tiny trained run that studies look at."""

from pathlib import Path

import pytest
from finished_runs import FinishedRuns


@pytest.fixture(scope="session")
def trained(finished: FinishedRuns) -> Path:
    """A run directory with checkpoints of steps 3 and 6; tests leave it as it is."""
    tokenizer = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300")
    return finished(*tokenizer, "checkpoint.every=3")
