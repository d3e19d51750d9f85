"""Audits of whole runs: no bit changes, clean runs have no fault, and planted ones are found, logged,
and end the run where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import audit_planting as planting
import pytest
import torch
from audit_run_faults import UPDATE_FAULTS, higher_rate, norm_weight
from command_line import STEADY, Cli, after_update, before_steps, events, losses, steps
from families import tiny_run
from faulty_kernels import kernels_equal_reference
from lengths import long_but
from limits import set_limit

from fp4train import checkpoint
from fp4train.audits.settings import AuditSettings
from fp4train.exchange import RecordedResults
from fp4train.run import step as run_step
from fp4train.run.state.moments import Moments
from fp4train.run.state.weights import ModelWeights
from fp4train.run.supervise import planned_calls, sums as run_sums
from fp4train.run.supervise.saving import Saver

AUDITED = ("audit.every=1", "audit.sums=1")
SILENT = ("audit.every=0", "audit.sums=0")
NVFP4 = ("recipe=nvfp4", "policy=all", *STEADY)


def weights(run: str) -> dict[str, bytes]:
    state = checkpoint.load(Path(run, "checkpoints"))
    return {name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()}


@pytest.mark.parametrize(
    "options",
    [
        (*NVFP4, "train.microbatch=2"),
        pytest.param(("recipe=fp8_delayed", "policy=last15"), marks=pytest.mark.long),
        pytest.param((*tiny_run("moe"), "recipe=nvfp4"), marks=pytest.mark.long),
    ],
    ids=["microbatches", "delayed", "experts"],
)
def test_a_run_has_the_same_bits_with_and_without_audits_and_no_fault(
    cli: Cli, options: tuple[str, ...]
) -> None:
    cli.trained("run.name=plain", *options, *SILENT)
    cli.trained("run.name=audited", *options, *AUDITED)
    assert losses("runs/plain") == losses("runs/audited")
    assert weights("runs/plain") == weights("runs/audited")
    assert events("runs/audited", "audit fault") == []
    assert events("runs/audited", "audit failed") == []
    audits = events("runs/audited", "audit")
    assert len(audits) == 6 and all(entry["gemms"] for entry in audits)
    assert not events("runs/plain", "audit")


def test_the_end_of_a_run_says_what_was_compared_besides_layers(cli: Cli) -> None:
    options = ("audit.every=0", "audit.sums=3", "checkpoint.every=0")
    ended = cli("run.name=a", *NVFP4, *options)
    compared = "the state was compared after 2 updates"
    assert f"audit: no layer was audited: 0 faults; {compared}" in ended.err


def test_layers_are_audited_in_turn_and_the_last_quantised_one_twice_as_often(cli: Cli) -> None:
    cli.trained("run.name=a", "recipe=nvfp4", "policy=all", "train.steps=18", "audit.every=1")
    names = [entry["layer"] for entry in events("runs/a", "audit")]
    last = names[0]
    turn = names[: names.index(last, names.index(last, 1) + 1)]
    assert turn.count(last) == 2
    assert len(set(turn)) == len(turn) - 1
    assert set(turn) == set(names)


def planted_stale_amax() -> AbstractContextManager[Any]:
    return planting.planted_operand(planting.OPERAND_FAULTS["amax stale by one step"][0])


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "the same bits in every step": (
        lambda: planting.planted_operand(planting.OPERAND_FAULTS["the same bits in every step"][0]),
        "random bits of step 0",
    ),
    "the same bits in every microbatch": (
        lambda: planting.planted_operand(
            planting.OPERAND_FAULTS["the same bits in every microbatch"][0]
        ),
        "first tokens",
    ),
    "a stale weight": (planting.stale_weights, "weight of the step before"),
    "a stale amax": (planted_stale_amax, "amax of the step before"),
}


@pytest.mark.parametrize(
    "fault", long_but(("the same bits in every step", "a stale weight"), FAULTS)
)
def test_a_fault_in_all_layers_is_found_at_its_place_and_named(cli: Cli, fault: str) -> None:
    plant, words = FAULTS[fault]
    with plant():
        ended = cli("run.name=a", *NVFP4, "train.microbatch=2", "audit.every=1")
    assert ended.code == 0
    faults = events("runs/a", "audit fault")
    assert any(words in entry["cause"] for entry in faults), faults
    assert "audit: " in ended.err and words in ended.err


def test_a_fault_ends_the_run_where_that_is_asked_for(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, _ = planting.OPERAND_FAULTS["an option that resolves to off"]
    with planting.planted_operand(change) as fault:
        fault.on = False  # while the plan is tried
        after_update(1, monkeypatch, lambda run: setattr(fault, "on", True))
        ended = cli(
            "run.name=a", *NVFP4, "audit.every=3", "audit.action=stop", "checkpoint.every=1"
        )
    assert ended.code == 1
    assert "step 2: the audit found" in ended.message
    assert "rounding=nearest, planned stochastic" in ended.message
    assert steps("runs/a") == [1]


def test_an_audit_that_fails_is_said_once_and_ends_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no reference")

    monkeypatch.setattr(planned_calls, "compare_records", broken)
    ended = cli("run.name=a", *NVFP4, "audit.every=1")
    assert ended.code == 0
    (entry,) = events("runs/a", "audit failed")
    assert "no reference" in entry["reason"]
    assert "no layer was audited: 0 faults; not covered: " in ended.err
    assert "(its audit failed: no reference)" in ended.err


def flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.detach().view(torch.int32).view(-1)[7] ^= 1 << bit


@pytest.mark.parametrize("bit", long_but((0,), (29, 23, 12, 0)))
def test_a_bit_of_a_weight_that_flips_between_two_steps_is_found(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, bit: int
) -> None:
    after_update(3, monkeypatch, lambda run: flip(next(run.model.parameters()), bit))
    cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=1")
    (entry,) = events("runs/a", "audit fault")
    assert entry["layer"] == "model/embed.weight"
    assert "between the update and the next step" in entry["what"]


def test_moments_that_are_lost_between_two_steps_are_found(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_update(3, monkeypatch, lambda run: run.optimizer.state.pop(norm_weight(run)))
    cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=3")
    entry, *_ = events("runs/a", "audit fault")
    assert "attention_norm.weight/" in entry["layer"] and "between the update" in entry["what"]


def test_a_bit_that_flips_in_the_passes_of_a_step_is_found(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    before_steps(monkeypatch, runs.append)
    original = run_step.gradient_norms

    def gradient_norms(*arguments: Any) -> Any:
        run = runs[-1]
        parameter = next(run.model.parameters())
        moment = run.optimizer.state.get(parameter, {}).get("exp_avg")
        tensor = {2: parameter.detach(), 3: moment, 4: run.model.cos}.get(run.step)
        if tensor is not None:  # as memory does: no operation of torch writes it
            tensor.numpy().view("uint32").reshape(-1)[7] ^= 1 << 3
        return original(*arguments)

    monkeypatch.setattr(run_step, "gradient_norms", gradient_norms)
    cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=1")
    faults = events("runs/a", "audit fault")
    assert [(fault["step"], fault["layer"]) for fault in faults] == [
        (3, "model/embed.weight"),
        (4, "optimizer/embed.weight/exp_avg"),
        (5, "model/cos"),
    ]
    assert all("in the passes of the step" in fault["what"] for fault in faults)


@pytest.mark.parametrize(
    ("state", "damage", "tensor"),
    [
        (ModelWeights, lambda run: flip(next(run.model.parameters()), 3), "model/embed.weight"),
        (Moments, lambda run: run.optimizer.state.popitem(), "weight/step"),
    ],
    ids=["a bit that flips", "a moment that is lost"],
)
def test_what_is_damaged_as_a_checkpoint_is_loaded_is_found(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, state: Any, damage: Any, tensor: str
) -> None:
    cli.trained("run.name=a", *NVFP4, "audit.sums=1")
    load = state.load

    def damaging(loaded: Any, saved: Any) -> None:
        load(loaded, saved)
        damage(loaded.run)

    monkeypatch.setattr(state, "load", damaging)
    ended = cli("resume=runs/a", "train.steps=8")
    assert ended.code == 1
    assert f"{tensor} has other bits than it had in the run" in ended.message


CLEAN = {
    "tied": ("optim=sgd", "model.tied=true", "recipe=bf16"),
    "delayed": ("recipe=fp8_delayed",),
    "experts": (*tiny_run("moe"), "train.ema=0.9", "oscillation.every=2", "oscillation.watch=1"),
    "muon": ("optim=muon", "optim.moments=bfloat16", "recipe=nvfp4"),
}


@pytest.mark.parametrize("name", long_but(("tied",), CLEAN))
def test_updates_of_every_optimizer_and_a_resume_have_no_fault(cli: Cli, name: str) -> None:
    cli.trained("run.name=a", *CLEAN[name], *STEADY, "train.steps=3", *AUDITED)
    assert cli("resume=runs/a", "train.steps=4").code == 0
    assert events("runs/a", "audit fault") == events("runs/a", "audit failed") == []


@pytest.mark.long
def test_moments_that_another_optimizer_left_behind_are_no_fault(cli: Cli) -> None:
    cli.trained("run.name=a", *STEADY, "train.steps=3", *AUDITED)
    assert cli("resume=runs/a", "optim=muon", "train.steps=5").code == 0
    assert events("runs/a", "audit fault") == events("runs/a", "audit failed") == []


@pytest.mark.parametrize(
    "fault",
    long_but(("no weight decay", "gradients times 1.5", "a weight never updated"), UPDATE_FAULTS),
)
def test_a_fault_of_the_optimizer_or_of_the_accumulation_is_found(cli: Cli, fault: str) -> None:
    plant, words = UPDATE_FAULTS[fault]
    with plant():
        cli("run.name=a", *NVFP4, "train.microbatch=2", "optim.clip=0.3", *AUDITED)
    said = [entry["what"] for entry in events("runs/a", "audit fault")]
    assert any(words in what for what in said) == bool(words), said


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_weight_that_is_overwritten_is_named_where_the_evaluation_after_it_is_not_finite(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    after_update(6, monkeypatch, lambda run: norm_weight(run).detach().fill_(torch.inf))
    ended = cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=1", f"audit.action={action}")
    assert ended.code == 1
    (entry,) = events("runs/a", "audit fault")
    assert "norm" in entry["layer"] and "between the update and" in entry["what"]
    said = "Nothing more is saved (audit.action=stop)"
    assert (said in ended.message) == (action == "stop")
    assert ("validation loss is nan" in ended.message) == (action == "warn")


def flip_all(run: Any) -> None:
    for parameter in run.model.parameters():
        flip(parameter, 3)


def test_of_many_faults_of_a_step_three_are_said_and_the_others_counted(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: list[int] = []
    after_update(3, monkeypatch, flip_all)
    after_update(3, monkeypatch, lambda run: count.append(len([*run.model.parameters()])))
    ended = cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=1")
    faults = events("runs/a", "audit fault")
    assert len(faults) == 3
    assert [fault.get("more", 0) for fault in faults] == [0, 0, count[0] - 3]
    assert f"step 3, audit: and {count[0] - 3} more" in ended.err
    assert f"no layer was audited: {count[0]} faults" in ended.err


def test_a_run_that_stops_names_the_checkpoint_from_before_the_fault(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_update(5, monkeypatch, flip_all)
    stop = ("audit.every=0", "audit.sums=1", "audit.action=stop")
    ended = cli("run.name=a", *NVFP4, *stop, "checkpoint.every=2", "checkpoint.keep=9")
    assert ended.code == 1
    assert "resume=" in ended.message and "resume_step=4" in ended.message
    assert steps("runs/a") == [2, 4]


def test_a_bit_that_flips_between_the_last_update_and_its_checkpoint_is_found(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_update(6, monkeypatch, lambda run: flip(next(run.model.parameters()), 3))
    set_limit(monkeypatch, "pauses before the last checkpoint is tried again", (0.01,))
    options = ("audit.every=0", "audit.sums=100", "checkpoint.every=3")
    cli("run.name=a", *NVFP4, *options)
    assert 6 not in steps("runs/a")
    (entry,) = events("runs/a", "audit fault")
    assert entry["layer"] == "model/embed.weight" and entry["step"] == 6
    assert "other bits than the state" in events("runs/a", "checkpoint failed")[0]["reason"]


def test_a_model_card_says_faults_that_sums_alone_found() -> None:
    results = RecordedResults(evaluated=[], tasks=[], damaged=0, faults=2)
    assert results.audited == "Audits of the run's state found 2 faults."


def test_an_update_that_is_left_out_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original = run_step.step_unless

    def leave_out(optimizer: Any, *arguments: Any) -> None:
        if float(next(iter(optimizer.state.values()), {}).get("step", 0)) != 3:
            original(optimizer, *arguments)

    monkeypatch.setattr(run_step, "step_unless", leave_out)
    cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=1")
    faults = events("runs/a", "audit fault")
    assert faults and "changed no weight" in faults[0]["what"]
    assert faults[0]["step"] == 4


def test_a_checkpoint_whose_copy_has_other_bits_is_not_written(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Saver._copy

    def copied(self: Saver, parts: Any) -> Any:
        copies = original(self, parts)
        if self.run.step == 2:
            flip(next(iter(copies.values())).tensor, 5)
        return copies

    monkeypatch.setattr(Saver, "_copy", copied)
    after_update(3, monkeypatch, lambda run: run.saver.wait())
    words = ("checkpoint.every=2", "checkpoint.keep=9", "audit.every=null")
    ended = cli("run.name=a", *NVFP4, *words)
    assert ended.code == 0
    (entry,) = events("runs/a", "checkpoint failed")
    assert "other bits than the state" in entry["reason"]
    assert steps("runs/a") == [3, 4, 6]


@pytest.mark.long
def test_a_layer_that_the_policy_keeps_and_other_code_multiplies_is_no_fault(cli: Cli) -> None:
    ended = cli("run.name=a", "recipe=nvfp4", "policy=last15", "train.steps=16", "audit.every=1")
    assert ended.code == 0
    assert events("runs/a", "audit fault") == []
    assert "not covered: head (other code multiplies its weight)" in ended.err


def test_a_machine_that_computes_otherwise_is_told_before_the_first_step(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_equal_reference(monkeypatch, lambda spec, device: False)
    ended = cli("run.name=a", *NVFP4, "audit.action=stop")
    assert ended.code == 1
    assert "step 0: the audit found" in ended.message
    assert "quantises otherwise than the reference" in ended.message
    assert steps("runs/a") == []


def test_layers_are_audited_by_default_on_a_cpu_alone() -> None:
    settings = AuditSettings()
    assert (settings.steps("cpu"), settings.steps("cuda")) == (100, 0)
    assert AuditSettings(every=7).steps("cuda") == 7


class Group:
    """The collectives of ranks with these sums of one tensor, of which this process is one."""

    def __init__(self, sums: list[int], rank: int) -> None:
        self.sums = sums
        self.rank = rank

    def get_process_group_ranks(self, group: Any) -> list[int]:
        return list(range(len(self.sums)))

    def get_rank(self) -> int:
        return self.rank

    def all_gather(self, gathered: Any, values: torch.Tensor, group: Any) -> None:
        for tensor, total in zip(gathered, self.sums, strict=True):
            tensor.fill_(total)


@pytest.mark.parametrize(
    ("sums", "blamed"),
    [([7, 7, 7], []), ([7, 9, 7], [1]), ([9, 7, 7], [0]), ([7, 9], [None]), ([7, 7, 9, 9], [None])],
)
def test_the_rank_that_drifted_is_blamed_and_none_where_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch, sums: list[int], blamed: list[int | None]
) -> None:
    found = []
    for rank, total in enumerate(sums):
        monkeypatch.setattr(run_sums, "dist", Group(sums, rank))
        faults = run_sums._differing({"w": total}, ["w"], None, torch.device("cpu"), "replicas")
        found += [None if fault.rank is None else rank for fault in faults]
    assert found == blamed


def test_an_update_at_another_rate_than_the_schedules_is_found(cli: Cli) -> None:
    with higher_rate():
        cli("run.name=a", *NVFP4, "audit.every=0", "audit.sums=1")
    (fault,) = events("runs/a", "audit fault")
    assert fault["step"] == 4 and "the schedule says" in fault["what"]
