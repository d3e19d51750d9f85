"""Things of other kinds under the names of a run's files: each is named with its kind and a way on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli

KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}


def put(path: Path, kind: str) -> None:
    path.unlink()
    KINDS[kind](path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_of_another_kind_is_named_with_what_to_do(cli: Cli, kind: str) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    put(run / ".lock", kind)
    told = f"runs/a/.lock: it is {kind}, not a file; links are not followed here. It is no lock of "
    for command in (["eval", "runs/a"], ["resume=runs/a", "train.steps=3", *cli.paths]):
        message = cli.raw(*command).message
        assert message.startswith(told) and message.endswith("fp4train's: remove it")


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_of_another_kind_is_named_by_every_verb(cli: Cli, kind: str) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    put(run / "config.yaml", kind)
    told = (
        f"runs/a is not a run directory (its config.yaml is {kind}, not a file: put the run's own"
    )
    for command in (["eval"], ["sample", "prompt=a"], ["plan"], ["swap"]):
        message = cli.raw(command[0], "runs/a", *command[1:]).message
        assert message.startswith(told) and "runs holds a" not in message


def test_a_folder_in_the_place_of_a_record_is_named_where_a_run_is_replaced(cli: Cli) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    put(run / "history.jsonl", "a folder")
    message = cli("run.name=a", "train.steps=2", "run.overwrite=true").message
    assert message.startswith(
        "run.overwrite=true: runs/a/history.jsonl: it is a folder, not a file"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_of_an_error_is_in_what_is_said_of_a_record(cli: Cli, kind: str) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    put(run / "history.jsonl", kind)
    message = cli.raw("plan", "runs/a").message
    assert message.startswith(
        f"runs/a/history.jsonl cannot be read: it is {kind}, not a file; links are not followed "
        "here; move it away"
    )
