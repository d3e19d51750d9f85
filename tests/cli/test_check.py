"""`fp4train check`: all layers of a run at a checkpoint against the reference; its exit code."""

from __future__ import annotations

import json
import shutil

import audit_planting as planting
import pytest
import torch
from audit_run_faults import without_policy
from command_line import STEADY, Cli, Outcome
from faulty_kernels import equals_reference, kernels_equal_reference

from fp4train.audits import observe
from fp4train.quantize import QuantSpec

RUN = ("run.name=a", "recipe=nvfp4", "policy=last15", *STEADY)


def test_a_run_that_computes_what_its_plan_says_passes(cli: Cli) -> None:
    assert cli(*RUN).code == 0
    ended = cli.raw("check", "runs/a")
    assert ended.code == 0
    assert ended.out.startswith("runs/a, step 6: 42 GEMMs of 14 layers compared")
    assert "0 faults" in ended.out


def assert_named(ended: Outcome, words: str) -> None:
    """A check ended with a fault whose name has these words."""
    assert ended.code == 1
    faults = json.loads(ended.out)["faults"]
    assert any(words in fault["cause"] for fault in faults)


def test_a_fault_is_named_and_is_the_exit_code(cli: Cli) -> None:
    assert cli(*RUN).code == 0
    change, words = planting.OPERAND_FAULTS["an option that resolves to off"]
    with planting.planted_operand(change):
        ended = cli.raw("check", "runs/a", "--json")
    assert_named(ended, words)


def test_a_fault_of_all_microbatches_but_the_first_is_found(cli: Cli) -> None:
    assert cli(*RUN, "train.microbatch=2").code == 0
    change, words = planting.OPERAND_FAULTS["the same bits in every microbatch"]
    with planting.planted_operand(change):
        ended = cli.raw("check", "runs/a", "--json")
    assert_named(ended, words)


def test_what_runs_is_compared_with_the_plan_of_the_run_at_that_step(cli: Cli) -> None:
    assert cli(*RUN).code == 0
    with without_policy():
        ended = cli.raw("check", "runs/a", "--json")
    assert ended.code == 1
    faults = json.loads(ended.out)["faults"]
    assert any("another plan than that of the step" in fault["what"] for fault in faults)


def test_a_trial_that_raises_is_told_and_is_an_exit_code_of_its_own(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(*RUN).code == 0

    def broken(spec: QuantSpec, device: str) -> bool:
        if spec.random:
            raise RuntimeError("no kernel")
        return equals_reference(spec, device)

    kernels_equal_reference(monkeypatch, broken)
    ended = cli.raw("check", "runs/a")
    assert ended.code == 2
    assert "42 GEMMs of 14 layers compared" in ended.out and "0 faults" in ended.out
    assert "its audit failed: no kernel" in ended.out


def test_a_check_that_compares_nothing_does_not_pass(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(*RUN).code == 0
    monkeypatch.setattr(observe, "why_not_observed", lambda executor, plan: "it is not known")
    ended = cli.raw("check", "runs/a")
    assert ended.code == 2
    assert "0 GEMMs of 0 layers compared" in ended.out


def test_a_check_that_cannot_begin_is_no_fault(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli(*RUN).code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for word in ("step=5", "device=cuda"):
        ended = cli.raw("check", "runs/a", word)
        assert ended.code == 2 and ended.message
    shutil.rmtree("runs/a/checkpoints")
    assert cli.raw("check", "runs/a").code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((), "check needs one run directory"), (("runs/none",), "runs/none")],
)
def test_what_cannot_be_checked_is_refused_and_is_no_fault(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    ended = cli.raw("check", *arguments)
    assert ended.code == 2
    assert words in ended.message
