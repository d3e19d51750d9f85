"""Commands that are no commands end with one message that says which is meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli


@pytest.mark.long
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fp4train", "plan"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0 and ended.stderr == ""
    os.close(write)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "unknown verb 'pln'; did you mean 'plan'?"),
        (["compare", "runs/a"], "compare needs two or more run directories"),
        (["formats", "e2m1"], "formats takes plugins=[…] only"),
        (["recipes", "quartet"], "no such recipe or paper; did you mean 'quartet_ii'?"),
        (["plan", "data=text"], "data.path must be given: data.path=…"),
        (
            ["plan", "data/tokenizer=bpe", "data.tokenizer.vocab=9"],
            "did you mean 'data.tokenizer.vocab_size'?",
        ),
        (
            ["recipe@x=bf16"],
            "'recipe@x=bf16': a group has one place in the configuration, without @: recipe=bf16",
        ),
        (["recipe", "bf16"], "unknown verb 'recipe'; did you mean recipe=bf16?"),
        (["resume", "runs/a"], "unknown verb 'resume'; did you mean resume=runs/a?"),
        (["resume="], "resume= names no run"),
        (["--recipe=bf16"], "unknown flag --recipe; keys are written without dashes"),
        (["--config-name", "foo"], "unknown flag --config-name; did you mean '--config-dir'?"),
        (["--cfg", "job", "resume=runs/a"], "that of RUN is RUN/config.yaml, and fp4train plan"),
        (["recipe", "=", "bf16"], "unknown verb 'recipe'"),
        (
            ["train", "recipe=bf16,mxfp8"],
            "recipe=bf16,mxfp8 holds several values: -m sweeps over them",
        ),
        (["policy.keep=a,b"], "a list has brackets, policy.keep=[…]"),
        (["-m", "recipe=bf16,"], "write key=value, a list without spaces, KEY=A,B"),
        (["lr=0.1"], "unknown key 'lr'; did you mean 'optim.lr'?"),
        (["recipe=fp8"], "did you mean fp8_block or fp8_current or fp8_delayed or fp8_row?"),
        (["recipe.element=e2m1"], "unknown key 'recipe.element': it is one of recipe="),
        (
            ["plan", "gpu=H20"],
            "gpu='H20' is not a GPU whose peak rates are known; did you mean 'H200'?",
        ),
        (["swap"], "swap needs one run directory: fp4train swap RUN recipe=NAME [at=STEP]"),
        (["swap", "resume=runs/a", "recipe=bf16"], "plugins): fp4train swap RUN recipe=NAME"),
        (
            ["compare", "runs/a", "runs/b", "out="],
            "out=: the name must end in .png or .svg or .pdf or .csv or .json",
        ),
        (
            ["compare", "runs/a", "runs/b", "out=gap.eps"],
            "out=gap.eps: the name must end in .png or .svg or .pdf or .csv",
        ),
    ],
)
def test_verbs_explain_themselves(cli: Cli, arguments: list[str], message: str) -> None:
    ended = cli.raw(*arguments)
    assert ended.code == 1 and message in ended.message


def test_what_is_near_a_run_directory_is_told_from_one(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    below = "runs/a/checkpoints/step_00000001"
    assert (
        cli(f"resume={below}").message == f"{below} is not a run directory, it lies in one: runs/a"
    )
    assert "no key=value; a run goes on with resume=runs/a" in cli.raw("train", "runs/a").message
    said = cli.raw("compare", "runs/a", "runs/aa").message
    assert said == "runs/aa is not a run directory (it has no config.yaml); runs holds a"
    inside = cli.raw("compare", "runs/a", "runs/a/metrics.jsonl").message
    assert inside == "runs/a/metrics.jsonl is not a run directory, it lies in one: runs/a"
    for words in (["resume=a"], ["swap", "a"], ["compare", "a", "runs/a"]):
        assert cli.raw(*words).message.endswith("; did you mean runs/a?")
    Path("t.txt").write_text("text")
    for verb in (["swap", "t.txt"], ["plan", "t.txt"], ["resume=t.txt"]):
        assert "t.txt is not a run directory (it has no config.yaml)" in cli.raw(*verb).message


def test_weights_of_a_run_are_no_run_and_the_command_that_is_meant_is_told(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    said = {
        ("resume=runs/a@1",): "all of its state: resume=runs/a resume_step=1",
        ("resume=runs/a@1:ema", "train.steps=2"): "all of its state: resume=runs/a resume_step=1",
        ("plan", "resume=runs/a:ema"): "all of its state: resume=runs/a",
        ("plan", "runs/a@1"): "runs/a@1 names weights of runs/a, and here the run itself is named",
        ("swap", "runs/a:ema", "recipe=bf16"): "runs/a:ema names weights of runs/a, and here",
        ("compare", "runs/a@1", "runs/a"): "runs/a@1 names weights of runs/a, and here the run",
    }
    for words, message in said.items():
        refused = cli.raw(*words)
        assert refused.code == 1 and message in refused.message, words
    Path("runs/a").rename("runs/a@1")
    assert cli.raw("resume=runs/a@1", "train.steps=2", *cli.paths).code == 0, "a name of a folder"


def test_runs_that_are_not_named_are_counted(cli: Cli) -> None:
    for number in range(11):
        Path(f"runs/r{number:02}").mkdir(parents=True)
        Path(f"runs/r{number:02}/config.yaml").touch()
    said = cli.raw("resume=runs/other").message
    assert said.endswith("; runs holds " + ", ".join(f"r{n:02}" for n in range(8)) + " and 3 more")


def test_branches_of_a_sweep_over_a_resumed_run_are_named(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2")
    refused = cli("-m", "resume=runs/a", "recipe=bf16,mxfp8", "train.steps=3").err
    assert (
        refused.count("makes a branch of resume=runs/a at each point: name them, run.name=…") == 2
    )
    assert cli("-m", "resume=runs/a", "recipe=bf16,mxfp8", "train.steps=3", "run.name=b").code == 0
    assert sorted(p.name for p in Path("runs").glob("[!.]*")) == [
        "a",
        "b-recipe=bf16",
        "b-recipe=mxfp8",
    ]
