"""Copies of runs on object stores, uploaded beside training."""

import shutil
from collections.abc import Iterator
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
    store.get("lake/a/", "runs/a/", recursive=True)
    ended = cli("resume=runs/a", also, *cli.paths)
    assert ended.code == 0 and "step_00000009" in ended.err  # passed over, with a line
    assert losses("runs/a") == losses("runs/whole")
    assert steps("runs/a") == kept(store) == steps("runs/whole")
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
