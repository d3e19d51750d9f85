"""Copies of runs on object stores, uploaded beside training."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from command_line import STEADY, Cli, StopAt, losses, steps
from object_store import Store, serving

ALSO = ("checkpoint.every=2", "checkpoint.keep=2", *STEADY)


@pytest.fixture
def memory() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/lake", recursive=True)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with serving(monkeypatch) as store:
        yield store


def kept(store: Any, run: str = "lake/a") -> list[int]:
    """The steps that have a whole checkpoint there."""
    store.invalidate_cache()
    return sorted(int(p.split("/")[-2][5:]) for p in store.find(run) if p.endswith("state.json"))


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.long)])
def test_a_run_whose_machine_is_lost_goes_on_from_its_copy(
    cli: Cli, stop_at: StopAt, kind: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(kind)
    store = fsspec.filesystem(kind)
    cli.trained("run.name=whole", *ALSO, "train.steps=10")
    stop_at(7)
    also = f"checkpoint.also={kind}://lake"
    assert cli("run.name=a", *ALSO, "train.steps=10", also).code == 137
    stop_at(-1)
    assert kept(store) == steps("runs/a") == [2, 4, 6]  # nothing is computed from 6 yet
    shutil.rmtree("runs/a")
    store.pipe("lake/a/checkpoints/step_00000009/weights.safetensors", b"half")
    assert cli(f"resume={kind}://lake/a", also, *cli.paths).code == 0
    assert losses("runs/a") == losses("runs/whole")
    assert steps("runs/a") == steps("runs/whole") == [8, 10]
    assert kept(store) == [2, 4, 8, 10]  # what was not brought stays
    assert not store.exists("lake/a/checkpoints/step_00000009")


def test_checkpoints_that_were_not_brought_back_stay_in_the_copy(cli: Cli, memory: Any) -> None:
    also = "checkpoint.also=memory://lake"
    cli.trained("run.name=a", *ALSO, "train.steps=6", also)
    assert kept(memory) == [4, 6]
    shutil.rmtree("runs/a/checkpoints/step_00000004")
    assert cli("resume=runs/a", also, "train.steps=8").code == 0
    assert steps("runs/a") == [6, 8] and kept(memory) == [4, 6, 8]


def test_a_store_that_fails_is_tried_again_and_never_ends_a_run(
    cli: Cli, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3]
    original = type(memory).put_file

    def put_file(store: Any, path: str, name: str, **options: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PermissionError("Access Denied")
        original(store, path, name, **options)

    monkeypatch.setattr(type(memory), "put_file", put_file)
    ended = cli("run.name=a", *ALSO, "checkpoint.also=memory://lake")
    assert ended.code == 0 and ended.err.count("Access Denied (PermissionError); step 2 is") == 1
    assert kept(memory) == steps("runs/a")
    other = cli("run.name=a", *ALSO, "run.overwrite=true", "checkpoint.also=memory://lake")
    assert other.code == 0 and "memory://lake/a holds another run" in other.err
    for place in ("second", "file:///second"):
        assert "rsync" in cli("run.name=c", f"checkpoint.also={place}").message


@pytest.mark.long
def test_a_bucket_without_permission_costs_a_warning(cli: Cli, s3: Store) -> None:
    s3.faults = ["403"] * 99
    s3.everywhere = True
    ended = cli("run.name=a", "train.steps=1", "checkpoint.also=s3://lake")
    assert (
        ended.code == 0 and "checkpoint.also: s3://lake/a cannot be read: AccessDenied" in ended.err
    )


def test_a_command_brings_the_checkpoint_that_it_goes_on_from_and_no_other(
    cli: Cli, memory: Any
) -> None:
    assert cli("run.name=a", *ALSO, "train.steps=6", "checkpoint.also=memory://lake").code == 0
    source = Path("runs/a")
    shutil.rmtree(source)
    begun = cli("init=memory://lake/a@4", "run.name=b", "train.steps=1")
    assert begun.code == 0 and steps(source) == [4]
    assert cli("resume=memory://lake/a", "resume_step=4", "train.steps=7", "run.name=c").code == 0
    assert steps(source) == [4]
    assert cli("resume=memory://lake/a", "train.steps=8", "checkpoint.also=null").code == 0
    assert steps(source) == [6, 8]
    assert "8 steps are done" in cli("resume=memory://lake/a").out  # the newer is here


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.long)])
def test_what_cannot_be_brought_is_refused_in_one_line(
    cli: Cli, kind: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(kind)
    store = fsspec.filesystem(kind)
    source = cli.trained("run.name=a", "train.steps=2")
    store.put(f"{source}/", "lake/a/", recursive=True)
    shutil.rmtree(source)
    place = f"{kind}://lake/a"

    def refused(*words: str) -> str:
        ended = cli(*words)
        assert ended.code == 1
        return ended.message

    for nothing in (f"{kind}://none/a", f"{kind}://lake/b", f"{place}/checkpoints"):
        message = refused(f"resume={nothing}")
        assert f"{nothing} holds no run" in message or f"{nothing}: the store lacks it" in message
    assert "whole checkpoint step_00000001" in refused(f"init={place}@1")
    assert "abc:// is no path here" in refused("resume=abc://lake/a")
    weights = "lake/a/checkpoints/step_00000002/weights.safetensors"
    data = store.cat(weights)
    store.pipe(weights, data[:-1] + b"!")
    assert "weights.safetensors is damaged there" in refused(f"resume={place}")
    store.rm(weights)
    assert "weights.safetensors: the store lacks it" in refused(f"resume={place}")
    store.pipe(weights, data)
    assert not (source / "config.yaml").exists()
    assert cli(f"resume={place}", "train.steps=3", *cli.paths).code == 0  # goes on where it was cut
    shutil.move(source, "runs/b")
    cli.trained("run.name=a", "train.steps=1", "run.seed=5")
    assert "runs/a holds another run than" in refused(f"resume={place}")


@pytest.mark.long
def test_faults_of_a_store_cost_time_or_end_a_start(cli: Cli, s3: Store) -> None:
    source = cli.trained("run.name=a", "train.steps=2")
    s3_store = fsspec.filesystem("s3")
    s3_store.put(f"{source}/", "lake/a/", recursive=True)
    shutil.rmtree(source)
    s3.faults = ["403"] * 99
    assert "cannot be read: AccessDenied" in cli("resume=s3://lake/a").message
    s3.faults = ["cut", "503", "cut"]
    assert cli("resume=s3://lake/a", "train.steps=3", *cli.paths).code == 0
    assert not s3.faults


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.long)])
def test_an_export_is_copied_with_its_configuration_last_or_stays_here(
    cli: Cli, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(kind)
    store = fsspec.filesystem(kind)
    source = cli.trained("run.name=a", "train.steps=1")
    words = ("export", str(source), "to=hf", f"out={kind}://lake/model")
    put: list[str] = []
    original = type(store).put_file

    def put_file(store: Any, path: str, name: str, **options: Any) -> None:
        put.append(name.rpartition("/")[2])
        if len(put) == 3:
            raise PermissionError("Access Denied")
        original(store, path, name, **options)

    monkeypatch.setattr(type(store), "put_file", put_file)
    message = cli.raw(*words).message
    assert "Access Denied" in message and message.endswith(
        "; model has the export: copy it there, or remove it"
    )
    assert "model is there already" in cli.raw(*words).message
    shutil.move("model", "first")
    assert cli.raw(*words).code == 0  # over what was left there
    assert put[-1] == "config.json" and not Path("model").exists()
    assert {p.rpartition("/")[2]: store.cat(p) for p in store.find("lake/model")} == {
        path.name: path.read_bytes() for path in Path("first").iterdir()
    }
    assert f"out={kind}://lake/model is there already" in cli.raw(*words).message
