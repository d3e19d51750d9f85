"""Forks of a checkpoint: trained as a run trains, equal to the bit whatever ran before them, paired
by their seeds.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import lines
from lengths import long_but

import fp4train.lab.studies.forks as forks
from fp4train.config import plain
from fp4train.errors import UserError
from fp4train.lab.studies import (
    Fork,
    ForkSettings,
    RecipeCandidate,
    Subject,
    candidates,
    open_checkpoint,
    sweep_axes,
)
from fp4train.lab.studies.forks import begin, branch, fork
from fp4train.precision import Recipe
from fp4train.run.record.directory import read_config
from fp4train.run.run import Run

LINEAR = ForkSettings(steps=3, schedule="linear", lr=3e-3, batches=1)


@pytest.fixture(scope="module")
def subject(trained: Path) -> Subject:
    return open_checkpoint(trained, 3)


def candidate(run: Path, *words: str) -> RecipeCandidate:
    return candidates(sweep_axes(words), {**plain(read_config(run)), "phases": {}})[0]


def numbers(found: Fork) -> dict[str, Any]:
    return {key: value for key, value in asdict(found).items() if key != "seconds"}


def test_a_fork_has_parts_of_its_own_and_records_nothing(trained: Path, subject: Subject) -> None:
    """A checkpoint, step or audit of a fork is the fork's, from its making on."""
    chosen = branch(subject, candidate(trained, "recipe=bf16"), LINEAR)
    copy = begin(subject, chosen, LINEAR, 0)
    parts = [copy.saver, copy.runner, copy.companions, *copy.states]
    assert all(part.run is copy for part in parts)
    assert copy.record.journal.records == []
    assert subject.run.saver.run is subject.run


