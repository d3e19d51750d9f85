"""The past of a run stays what it was: plan, configuration and recipe by stretch, whatever a resume
changes.
"""

import json
from pathlib import Path

import pytest
import torch
import yaml
from command_line import Cli, StopAt, events, lines, losses, steps

from fp4train.run.record import journal

STEADY = ("phases=none", "schedule=constant")


def ran(run: str) -> list[tuple[int, int, str]]:
    return [(s.start, s.stop, s.recipe) for s in journal.stretches(journal.read_journal(Path(run)))]


def test_a_resume_changes_the_plan_of_the_rest_and_not_of_the_past(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=6", "policy.last=0").code == 0
    before = Path("runs/a/plan.txt").read_text()
    assert cli("resume=runs/a", "train.steps=10", "policy.last=1", *STEADY[:1]).code == 0
    after = Path("runs/a/plan.txt").read_text()
    assert after.startswith(before.rstrip("\n")), "the cooldown of the past included"
    assert "steps 6–9: NVFP4 (recipe)" in after and "policy.last=1 (1 of 2 blocks)" in after
    (event,) = events("runs/a", "resume")
    assert (
        event["changed"]["train.steps"] == "6 → 10" and event["changed"]["policy.last"] == "0 → 1"
    )
    shown = cli.raw("plan", "runs/a").out
    assert "train.steps: 6 → 10; policy.last: 0 → 1" in shown and "10 of 10 steps are done" in shown
    assert [line.split()[0] for line in shown.splitlines() if " ran " in line] == [
        "0–4",
        "5",
        "6–9",
    ]
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["train"]["steps"] == 10
    known = journal.configuration(journal.read_journal(Path("runs/a"))[:1])
    assert known is not None and known["train.steps"] == 6


def test_what_is_planned_is_told_from_what_ran(cli: Cli, stop_at: StopAt) -> None:
    stop_at(4)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 137
    shown = cli.raw("plan", "runs/a").out
    assert "4 of 6 steps are done" in shown
    assert [line.split()[:2] for line in shown.splitlines() if "NVFP4" in line] == [
        ["0–3", "ran"],
        ["4–5", "planned"],
    ]
    full = cli.raw("plan", "runs/a", "full=true").out
    assert "ran: steps 0–3: NVFP4 (recipe)" in full and full.count("blocks.1.mlp.down") == 6


def test_a_run_that_went_back_has_the_past_it_kept(cli: Cli, stop_at: StopAt) -> None:
    """A killed process had planned, and run, steps that the resumed one runs anew."""
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 137
    stop_at(-1)
    assert cli("resume=runs/a", "recipe=bf16").code == 0
    assert ran("runs/a") == [(0, 4, "NVFP4"), (4, 6, "BF16")]
    assert [r.event for r in journal.read_journal(Path("runs/a"))] == ["start", "resume"]


def test_resumes_without_a_change_do_not_cut_the_past(cli: Cli, stop_at: StopAt) -> None:
    for step in (2, 4):
        stop_at(step)
        assert cli("run.name=a", "checkpoint.every=1", *STEADY).code == 137
    assert ran("runs/a") == [(0, 6, "NVFP4")]


@pytest.mark.long
def test_a_branch_takes_the_past_of_its_run_along(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=4", "checkpoint.every=2", *STEADY).code == 0
    before = Path("runs/a/history.jsonl").read_bytes()
    branch = ["resume=runs/a", "resume_step=2", "run.name=b", "recipe=bf16", "train.steps=5"]
    ended = cli(*branch)
    assert ended.code == 0 and "going on from step 2 of runs/a" in ended.err
    assert ran("runs/b") == [(0, 2, "NVFP4"), (2, 5, "BF16")]
    assert Path("runs/a/history.jsonl").read_bytes() == before
    assert sorted(losses("runs/b")) == [1, 2, 3, 4, 5]
    assert "runs/b is finished" in cli(*branch).out, (
        "resume_step is about runs/a, not about the branch's own checkpoints"
    )


def test_going_back_in_place_says_what_is_abandoned_and_cannot_jump_ahead_again(
    cli: Cli, stop_at: StopAt
) -> None:
    assert (
        cli("run.name=a", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=3", *STEADY).code
        == 0
    )
    stop_at(3)
    ended = cli("resume=runs/a", "resume_step=2", "train.steps=8")
    assert ended.code == 137 and "steps 2–5 are abandoned" in ended.err
    stop_at(-1)
    again = cli("resume=runs/a")
    assert again.code == 0 and "going on from step 2 of runs/a" in again.err
    assert sorted(losses("runs/a")) == list(range(1, 9))


def test_a_checkpoint_that_is_not_kept_cannot_be_chosen(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=4", "checkpoint.every=2").code == 0
    for verb in ("train", "plan"):
        assert "step 3; it has 2, 4" in cli(verb, "resume=runs/a", "resume_step=3").message.replace(
            "resume_step=3: runs/a/checkpoints has no such checkpoint", "step 3"
        ).replace("resume_step=3: runs/a has no such checkpoint", "step 3")
    assert (
        "resume_step=3 is the step of a checkpoint of resume=RUN"
        in cli("run.name=b", "resume_step=3").message
    )
    assert "did you mean 'resume_step'" in cli("resume=runs/a", "resume.step=2").message


@pytest.mark.long
def test_extending_a_cooled_run_says_what_the_rate_does_and_what_is_kept(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=10", "checkpoint.every=4").code == 0
    finished = cli("resume=runs/a").out
    assert (
        "brought the learning rate down to" in finished
        and "resume=runs/a resume_step=8 train.steps=…" in finished
    )
    ended = cli("resume=runs/a", "train.steps=20")
    last, first = (losses("runs/a")[step][2] for step in (10, 11))
    assert (
        f"the learning rate goes up from {last:.3g} (step 9, in the cooldown that began at "
        f"step 8) to {first:.3g}" in ended.err
    )
    assert "resume_step=8" in ended.err
    whole = cli("resume=runs/a", "train.steps=22", "schedule.cooldown=12")
    assert "goes up" not in whole.err


@pytest.mark.long
def test_weights_of_another_run_begin_a_new_one(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=6", "checkpoint.every=3", "optim.lr=0.01").code == 0
    before = {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()}
    assert (
        cli(
            "run.name=b",
            "init=runs/a",
            "train.steps=2",
            "optim.lr=1e-9",
            "eval.every=1",
            "recipe=bf16",
        ).code
        == 0
    )
    assert cli("run.name=c", "init=runs/a", "init_step=3", "train.steps=2", "recipe=bf16").code == 0
    assert {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()} == before
    assert [line["step"] for line in lines("runs/b") if "train/loss" in line] == [1, 2]
    vals = [line["val/loss"] for run in "ab" for line in lines(f"runs/{run}") if "val/loss" in line]
    assert (
        vals[0] == pytest.approx(vals[1], abs=0.02) and losses("runs/b")[1] != losses("runs/c")[1]
    )
    assert [(r.event, r.values["from"]) for r in journal.read_journal(Path("runs/b"))] == [
        ("init", "runs/a/checkpoints/step_00000006")
    ]
    assert cli("resume=runs/b", "train.steps=3").code == 0
    assert "leave one of them out" in cli("resume=runs/a", "init=runs/a").message


def test_the_tokenizer_comes_with_the_weights(cli: Cli) -> None:
    bpe = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300")
    assert cli("run.name=a", "train.steps=1", *bpe).code == 0
    other = cli.folder / "other.txt"
    other.write_text("a text of quite other words, which would give another vocabulary " * 400)
    assert cli("run.name=b", "init=runs/a", "train.steps=1", f"data.path={other}", *bpe).code == 0
    a, b = (Path(f"runs/{run}/tokenizer.json").read_bytes() for run in "ab")
    assert a == b


def test_an_edited_configuration_is_noticed(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    path = Path("runs/a/config.yaml")
    whole = path.read_text().partition("\n")[2]  # without the first line, which holds its checksum
    path.write_text(whole.replace("seed: 0", "seed: 5"))
    said = cli("resume=runs/a", "train.steps=3", *cli.paths).message
    assert (
        said
        == "runs/a/config.yaml was edited: run.seed is 5, the run was trained with 0; put it back"
    )
    path.write_text(whole.replace("weight_decay: 0.1", "weight_decay: 0.2"))
    ended = cli("resume=runs/a", "train.steps=3", *cli.paths)
    assert ended.code == 0 and "config.yaml was edited: optim.weight_decay: 0.1 → 0.2" in ended.err
    assert "optim.weight_decay: 0.1 → 0.2" in cli.raw("plan", "runs/a").out
    path.write_text(path.read_text().partition("\n")[2].replace("  every: 50\n", "", 1))
    assert (
        cli("resume=runs/a", "train.steps=4").message
        == "eval.every is missing in runs/a/config.yaml as this command changes it; eval.every=… sets "
        "it"
    )


@pytest.mark.parametrize("damage", [("NVFP4", "NVFP5"), ("{", "")])
def test_a_damaged_history_is_named_with_a_way_on(cli: Cli, damage: tuple[str, str]) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    path = Path("runs/a/history.jsonl")
    path.write_text(path.read_text().replace(*damage, 1))
    for command in (["resume=runs/a", "train.steps=3"], ["plan", "runs/a"]):
        said = cli.raw(*command).message
        assert said.startswith("runs/a/history.jsonl, line 1 is damaged") and "move it away" in said
    path.unlink()
    assert (
        "history.jsonl: put it back, or ask what a resume would run by plan"
        in cli.raw("plan", "runs/a").message
    )
    assert cli("resume=runs/a", "train.steps=3").code == 0
    assert ran("runs/a") == [(2, 3, "NVFP4")]


def test_the_validation_data_do_not_depend_on_the_seed(cli: Cli) -> None:
    same = ("train.steps=1", "optim.lr=1e-9", "eval.every=1", "recipe=bf16")
    assert cli("run.name=a", *same).code == 0
    assert cli("run.name=b", "init=runs/a", "run.seed=7", *same).code == 0
    a, b = (
        next(line["val/loss"] for line in lines(f"runs/{run}") if "val/loss" in line)
        for run in "ab"
    )
    assert a == b and losses("runs/a")[1][0] != losses("runs/b")[1][0]


@pytest.mark.parametrize("options", [["model.layers=1"], ["policy.last=7"]])
def test_a_run_that_quantises_nothing_warns(cli: Cli, options: list[str]) -> None:
    ended = cli("run.name=a", "train.steps=1", *options)
    assert ended.code == 0
    assert "warning: nothing is quantised: no layer follows the recipe NVFP4" in ended.err
    assert "nothing is quantised" not in cli("plan", "recipe=bf16").err


def test_a_history_is_appended_to_and_a_torn_end_is_left_out(cli: Cli, stop_at: StopAt) -> None:
    stop_at(3)
    assert cli("run.name=a", "checkpoint.every=2").code == 137
    stop_at(-1)
    path = Path("runs/a/history.jsonl")
    first = path.read_bytes()
    place = path.stat().st_ino
    path.write_bytes(first + b'{"event": "resume", "st')
    shown = cli.raw("plan", "runs/a")
    assert shown.code == 0 and "cut off and is left out" in shown.err
    assert cli("resume=runs/a").code == 0
    assert (
        path.read_bytes().startswith(first + b'{"event": "resume", "step": 2')
        and path.stat().st_ino == place
    )
    assert [r["event"] for r in map(json.loads, path.read_text().splitlines())] == [
        "start",
        "resume",
    ]


def test_the_checkpoint_from_before_the_cooldown_is_kept_beside_the_newest(cli: Cli) -> None:
    options = ("train.steps=12", "schedule.cooldown=5", "checkpoint.every=2", "checkpoint.keep=1")
    assert cli("run.name=a", *options).code == 0
    assert steps() == [6, 12], "the cooldown begins at step 7"
    extended = cli("resume=runs/a", "resume_step=6", "train.steps=16", "run.name=longer")
    assert extended.code == 0 and "goes up" not in extended.err
    assert steps("runs/longer") == [10, 16]
    assert cli("run.name=b", *options, "checkpoint.keep_before_cooldown=false").code == 0
    assert steps("runs/b") == [12]


def test_every_start_records_what_it_ran_on(cli: Cli, stop_at: StopAt) -> None:
    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=1", *STEADY).code == 137
    stop_at(-1)
    assert cli("resume=runs/a").code == 0
    first, second = (
        record.values["environment"] for record in journal.read_journal(Path("runs/a"))
    )
    assert first == second and first["host"]
    assert (
        torch.__version__.startswith(first["versions"]["torch"])
        and first["device"] == "cpu"
        and first["ranks"] == 1
    )
    assert first["data"] and first["cores"] >= first["threads"] >= 1
