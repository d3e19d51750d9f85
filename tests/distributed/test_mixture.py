"""A mixture with stages on two ranks: each tokenises and takes its own, and one rank goes on."""

import json
from typing import Any

import numpy as np
import pytest

Ranks = Any


def part(name: str, weight: int, **source: object) -> str:
    settings = ",".join(f"{key}:{value}" for key, value in source.items())
    return f"{name}:{{weight:{weight},source:{{{settings}}}}}"


@pytest.mark.long
def test_two_ranks_train_and_evaluate_what_one_does(ranks: Ranks) -> None:
    rows = (json.dumps({"text": f"{number} to be or not"}) for number in range(900))
    (ranks.folder / "rows.jsonl").write_text("\n".join(rows))
    (np.arange(9000) % 257).astype(np.uint16).tofile(ranks.folder / "train.bin")
    parts = (
        part("ids", 1, _target_="fp4train.data.Tokens", path="train.bin", vocab_size=257),
        part("rows", 3, _target_="fp4train.data.HuggingFace", path="rows.jsonl", cache_dir="kept"),
    )
    words = (
        "data=mixture",
        f"data.parts={{{','.join(parts)}}}",
        "data.stages=[{start:2,weights:{ids:1}}]",
        *("train.microbatch=2", "eval.every=2", "recipe=bf16", "phases=none", "schedule=constant"),
    )

    def train(count: int, *more: str) -> None:
        tiny = ranks.tiny(*more)
        arguments = [word for word in tiny if word in more or not word.startswith("data.")]
        ended = ranks.ask(count, arguments=arguments).wait()
        assert ended.codes == [0] * count, ended.err

    train(2, *words, "run.name=two", "train.steps=2")
    train(1, *words, "run.name=one", "train.steps=4")
    train(1, "resume=runs/two", "train.steps=4")
    assert ranks.losses("two") == ranks.losses("one") and ranks.losses("two")[-1]["step"] == 4

    def evaluated(run: str) -> list[dict[str, Any]]:
        text = (ranks.folder / "runs" / run / "metrics.jsonl").read_text()
        kept = (json.loads(line) for line in text.splitlines() if '"val/loss/ids"' in line)
        return [{key: line[key] for key in line if key[:5] in ("val/l", "data/")} for line in kept]

    assert evaluated("two") == evaluated("one") and len(evaluated("one")) == 2
