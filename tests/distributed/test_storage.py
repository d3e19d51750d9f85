"""Checkpoints of several ranks: any number of ranks reads them, and whatever is damaged or fails,
one is whole.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4train import checkpoint, shards
from fp4train.checkpoint import file_name
from fp4train.errors import UserError

Ranks = Any
LAST = "weights-00001-of-00002.safetensors"
PROGRAM = "import storage_ranks\nreport(storage_ranks.run(*arguments))"
SCALE = Path(__file__).parents[2] / "docs" / "scale.md"
KILLED = "; import os; os._exit(0)"
"""The others can end no collective."""


def told(
    ranks: Ranks, task: str, folder: Path, size: int, *, ends: tuple[int, ...] | None = None
) -> list[Any]:
    """What `task` gave on each rank of `size`; `ends`: their exit codes where not all are 0."""
    given = ranks.program(PROGRAM + KILLED * (ends is not None), size, task, str(folder), ends=ends)
    return [each[0] if each else None for each in given]


def test_the_documentation_names_the_files_that_two_ranks_write() -> None:
    named = re.findall(r"(?:weights|tensors)-\S+\.safetensors", SCALE.read_text(encoding="utf-8"))
    assert (
        named == [file_name(kind, rank, 2) for kind in ("weights", "tensors") for rank in (0, 1)]
        and LAST in named
    )


@pytest.fixture(scope="module")
def saved(make_ranks: Callable[[], Ranks]) -> Path:
    """Steps 1 and 2, written by two ranks in `parts`, and the same state by one in `whole`."""
    ranks = make_ranks()
    first, second = told(ranks, "save", ranks.folder, 2)
    assert first["losses"] == second["losses"]
    return Path(ranks.folder)


def test_one_process_reads_what_two_ranks_wrote(saved: Path) -> None:
    found, whole = (checkpoint.load(saved / name) for name in ("parts", "whole"))
    assert (
        found.step == whole.step == 2
        and found.state == whole.state
        and set(found.tensors) == set(whole.tensors)
    )
    for name, tensor in whole.tensors.items():
        assert found.tensors.dtype(name) == tensor.dtype and torch.equal(
            found.tensors[name], tensor
        ), name
    assert found.tensors["optimizer/embed.weight/step"].shape == (), "a number is not lost"
    body = json.loads((found.path / "state.json").read_text())
    assert body["tensors"]["aliases"] == {"model/head.weight": "model/embed.weight"}, (
        "tied weights are stored once"
    )


def missing(path: Path) -> None:
    (path / LAST).unlink()


def flipped(path: Path) -> None:
    data = bytearray((path / LAST).read_bytes())
    data[-20] ^= 1
    (path / LAST).write_bytes(data)


def truncated(path: Path) -> None:
    os.truncate(path / LAST, (path / LAST).stat().st_size - 4)


def foreign(path: Path) -> None:
    shutil.copy(path.with_name("step_00000001") / LAST, path / LAST)


def without_description(path: Path) -> None:
    (path / "state.json").unlink()


def linked(path: Path) -> None:
    missing(path)
    (path / LAST).symlink_to(path.with_name("step_00000001") / LAST)


DAMAGES: dict[Callable[[Path], None], str] = {
    missing: f"{LAST} is missing",
    flipped: f"{LAST} is damaged (checksum differs)",
    truncated: "bytes instead of",
    foreign: f"{LAST} is damaged (checksum differs)",
    without_description: "state.json is missing",
    linked: "it is a link, not a file",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_taken(
    saved: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(saved / "parts", tmp_path / "parts")
    damage(tmp_path / "parts" / "step_00000002")
    found = checkpoint.load(tmp_path / "parts")
    ((path, reason),) = found.skipped
    assert found.step == 1 and path.name == "step_00000002" and DAMAGES[damage] in reason
    with pytest.raises(UserError, match=r"the checkpoint of step 2 in .* cannot be used"):
        checkpoint.load(tmp_path / "parts", 2)


def test_a_file_that_is_changed_after_it_was_verified_is_not_read(
    saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / "parts", tmp_path / "parts")
    found = checkpoint.load(tmp_path / "parts")
    flipped(found.path)
    with pytest.raises(OSError, match="changed after it was verified"):
        dict(found.tensors)


@pytest.mark.long
def test_several_ranks_agree_on_the_checkpoint_whoever_sees_the_damage(
    ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    for damage in DAMAGES:
        shutil.copytree(saved / "parts", tmp_path / damage.__name__)
        damage(tmp_path / damage.__name__ / "step_00000002")
    first, second = told(ranks, "find", tmp_path, 2)
    assert first == second
    for damage, reason in DAMAGES.items():
        step, said = first[damage.__name__]
        assert step == 1 and reason in said and said.startswith("rank ")


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_other_numbers_of_ranks_go_on_from_it_with_equal_bits(
    ranks: Ranks, saved: Path, size: int
) -> None:
    for each in told(ranks, "load", saved, size):
        assert each["different"] == [] and each["step"] == 2


@pytest.mark.long
def test_four_ranks_write_and_fewer_go_on(ranks: Ranks, tmp_path: Path) -> None:
    """Among them hybrid and two-dimensional shards, each element of which one rank writes."""
    wrote = told(ranks, "save", tmp_path, 4)
    total = sum(
        t.nbytes
        for n, t in checkpoint.load(tmp_path / "whole").tensors.items()
        if n != "model/head.weight"
    )
    assert sum(each["bytes"] for each in wrote) == total
    for size in (2, 1):
        for each in told(ranks, "load", tmp_path, size):
            assert each["different"] == []
            assert size != 1 or each["losses"] == pytest.approx(wrote[0]["losses"])


@pytest.mark.long
def test_a_rank_that_is_killed_in_its_write_leaves_the_checkpoint_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    left, _ = told(ranks, "kill", folder, 2, ends=(0, -9))
    assert "a rank has ended, or does not answer" in left
    assert checkpoint.load(folder).step == 1


@pytest.mark.long
def test_checkpoints_are_written_while_ranks_train_and_all_hear_how_it_went(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = told(ranks, "async", tmp_path, 2)
    assert first == second, "every rank has the same outcome"
    assert [step for step, *_ in first] == [1, 2, 3, 4]
    assert first[0][1:] == first[3][1:] == [None, None]
    assert "rank 1 on " in first[1][1] and "No space left on device" in first[1][1]
    assert "rank 1 on " in first[2][2] and "optimizer/blocks.0.bias/exp_avg" in first[2][2]
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1, 4]


def test_a_part_lies_inside_of_its_tensor() -> None:
    with pytest.raises(
        ValueError, match=r"a part of shape \[2\] at \[3\] does not lie in a tensor of \[4\]"
    ):
        shards.TensorShard(shape=(4,), offsets=(3,), tensor=torch.zeros(2))


@pytest.mark.long
def test_every_way_to_cut_a_model_draws_the_same_weights(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP, HSDP, and FSDP with tensor parallel, on 1, 2 and 4 ranks; the weights are never whole
    on a rank.
    """
    (alone,) = told(ranks, "born", tmp_path, 1)
    for size in (2, 4):
        for each in told(ranks, "born", tmp_path, size):
            for how, (weights, loss) in each.items():
                expected, first_loss = alone["sharded"]
                assert weights == expected, f"{how} on {size}"
                assert loss in (None, pytest.approx(first_loss, rel=1e-6))
