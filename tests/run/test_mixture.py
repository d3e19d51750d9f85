"""Runs on a mixture of sources, from the command line: resume to the bit, stages, other data, other
places, refusals.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import TINY, Cli, Outcome, StopAt, besides, lines, losses
from shown import commands, write_shown

from fp4train.exchange import evaluation, held_out, load_trained

WORDS = (
    *("--config-dir", "mine", "data=blend"),
    *("train.steps=4", "checkpoint.every=2", "eval.every=2", "phases=none"),
)
LATER = {
    "start: 200": "start: 3",
    "start: 350": "start: 7",
    "train.steps=400": "train.steps=8",
    "train.steps=450": "train.steps=10",
}
"""What docs/data.md shows, and what a tiny run has."""


def short(text: str) -> str:
    for shown, tiny_one in LATER.items():
        text = text.replace(shown, tiny_one)
    return text


@pytest.fixture(autouse=True)
def blend(cli: Cli) -> None:
    """The files of docs/data.md, and the data that they name."""
    write_shown(Path(), "data.md")
    file = Path("mine/data/blend.yaml")
    text = short(file.read_text())
    for path in ("texts", "rows.jsonl", "train.bin"):
        text = text.replace(f"path: {path}", f"path: {path}, cache_dir: cache")
    file.write_text(text)
    for folder, words in (("texts", "the quick brown fox"), ("more", "jumps over the lazy dog")):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text(f"{words}\n" * 600)
    Path("rows.jsonl").write_text("".join(f'{{"body": "row {i} of many"}}\n' for i in range(4000)))
    np.random.default_rng(0).integers(0, 257, 9000).astype(np.uint16).tofile("train.bin")


def tiny(cli: Cli, *words: str) -> Outcome:
    """Run a tiny run whose data the words name."""
    return cli.raw(*besides(TINY, {word.partition("=")[0] for word in words}), *words)


@pytest.mark.parametrize("every", [2, 3])
def test_a_run_on_a_mixture_is_resumed_to_the_bit_wherever_a_part_has_moved(
    cli: Cli, stop_at: StopAt, every: int
) -> None:
    words = [*WORDS, f"checkpoint.every={every}"]  # a stage begins at step 3
    assert tiny(cli, "run.name=whole", *words).code == 0
    stop_at(3)
    assert tiny(cli, "run.name=cut", *words).code == 137
    stop_at(-1)
    Path("rows.jsonl").rename("moved.jsonl")
    assert cli.raw("resume=runs/cut", "data.parts.rows.source.path=moved.jsonl").code == 0
    assert losses("runs/cut") == losses("runs/whole")
    evaluated = [line for line in lines("runs/cut") if "val/loss" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    keys = [key for key in evaluated[0] if key.startswith(("val/", "data/"))]
    whole = [line for line in lines("runs/whole") if "val/loss" in line]
    assert len(keys) == 2 + 3 * 3
    assert all([line[key] for line in evaluated] == [line[key] for line in whole] for key in keys)
    refused = cli.raw("resume=runs/cut", "data.parts.rows.weight=2", "train.steps=6")
    assert refused.code == 1 and "data.parts.rows.weight: 1" in refused.message


def test_shares_passes_and_the_loss_of_each_source_are_logged(cli: Cli) -> None:
    planned = cli.raw("plan", *WORDS, "train.seq_len=32", "train.batch_size=4")
    assert planned.code == 0 and "passes: 0.0072 of packed, 0.0" in planned.out.replace("\n", " ")
    ended = tiny(cli, "run.name=a", *WORDS)
    assert ended.code == 0 and "; passes: 0." in ended.out
    events = [line for line in lines("runs/a") if line.get("event") == "stage"]
    shares = {"packed": 0.5, "prose": 0.5}
    assert [(line["step"], line["shares"]) for line in events] == [(3, shares)]
    early, late = (line for line in lines("runs/a") if "val/loss" in line)
    for name, share in (("prose", 0.75), ("rows", 0.25), ("packed", 0.0)):
        assert early[f"data/share/{name}"] == share and early[f"val/loss/{name}"] > 5
    assert late["data/share/packed"] == 0.5 and late["data/passes/packed"] > 0
    assert early["val/loss/prose"] != early["val/loss/rows"] != late["val/loss/rows"]


def test_the_loss_of_a_part_is_that_of_its_source_alone_on_as_many_batches(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny(cli, "run.name=a", *WORDS, "eval.batches=2").code == 0
    trained = load_trained(Path("runs/a"))
    last = [line for line in lines("runs/a") if "val/loss" in line][-1]
    for name, part in trained.config.data.parts.items():  # type: ignore[attr-defined]
        source = part.source
        monkeypatch.setattr(
            evaluation, "data_of", lambda trained, source=source: source.build(Path("x"), 32, 0)
        )
        (score,) = held_out(trained, [trained.high_precision], 2)
        assert score.values["loss"] == last[f"val/loss/{name}"], name


def test_stages_to_come_and_other_data_follow_by_the_commands_of_the_page(
    cli: Cli, stop_at: StopAt
) -> None:
    first, later, other = (
        [short(word) for word in words[1:]]
        for words in commands("data.md")
        if "blend" in f"{words}"
    )
    assert tiny(cli, *first, "train.steps=4", "checkpoint.every=2", "phases=none").code == 0
    past = cli.raw("resume=runs/blend", "train.steps=8", "data.stages=[]")
    assert past.code == 1 and "trained in other stages than data.stages has before" in past.message
    assert cli.raw(*later).code == 0
    events = [line for line in lines("runs/blend") if line.get("event") == "stage"]
    assert [line["step"] for line in events] == [3, 7]
    sole = [word for word in other if not word.startswith("run.name")]
    own = cli.raw(*sole, "data.cache_dir=cache")
    assert own.code == 1 and "belongs to another configuration" in own.message
    named = cli.raw(*other, "data/tokenizer=bpe")
    assert named.code == 1 and "keeps the tokenizer of runs/blend; leave it out" in named.message
    ids = ("data=tokens", "data.path=train.bin", "data.vocab_size=999", "run.name=no")
    misfit = cli.raw("resume=runs/blend", "train.steps=10", *ids)
    assert misfit.code == 1 and "other data need the token ids of the run's own" in misfit.message
    assert cli.raw(*other, "data.cache_dir=cache").code == 0
    (branch,) = (
        record
        for record in map(json.loads, Path("runs/other/history.jsonl").read_text().splitlines())
        if record["event"] == "branch"
    )
    assert branch["other_data"] is True and branch["changed"]["data.path"] == [None, "more"]
    stop_at(9)
    cut = [*sole, "run.name=cut", "data.cache_dir=cache", "checkpoint.every=1"]
    assert cli.raw(*cut).code == 137
    stop_at(-1)
    assert cli.raw(*cut).code == 0
    assert losses("runs/cut") == losses("runs/other") and max(losses("runs/cut")) == 10
    rows = "data.parts={more:{source:{_target_:fp4train.data.Text,path:more,cache_dir:cache}}}"
    assert (
        cli.raw("resume=runs/cut", "run.name=again", "data=mixture", rows, "train.steps=12").code
        == 0
    )
    (late,) = (line for line in lines("runs/again") if line["step"] == 12 and "val/loss" in line)
    assert late["data/passes/more"] == pytest.approx(8 / 427)


PARTS = (
    "data=mixture",
    "data.parts={a:{source:{_target_:fp4train.data.Text,path:texts,cache_dir:cache}},"
    "b:{source:{_target_:fp4train.data.Text,path:more,cache_dir:cache}}}",
    "phases=none",
)


def stages(*starts_and_parts: tuple[int | float, str]) -> str:
    listed = ",".join(f"{{start:{start},weights:{{{part}:1}}}}" for start, part in starts_and_parts)
    return f"data.stages=[{listed}]"


def test_past_stages_that_were_swapped_are_refused_and_coming_ones_that_move_are_told(
    cli: Cli,
) -> None:
    words = (*PARTS, stages((1, "a"), (2, "b"), (0.75, "a")), "train.steps=8")
    assert tiny(cli, "run.name=a", *words, "checkpoint.every=3", "checkpoint.keep=9").code == 0
    ended = ("resume=runs/a", "resume_step=3", "run.name=b")
    swapped = cli.raw(*ended, stages((1, "b"), (2, "a"), (0.75, "a")))
    assert swapped.code == 1 and "trained in other stages than data.stages has" in swapped.message
    told = "data.stages begin at batches [0, 1, 2, 9] from here on, not [0, 1, 2, 6]"
    longer = cli.raw(*ended, "train.steps=12")
    assert longer.code == 0 and told in longer.err
    assert "data.stages begin at" not in cli.raw(*ended[:2], "run.name=c").err


def test_stages_out_of_order_are_refused_before_any_text_is_tokenised(cli: Cli) -> None:
    ended = tiny(cli, "run.name=a", *PARTS, stages((3, "a"), (0.5, "b")), "train.steps=4")
    assert ended.code == 1 and "data.stages[1].start=0.5 is step 2" in ended.message
    assert not Path("cache").exists() and not Path("runs/a").exists()


def test_other_data_whose_ids_are_more_but_pad_alike_are_refused(cli: Cli) -> None:
    text = ("data=text", "data.path=texts", "data.cache_dir=cache", "train.steps=1", "phases=none")
    assert tiny(cli, "run.name=a", *text).code == 0
    ids = ("data=tokens", "data.path=train.bin", "data.vocab_size=258", "train.steps=2")
    ended = cli.raw("resume=runs/a", "run.name=b", *ids)
    assert ended.code == 1
    assert "was trained on 257 token ids, and these data have 258" in ended.message


def test_a_mixture_is_written_on_the_command_line_too(cli: Cli) -> None:
    unnamed = tiny(cli, "run.name=a", "data=mixture")
    assert unnamed.code == 1 and "data.parts must be given: data.parts=…" in unnamed.message
    part = "{weight:2,source:{_target_:fp4train.data.Text,path:texts,cache_dir:cache}}"
    words = ("data=mixture", f"data.parts={{prose:{part}}}", "train.steps=1")
    assert tiny(cli, "run.name=a", *words).code == 0
    planned = cli.raw("plan", *words)
    assert planned.code == 0


def test_harder_data_are_no_divergence(cli: Cli) -> None:
    for folder, text in (("easy", "a" * 9000), ("hard", "".join(map(chr, range(33, 126))) * 90)):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text(text)
    part = "{{weight:{},source:{{_target_:fp4train.data.Text,path:{},cache_dir:cache}}}}"
    parts = f"data.parts={{step:{part.format(1, 'easy')},event:{part.format(0, 'hard')}}}"
    stages = "data.stages=[{start:20,weights:{event:1}}]"
    words = ("train.on_divergence=stop", "optim.lr=0.02", "phases=none", "schedule=constant")
    mixed = tiny(cli, "run.name=a", "data=mixture", parts, stages, "train.steps=30", *words)
    assert mixed.code == 0, mixed.message
    (event,) = (line for line in lines("runs/a") if line.get("event") == "stage")
    assert (event["step"], event["shares"]) == (20, {"event": 1.0})
    easy = ("data=text", "data.path=easy", "data.cache_dir=cache")
    assert tiny(cli, "run.name=b", *easy, "train.steps=20", *words).code == 0
    hard = ("data=text", "data.path=hard", "data.cache_dir=cache", "train.steps=30")
    assert cli.raw("resume=runs/b", "run.name=c", *hard).code == 0
    before, after = (losses(f"runs/{run}") for run in ("a", "c"))
    assert after[26] > 2 * after[20] and before[26] > 2 * before[20]
