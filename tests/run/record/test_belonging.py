"""State belongs to a run: foreign, changed and lost parts are named."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    STEADY,
    Cli,
    StopAt,
    events,
    losses,
    recorded,
    reseal,
)

from fp4train.sealed import checksum_of, open_line, seal_line


def test_a_checkpoint_of_another_run_of_the_same_configuration_is_refused(cli: Cli) -> None:
    for name in ("a", "b"):
        cli.trained(f"run.name={name}", "train.steps=1", *STEADY)
    shutil.rmtree("runs/a/checkpoints")
    shutil.copytree("runs/b/checkpoints", "runs/a/checkpoints")
    said = cli("resume=runs/a", "train.steps=2").message
    assert "is a checkpoint of run" in said and "another run left it there" in said


def test_no_flipped_bit_of_the_configuration_changes_a_run_in_silence(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1", *STEADY)
    path = Path("runs/a/config.yaml")
    good = path.read_bytes()
    header = good.index(b"\n")
    signed = good.index(b" signed ")
    for place in (*range(2, header, 17), *range(header + 1, len(good), 311)):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        ended = cli.raw("resume=runs/a", "train.steps=2", *(cli.paths if place < signed else ()))
        assert ended.code == 1, place
        told = "was changed after the run had written it" in ended.message
        other = "has the signature of another user" if place > signed else "is a checkpoint of run"
        assert told or (place < header and other in ended.message), place
    path.write_bytes(good)
    assert cli("resume=runs/a", "train.steps=2").code == 0


def test_a_configuration_without_its_first_line_is_told_so(cli: Cli) -> None:
    """Nothing else would notice: the rest of it is as the checkpoint was trained with."""
    cli.trained("run.name=a", "train.steps=1", *STEADY)
    path = Path("runs/a/config.yaml")
    path.write_text(path.read_text().partition("\n")[2])
    ended = cli("resume=runs/a", "train.steps=2", *cli.paths)
    assert ended.code == 0 and f"{path} has lost its first line\n" in ended.err


HOSTILE = {
    "an interpolation for a key": "run: {'${oc.env:HOME}': 1}",
    "a bomb of aliases": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nrun: {name: *c}",
    "depth": "run: " + "[" * 50_000,
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_configuration_is_refused_with_one_line_that_tells_nothing(
    cli: Cli, hostile: str
) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(hostile)
    said = cli.raw("resume=runs/a", "train.steps=2").message
    assert said.startswith("runs/a/config.yaml") and os.environ["HOME"] not in said


def swapped(cli: Cli, stop_at: StopAt) -> Path:
    """A run that was swapped at step 2 and killed after the checkpoint of step 4; its journal."""
    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 137
    stop_at(5)
    assert cli("resume=runs/a", "recipe=bf16").code == 137
    stop_at(-1)
    return Path("runs/a/history.jsonl")


@pytest.mark.parametrize(
    "lines", [pytest.param(0, marks=pytest.mark.long), 1], ids=["all of it", "its last line"]
)
def test_swaps_that_a_journal_has_lost_are_written_anew(
    cli: Cli, stop_at: StopAt, lines: int
) -> None:
    path = swapped(cli, stop_at)
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:lines])
    path.write_bytes(kept) if kept else path.unlink()
    said = cli("resume=runs/a", "run.name=b").message
    assert (
        said == f"{path} lacks records, but runs/a was swapped at step 2: resume it in place first"
    )
    again = cli("resume=runs/a")
    assert (
        again.code == 0
        and f"{path} lacks records; its swaps are written anew from the checkpoint" in again.err
    )
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4"] * 2 + ["BF16"] * 4
    assert recorded("runs/a") == [(2, "bf16")] and path.read_bytes().startswith(kept)


def test_a_swap_that_was_changed_is_refused(cli: Cli, stop_at: StopAt) -> None:
    path = swapped(cli, stop_at)
    good = path.read_text()
    path.write_text(good.replace("precision.BF16", "precision.FP32"))
    assert "is damaged (its checksum differs)" in cli("resume=runs/a").message
    first, swap = good.encode().splitlines()
    moved = seal_line(json.dumps({**open_line(swap), "at": 1}).encode())
    path.write_bytes(first + b"\n" + moved)
    newest = Path("runs/a/checkpoints/step_00000004")

    def resealed(state: dict[str, Any]) -> None:
        state["history"] = checksum_of(moved)

    reseal(newest, lambda held: None, resealed)
    assert (
        "is not what the checkpoint of step 4 was trained with (the swap at step 2)"
        in cli("resume=runs/a").message
    )


def test_records_that_were_shortened_are_named_by_a_resume(cli: Cli) -> None:
    options = ("eval.errors_every=1", "checkpoint.every=1", *STEADY)
    assert cli("run.name=a", "train.steps=1", *options).code == 0
    assert cli("resume=runs/a", "train.steps=2").code == 0
    ends = {
        "statistics.bin": b"f4s1",
        "history.jsonl": b'{"event"',
        "metrics.jsonl": b'{"step": 2, "train/',
    }
    for name, last in ends.items():
        data = Path("runs/a", name).read_bytes()
        Path("runs/a", name).write_bytes(data[: data.rindex(last)])
    reasons = ("statistics.bin is cut off (", "history.jsonl lacks records that the checkpoint saw")
    again = cli("resume=runs/a", "train.steps=3")
    assert again.code == 0 and all(f"runs/a/{reason}" in again.err for reason in reasons)
    found = events("runs/a", "metrics mended")[0]["found"]
    assert len(found) == 3


def test_a_damaged_line_of_the_metrics_does_not_block_a_resume(cli: Cli, stop_at: StopAt) -> None:
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=4", *STEADY).code == 137
    stop_at(-1)
    path = Path("runs/a/metrics.jsonl")
    damaged = path.read_bytes().replace(b'{"step": 2', b'{"stXp": 2')
    path.write_bytes(damaged)
    again = cli("resume=runs/a")
    assert again.code == 0 and "was damaged and is left out" in again.err
    assert Path("runs/a/metrics.jsonl.damaged").read_bytes() == damaged
    assert sorted(losses("runs/a")) == [1, 3, 4, 5, 6]


def test_metrics_are_not_erased_where_checkpoints_are_gone(cli: Cli) -> None:
    cli.trained("run.name=a", "checkpoint.every=2", *STEADY)
    before = Path("runs/a/metrics.jsonl").read_bytes()
    shutil.rmtree("runs/a/checkpoints")
    assert "its checkpoints are gone" in cli("run.name=a", "checkpoint.every=2", *STEADY).message
    Path("runs/a/heartbeat.json").unlink()
    assert "its checkpoints are gone" in cli("run.name=a", "checkpoint.every=2", *STEADY).message
    assert Path("runs/a/metrics.jsonl").read_bytes() == before
    assert cli("run.name=a", "checkpoint.every=2", "run.overwrite=true", *STEADY).code == 0
