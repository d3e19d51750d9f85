"""Things of other kinds under the names of a run's files: each is named with its kind and a way on."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_line import Cli
from lengths import long_but

KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
}
ENDLESS = "a link to /dev/zero"


def put(path: Path, kind: str) -> None:
    """Put a thing of this kind in the place of a file, or of a folder that is empty."""
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    if kind == ENDLESS:
        path.symlink_to("/dev/zero")
    else:
        KINDS[kind](path)


def told(kind: str, expected: str = "file") -> str:
    """What is said of it."""
    if "link" in kind:
        begin = f"it is a link, not a {expected}, and links are not followed here"
    else:
        begin = f"it is {kind}, not a {expected}"
    return f"{begin}: remove it, or put the {expected} itself back"


@pytest.fixture
def without_privileges() -> Iterator[None]:
    """Root's right to open every file is put away, if this is root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    rights = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, rights) == 0
    effective = rights[0]
    rights[0] = effective & ~0b110
    assert libc.capset(header, rights) == 0
    yield
    rights[0] = effective
    assert libc.capset(header, rights) == 0


@pytest.mark.parametrize("kind", long_but([ENDLESS], ["a pipe", ENDLESS]))
def test_a_lock_of_another_kind_is_named_with_what_to_do(cli: Cli, kind: str) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    put(run / ".lock", kind)
    evaluated = cli.raw("eval", "runs/a")
    assert evaluated.message == f"the scores are not recorded: runs/a/.lock: {told(kind)}"
    resumed = cli.raw("resume=runs/a", "train.steps=3", *cli.paths)
    assert resumed.message == f"runs/a cannot be written: runs/a/.lock: {told(kind)}"
    assert cli.raw("swap", "runs/a", "recipe=bf16").message == f"runs/a/.lock: {told(kind)}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_of_another_kind_is_named_by_every_verb(cli: Cli, kind: str) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    put(run / "config.yaml", kind)
    why = f"runs/a is not a run directory (its config.yaml is {kind}, not a file: put the run's own"
    for command in (["eval"], ["sample", "prompt=a"], ["plan"], ["swap"]):
        message = cli.raw(command[0], "runs/a", *command[1:]).message
        assert message.startswith(why) and "runs holds a" not in message
    again = cli("run.name=a", "train.steps=2").message
    assert f"and its config.yaml is {kind}, not a file: put the run's own back" in again


@pytest.mark.parametrize("name", ["history.jsonl", "metrics.jsonl", "checkpoints"])
def test_records_of_another_kind_are_named_by_what_reads_them(cli: Cli, name: str) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    if name == "checkpoints":
        os.rename(run / name, "elsewhere")
    put(run / name, "a pipe")
    expected = "folder" if name == "checkpoints" else "file"
    why = f"runs/a/{name} cannot be read: {told('a pipe', expected)}"
    for command in (["sample", "runs/a", "prompt=a"], ["check", "runs/a"]):
        assert cli.raw(*command).message.startswith(why)


def test_a_file_without_permission_is_named_with_the_command_that_gives_it(
    cli: Cli, without_privileges: None
) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    checkpoint = "checkpoints/step_00000002"
    for name, rights in (
        ("config.yaml", "rw"),
        ("history.jsonl", "rw"),
        ("metrics.jsonl", "rw"),
        (f"{checkpoint}/weights.safetensors", "rw"),
        (checkpoint, "rwx"),
        ("checkpoints", "rwx"),
    ):
        mode = (run / name).stat().st_mode
        (run / name).chmod(0)
        message = cli.raw("sample", "runs/a", "prompt=a").message
        assert f"permission denied: allow it with chmod u+{rights} runs/a/{name}" in message
        assert "Errno" not in message
        (run / name).chmod(mode)
    (run / ".lock").chmod(0)
    message = cli.raw("swap", "runs/a", "recipe=bf16").message
    assert message == "runs/a/.lock: permission denied: allow it with chmod u+rw runs/a/.lock"


def test_what_is_written_for_readers_alone_costs_a_warning_that_names_it(cli: Cli) -> None:
    run = cli.trained("run.name=a", "train.steps=2")
    names = ("console.log", "plan.txt", "heartbeat.json")
    for name in names:
        put(run / name, "a folder")
    (run / "swap_requests").write_text("")
    resumed = cli.raw("resume=runs/a", "train.steps=3", *cli.paths)
    assert resumed.code == 0
    shown = resumed.err + resumed.out
    for name in names:
        assert f"runs/a/{name}" in shown
    assert shown.count(told("a folder")) == len(names)
    assert "every layer and GEMM" not in shown
    requests = f"runs/a/swap_requests: {told('a file', 'folder')}"
    assert f"requests: {requests}" in resumed.err
    assert "Errno" not in resumed.err and "No such file" not in resumed.err


def test_a_source_of_data_is_refused_with_what_is_meant(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2")
    message = cli.raw("eval", "runs/a", "data=text").message
    assert message.startswith("data=text: eval takes the source of data of the run; its paths are")


@pytest.mark.parametrize("target", ["nowhere", "a"])
def test_a_link_that_leads_nowhere_in_the_place_of_a_run_is_called_one(
    cli: Cli, target: str
) -> None:
    Path("runs").mkdir()
    Path("runs/a").symlink_to(target)
    for command in (["report", "runs/a"], ["compare", "runs/a", "runs/b"], ["plan", "runs/a"]):
        message = cli.raw(*command).message
        assert "runs/a is not a run directory (it has no config.yaml)" in message
    message = cli("run.name=a", "train.steps=1").message
    assert message.startswith("runs/a cannot be written: it is a link that leads ")