def test_a_fork_by_the_runs_own_schedule_seed_and_recipe_is_the_run(
    trained: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: phases and cooldown included."""
    monkeypatch.setattr(forks, "fork_seed", lambda seed, number: seed)
    own = ForkSettings(steps=3, schedule="own", lr=1.0, batches=1)
    found = fork(
        subject, branch(subject, candidates([], plain(read_config(trained)))[0], own), own, 0
    )
    trained_on = [line for line in lines(trained) if "train/loss" in line][3:]
    assert (found.high, found.recipe) == (
        trained_on[-1]["val/loss"],
        trained_on[-1]["val/loss_recipe"],
    )
    assert found.train == sum(line["train/loss"] for line in trained_on) / 3


@pytest.mark.parametrize("recipe", long_but(["fp8_delayed"], ["nvfp4", "fp8_delayed", "fp16"]))
def test_a_fork_is_the_same_to_the_bit_whatever_ran_before_it(
    trained: Path, subject: Subject, recipe: str
) -> None:
    chosen = branch(subject, candidate(trained, f"recipe={recipe}", "policy=all"), LINEAR)
    first = numbers(fork(subject, chosen, LINEAR, 0))
    fork(subject, branch(subject, candidate(trained, "recipe=mxfp4"), LINEAR), LINEAR, 1)
    assert numbers(fork(subject, chosen, LINEAR, 0)) == first
    assert numbers(fork(open_checkpoint(trained, 3), chosen, LINEAR, 0)) == first
    assert numbers(fork(subject, chosen, LINEAR, 1)) != first


def test_candidates_of_a_seed_see_the_same_batches_and_other_seeds_see_others(
    trained: Path, subject: Subject
) -> None:
    seen = []
    for recipe, number in (("bf16", 0), ("nvfp4", 0), ("bf16", 1)):
        run = begin(
            subject, branch(subject, candidate(trained, f"recipe={recipe}"), LINEAR), LINEAR, number
        )
        seen.append(torch.cat([run.data.training.batch(step)[0] for step in range(3)]))
        assert (
            run.data.validation is subject.run.data.validation
            and run.config.run.seed != subject.run.config.run.seed
        )
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_the_rate_falls_from_that_of_the_checkpoint_linearly_to_zero(
    trained: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    original = forks.train_step

    def step(run: Any, recipe: Any) -> Any:
        done = original(run, recipe)
        rates.append(done.values["train/lr"])
        return done

    monkeypatch.setattr(forks, "train_step", step)
    fork(subject, branch(subject, candidate(trained, "recipe=bf16"), LINEAR), LINEAR, 0)
    assert rates == pytest.approx([3e-3, 2e-3, 1e-3], rel=1e-12)


def test_phases_of_a_linear_fork_count_from_its_beginning_and_its_cooldown_is_the_whole(
    trained: Path, subject: Subject
) -> None:
    whole = branch(subject, candidate(trained, "recipe=nvfp4", "phases=cooldown_bf16"), LINEAR)
    assert [(s.start, s.stop, s.recipe.name) for s in whole.plan.stretches] == [(0, 3, "BF16")]
    words = ("recipe=nvfp4", "phases=cooldown_bf16", "phases.cooldown.start=2")
    late = branch(subject, candidate(trained, *words), LINEAR)
    assert [(s.start, s.stop, s.recipe.name) for s in late.plan.stretches] == [
        (0, 2, "NVFP4"),
        (2, 3, "BF16"),
    ]


def test_a_fork_leaves_the_run_directory_as_it_is(trained: Path, subject: Subject) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}

    before = files()
    fork(subject, branch(subject, candidate(trained, "recipe=nvfp4"), LINEAR), LINEAR, 0)
    assert files() == before


def test_a_fork_that_diverges_says_where(trained: Path, subject: Subject) -> None:
    wild = replace(LINEAR, lr=1e30)
    found = fork(subject, branch(subject, candidate(trained, "recipe=bf16"), wild), wild, 0)
    assert found.recipe is None and found.high is None and found.train is None
    assert found.problem is not None and "first non-finite: " in found.problem
    after = fork(subject, branch(subject, candidate(trained, "recipe=bf16"), LINEAR), LINEAR, 0)
    assert after.recipe is not None and math.isfinite(after.recipe), (
        "the next one begins at the checkpoint"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("recipe=fp16",), [65536.0, 65536.0, 65536.0]),
        (("recipe=bf16",), [1.0, 1.0, 1.0]),
        (
            ("recipe=nvfp4_ue5m3", "phases=cooldown_bf16", "phases.cooldown.start=2"),
            [65536.0, 65536.0, 1.0],
        ),
    ],
    ids=["FP16", "BF16", "a phase in BF16"],
)
def test_a_fork_has_the_loss_scale_of_its_own_recipes(
    words: tuple[str, ...],
    expected: list[float],
    trained: Path,
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scales = []
    step = forks.train_step

    def noting(run: Run, recipe: Recipe) -> Any:
        scales.append(run.loss_scale.value)
        return step(run, recipe)

    monkeypatch.setattr(forks, "train_step", noting)
    fork(subject, branch(subject, candidate(trained, *words), LINEAR), LINEAR, 0)
    assert scales == expected


@pytest.mark.long
def test_candidates_that_compute_the_same_have_the_same_signature(
    trained: Path, subject: Subject
) -> None:
    def signature(*words: str) -> object:
        return branch(subject, candidate(trained, *words), LINEAR).signature

    assert signature("recipe=nvfp4", "policy.last=1.0") == signature("recipe=bf16")
    assert signature("recipe=nvfp4", "policy=all") == signature("recipe=nvfp4", "policy.last=0")
    assert signature("recipe=nvfp4", "policy=all") != signature("recipe=nvfp4", "policy.last=1")
    assert signature("recipe=bf16") != signature("recipe=fp32")
    assert signature("recipe=nvfp4") != signature("recipe=nvfp4", "recipe.hadamard=false")
    assert signature("recipe=fp16") != signature("recipe=fp16", "recipe.scaling.initial=8.0")
    scaled = "recipe=nvfp4_ue5m3"
    assert signature(scaled) != signature(scaled, "recipe.scaling=null")


def test_forks_without_a_rate_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lr=0\.0 must be a positive number"):
        replace(LINEAR, lr=0.0)


def test_a_pattern_that_matches_nothing_is_refused_with_the_candidates_name(
    trained: Path, subject: Subject
) -> None:
    chosen = candidate(trained, "recipe=nvfp4", "policy.keep=[mlp.dwon]")
    with pytest.raises(UserError, match=r"nvfp4: policy\.keep='mlp\.dwon' matches no linear layer"):
        branch(subject, chosen, LINEAR)
