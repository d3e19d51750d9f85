"""A study sees the model that a resume would go on with, and leaves the run as it was."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from subjects import subject_of

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.lab.studies import open_subject
from fp4train.run.find import Command
from fp4train.run.record import directory as run_directory


def digests(run: Path) -> dict[str, str]:
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def test_it_is_the_checkpoint_and_the_run_is_left_as_it_was(trained: Path) -> None:
    before = digests(trained)
    newest = subject_of(trained)
    earlier = subject_of(trained, step=3)
    assert digests(trained) == before
    assert (newest.step, earlier.step) == (6, 3)
    saved = checkpoint.unflatten(
        *(lambda c: (c.tensors, c.state))(checkpoint.load(trained / "checkpoints", 3))
    )
    for name, tensor in earlier.run.model.state_dict().items():
        assert torch.equal(tensor, saved["model"][name])
    assert newest.weights != earlier.weights and newest.settings == earlier.settings


def test_a_fresh_model_is_the_one_that_the_run_began_with(trained: Path) -> None:
    from fp4train.run.build import build_model

    subject = subject_of(trained, fresh=True)
    torch.manual_seed(123)
    wanted = build_model(subject.run.config, subject.run.model.vocab_size, subject.run.device)  # type: ignore[arg-type]
    assert subject.step == 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(wanted.parameters(), subject.run.model.parameters(), strict=True)
    )


@pytest.mark.long
def test_it_can_be_put_back_if_its_optimizer_was_asked_for(trained: Path) -> None:
    subject = subject_of(trained, optimizer=True)
    before = {name: tensor.clone() for name, tensor in subject.run.model.state_dict().items()}
    for parameter in subject.run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    subject.run.optimizer.step()
    assert not all(
        torch.equal(before[name], t) for name, t in subject.run.model.state_dict().items()
    )
    assert subject.start is not None
    subject.run.restore(subject.start)
    assert all(torch.equal(before[name], t) for name, t in subject.run.model.state_dict().items())
    assert subject.run.optimizer.state and not subject_of(trained).run.optimizer.state


def test_a_run_without_a_checkpoint_can_be_studied_as_it_was_initialised(
    trained: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(trained, bare, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(
        UserError, match="no checkpoint yet; step=0 studies its model as it was initialised"
    ):
        subject_of(bare)
    assert subject_of(bare, fresh=True).weights == subject_of(trained, fresh=True).weights


def test_a_configuration_of_another_model_is_refused(trained: Path) -> None:
    cfg = run_directory.read_config(trained)
    cfg.resume, cfg.run.dir, cfg.model.width = str(trained), str(trained), 64
    with pytest.raises(UserError, match=r"model\.width: 32 → 64"):
        open_subject(Command.of(cfg))


def test_a_name_for_a_run_that_is_not_trained_is_refused(trained: Path) -> None:
    cfg = run_directory.read_config(trained)
    cfg.resume = str(trained)
    cfg.run.dir = "elsewhere"
    with pytest.raises(UserError, match=r"run\.name and run\.dir name a run that trains"):
        open_subject(Command.of(cfg))
