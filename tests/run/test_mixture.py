"""Runs on a mixture of sources, from the command line: resume to the bit, other places, refusals."""

from pathlib import Path

import pytest
from command_line import TINY, Cli, Outcome, StopAt, besides, losses
from shown import write_shown

WORDS = (
    "--config-dir",
    "mine",
    "data=blend",
    "train.steps=4",
    "checkpoint.every=2",
    "phases=none",
    *(f"data.parts.{part}.source.cache_dir=cache" for part in ("prose", "rows")),
)


@pytest.fixture(autouse=True)
def blend(cli: Cli) -> None:
    """The files of docs/data.md, and the text that they name."""
    write_shown(Path(), "data.md")
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    Path("rows.jsonl").write_text("".join(f'{{"body": "row {i} of many"}}\n' for i in range(4000)))


def tiny(cli: Cli, *words: str) -> Outcome:
    """Run a tiny run whose data the words name."""
    return cli.raw(*besides(TINY, {word.partition("=")[0] for word in words}), *words)


def test_a_run_on_a_mixture_is_resumed_to_the_bit_wherever_a_part_has_moved(
    cli: Cli, stop_at: StopAt
) -> None:
    assert tiny(cli, "run.name=whole", *WORDS).code == 0
    stop_at(3)
    assert tiny(cli, "run.name=cut", *WORDS).code == 137
    stop_at(-1)
    Path("rows.jsonl").rename("moved.jsonl")
    assert cli.raw("resume=runs/cut", "data.parts.rows.source.path=moved.jsonl").code == 0
    assert losses("runs/cut") == losses("runs/whole")
    refused = cli.raw("resume=runs/cut", "data.parts.rows.weight=2", "train.steps=6")
    assert refused.code == 1 and "data.parts.rows.weight: 1" in refused.message


def test_a_mixture_is_written_on_the_command_line_too(cli: Cli) -> None:
    unnamed = tiny(cli, "run.name=a", "data=mixture")
    assert unnamed.code == 1 and "data.parts must be given: data.parts=…" in unnamed.message
    part = "{weight:2,source:{_target_:fp4train.data.Text,path:texts,cache_dir:cache}}"
    words = ("data=mixture", f"data.parts={{prose:{part}}}", "train.steps=1")
    assert tiny(cli, "run.name=a", *words).code == 0
    planned = cli.raw("plan", *words)
    assert planned.code == 0
