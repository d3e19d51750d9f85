"""Checkpoints survive what happens to disks and processes: kills, truncation, flipped bits, a full
disk.
"""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from forked import forked
from small_checkpoints import ONE, flip, reseal, save_steps

from fp4train import checkpoint
from fp4train.checkpoint import CheckpointError, load, save, steps
from fp4train.errors import UserError
from fp4train.files import Folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize(
    "damage", [truncate, flip, empty, zeros, Path.unlink], ids=lambda f: f.__name__
)
def test_damage_falls_back_to_the_previous_and_says_so(
    tmp_path: Path, file: str, damage: object
) -> None:
    save_steps(tmp_path, 10, 20)
    damage(tmp_path / "step_00000020" / file)  # type: ignore[operator]
    found = load(tmp_path)
    assert found.step == 10 and found.tensors["w"][0] == 10
    [(path, reason)] = found.skipped
    assert path.name == "step_00000020" and file in reason


def test_a_changed_value_in_the_state_is_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    file = tmp_path / "step_00000010" / "state.json"
    body = json.loads(file.read_text())
    body["state"]["step"] = 11
    file.write_text(json.dumps(body))
    with pytest.raises(UserError, match="checksum"):
        load(tmp_path)


def test_nothing_usable_names_every_checkpoint_and_reason(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    truncate(tmp_path / "step_00000010" / "tensors.safetensors")
    (tmp_path / "step_00000020" / "state.json").unlink()
    with pytest.raises(
        UserError, match=r"step_00000020: state.json is missing; step_00000010: .* bytes instead of"
    ):
        load(tmp_path)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint in"):
        load(tmp_path / "nowhere")


def test_a_step_asked_for_is_given_or_refused_but_never_another(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    assert load(tmp_path, 10).step == 10
    with pytest.raises(UserError, match="no checkpoint of step 15; it has 10, 20"):
        load(tmp_path, 15)
    flip(tmp_path / "step_00000020" / "tensors.safetensors")
    with pytest.raises(UserError, match=r"checksum differs.*Others in the folder: 10"):
        load(tmp_path, 20)


def test_a_newer_format_is_refused_instead_of_skipped(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    file = tmp_path / "step_00000020" / "state.json"
    reseal(file, lambda body: body.update(version=4))
    with pytest.raises(UserError, match=r"version 4; this fp4train reads up to 3. Update"):
        load(tmp_path)


def test_a_damaged_version_digit_is_damage_and_no_newer_fp4train(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    file = tmp_path / "step_00000020" / "state.json"
    file.write_text(file.read_text().replace('"version": 3', '"version": 4'))
    found = load(tmp_path)
    assert found.step == 10 and "damaged (checksum differs)" in found.skipped[0][1]


def test_foreign_directories_are_no_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    (tmp_path / "step_abc").mkdir()
    assert steps(tmp_path) == [10]


def test_a_file_under_the_name_of_a_checkpoint_is_passed_over_and_pushes_out_no_good_one(
    tmp_path: Path,
) -> None:
    save_steps(tmp_path, 10)
    (tmp_path / "step_00000099").write_text("a file")
    checkpoint = load(tmp_path)
    assert checkpoint.step == 10
    assert "it is a file, not a folder: remove it" in checkpoint.skipped[0][1]
    save_steps(tmp_path, 100, keep=2)
    assert steps(tmp_path) == [10, 99, 100]
    save_steps(tmp_path, 99, keep=2)
    assert load(tmp_path, step=99).step == 99


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["tensors", "state", "fsync", "rename"])
def test_a_full_disk_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save_steps(tmp_path, 10, keep=1)
    with monkeypatch.context() as patch:
        if where == "tensors":

            def half(descriptor: int, tensors: object) -> None:
                os.write(descriptor, b"half")
                no_space()

            patch.setattr(checkpoint.writing, "write_parts", half)
        elif where == "state":
            patch.setattr(Folder, "write", no_space)
        elif where == "fsync":
            patch.setattr(os, "fsync", no_space)
        else:
            patch.setattr(os, "rename", no_space)
        with pytest.raises(CheckpointError, match=r"step 20 not written.*No space.*untouched: 10"):
            save(tmp_path, 20, ONE, {}, keep=1)
    assert os.listdir(tmp_path) == ["step_00000010"]
    assert load(tmp_path).step == 10
    save_steps(tmp_path, 20, keep=1)
    assert steps(tmp_path) == [20]


def test_a_full_disk_while_replacing_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10)
    rename = os.rename

    def fail_for_the_new(source: str, target: str, **folders: int) -> None:
        if source.startswith(".tmp_"):
            no_space()
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", fail_for_the_new)
    with pytest.raises(CheckpointError):
        save(tmp_path, 10, ONE, {}, keep=1)
    assert load(tmp_path).state == {"step": 10}
    assert os.listdir(tmp_path) == ["step_00000010"]


def test_an_exception_from_a_signal_leaves_no_half_written_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.writing, "write_parts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, ONE, {}, keep=1)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_set_aside_by_a_killed_process_is_found_and_put_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    os.rename(tmp_path / "step_00000010", tmp_path / ".old_step_00000010")
    assert steps(tmp_path) == [10] and load(tmp_path).step == 10
    save_steps(tmp_path, 20)
    assert sorted(os.listdir(tmp_path)) == ["step_00000010", "step_00000020"]


def killed(folder: Path, moment: str) -> None:
    """Save two checkpoints; a kill at `moment` of the second."""
    save(folder, 10, {"w": torch.ones(1000)}, {}, keep=1)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(descriptor: int, tensors: object) -> None:
        os.write(descriptor, b"half")
        die()

    with pytest.MonkeyPatch.context() as patch:
        if moment == "written":
            patch.setattr(checkpoint.writing, "_replace", die)
        elif moment == "half":
            patch.setattr(checkpoint.writing, "write_parts", half)
        elif moment == "pruning":
            patch.setattr(
                Folder,
                "remove_folder",
                lambda self, name: die() if "step_00000010" in name else None,
            )
        save(folder, 20, {"w": torch.ones(1000)}, {}, keep=1)


@pytest.mark.parametrize(("moment", "left"), [("half", 10), ("written", 10), ("pruning", 20)])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, moment: str, left: int
) -> None:
    assert forked(lambda: killed(tmp_path, moment)) == -signal.SIGKILL
    assert load(tmp_path).step == left
    assert any(name.startswith(".tmp_") for name in os.listdir(tmp_path))
    save_steps(tmp_path, 30, keep=2)
    assert sorted(os.listdir(tmp_path)) == [f"step_{left:08d}", "step_00000030"]
