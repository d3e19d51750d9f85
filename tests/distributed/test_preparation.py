"""Ranks that tokenise longer than a collective waits: they share the work, and train."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

Ranks = Any
ROWS = 8
OPTIONS = (
    "data=hf",
    "data.path=rows.jsonl",
    "data.cache_dir=kept",
    "data.val=0.2",
    "train.steps=1",
    "eval.every=0",
)

SLOW = """
import os, time
from fp4train.data import source
encode = source.encode_documents

def slow(pieces, tokenizer):
    def delayed():
        for piece in pieces:
            time.sleep(1.5)
            with open("made", "a") as file:
                file.write(f"{rank} ")
            yield piece
    return encode(delayed(), tokenizer)

source.encode_documents = slow
from fp4train.data import huggingface, parts
parts.SHARD = huggingface.SHARD = 900
"""


def write_rows(folder: Path) -> None:
    rows = [json.dumps({"text": f"{number} to be or not to be, " * 40}) for number in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(rows))


@pytest.mark.long
def test_text_that_is_tokenised_for_longer_than_the_timeout_trains(ranks: Ranks) -> None:
    write_rows(ranks.folder)
    ended = ranks(2, "run.name=a", "parallel.timeout=3", *OPTIONS, patch=SLOW)
    assert ended.codes == [0, 0], ended.err
    made = (ranks.folder / "made").read_text().split()
    assert len(made) == ROWS and set(made) == {"0", "1"}
    ranks.train(1, "b", *OPTIONS, "train.microbatch=2")
    ranks.same("a", "b")


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_tokenises_ends_the_job_and_loses_one_shard(
    ranks: Ranks, rank: int
) -> None:
    write_rows(ranks.folder)
    job = ranks.start(2, "run.name=a", "parallel.timeout=3", *OPTIONS, patch=SLOW)
    made = ranks.folder / "made"
    ranks.until(lambda: made.exists() and str(rank) in made.read_text())
    os.kill(job.processes[rank], signal.SIGKILL)
    ended = job.wait()
    assert ended.codes[1 - rank] == 75 and ended.seconds < 60
    lines = made.read_text()
    assert len(lines.split()) <= ROWS + 1, "the one in work is lost"
    ranks.train(2, "a", *OPTIONS, patch=SLOW)
    assert made.read_text() == lines
