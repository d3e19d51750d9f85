"""Rows that are read in order, on two ranks: each takes its own, and one rank goes on from where two
were.
"""

from typing import Any

import pytest

Ranks = Any

LAB = """from dataclasses import dataclass

from fp4train.data import Streamed

@dataclass(frozen=True, kw_only=True)
class Squares:
    vocab_size: int = 257

    def build(self, run_dir, seq_len, seed):
        def read(place):
            number = place or 0
            while True:
                row = [(number + step) ** 2 % 257 for step in range(seq_len + 1)]
                number += seq_len
                yield row, number
        return Streamed(
            vocab_size=257, train=read, val=read, fingerprint="squares", description="squares"
        )
"""
OWN = ("--config-dir", "mine", "plugins=[rowlab]")


def train(ranks: Ranks, count: int, *words: str) -> None:
    arguments = [word for word in ranks.tiny(*OWN, *words) if not word.startswith("data.")]
    ended = ranks.ask(count, arguments=arguments).wait()
    assert ended.codes == [0] * count, ended.err


@pytest.mark.long
def test_ranks_take_their_rows_and_another_number_of_ranks_goes_on(ranks: Ranks) -> None:
    (ranks.folder / "mine/data").mkdir(parents=True)
    (ranks.folder / "mine/rowlab.py").write_text(LAB)
    (ranks.folder / "mine/data/squares.yaml").write_text("_target_: rowlab.Squares\n")
    words = (
        "data=squares",
        "train.microbatch=2",
        "recipe=bf16",
        "phases=none",
        "schedule=constant",
    )
    train(ranks, 1, *words, "run.name=one", "train.steps=4")
    train(ranks, 2, *words, "run.name=two", "train.steps=2")
    train(ranks, 1, "resume=runs/two", "train.steps=4")
    assert ranks.losses("two") == ranks.losses("one") and ranks.losses("two")[-1]["step"] == 4
