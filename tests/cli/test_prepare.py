"""`fp4train prepare`: what it makes is what a run reads, and what it refuses is one line."""

import json
from pathlib import Path

import pytest
from command_line import TINY, Cli, besides
from limits import set_limit

DATA = ("data=hf", "data.path=rows.jsonl", "data.cache_dir=cache", "data/tokenizer=bpe")
SMALL = (*DATA, "data.tokenizer.vocab_size=300", "train.steps=1")


def test_shares_of_a_job_array_are_what_a_run_reads(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "characters of a shard", 20_000)
    rows = [json.dumps({"text": f"row {number}: " + "to be or not " * 9}) for number in range(900)]
    Path("rows.jsonl").write_text("\n".join(rows))
    first = cli.raw("prepare", *SMALL, "part=2/2", "data.workers=2")
    assert (first.code, first.err) == (0, "")
    assert first.out.endswith("its share is there, other parts are not\n")
    assert " ids in 7 shards\n" in cli.raw("prepare", *SMALL, "part=1/2").out
    inodes = {path: path.stat().st_ino for path in Path("cache").rglob("*.*")}
    words = [*besides(TINY, {"data", "train.steps"}), *SMALL]
    assert cli.raw("run.name=a", *words).code == 0
    assert {path: path.stat().st_ino for path in Path("cache").rglob("*.*")} == inodes
    assert cli.raw("prepare", *SMALL, "verify=true").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("part=4/3",), "part=4/3 must be a share such as 3/16, from 1/16 to 16/16"),
        (("data.workers=0",), "data.workers=0: allowed are whole numbers from 1"),
        (("parts=1/2",), "unknown key 'parts'; did you mean 'part'?"),
    ],
)
def test_what_is_no_share_is_refused(cli: Cli, words: tuple[str, ...], message: str) -> None:
    Path("rows.jsonl").write_text('{"text": "a"}')
    refused = cli.raw("prepare", *DATA, *words)
    assert refused.code == 1 and message in refused.message


def test_data_that_no_cache_keeps_need_no_preparation(cli: Cli) -> None:
    assert "these data are not kept in a cache" in cli.raw("prepare", "data=stdlib").out
