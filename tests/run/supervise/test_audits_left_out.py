"""What audits of runs leave out is said, and ends nothing."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import STEADY, Cli, events
from faulty_kernels import kernels_equal_reference

from fp4train.audits.fault import Audited
from fp4train.audits.observe import ADDED_TERMS, Observer, partly_uncovered
from fp4train.audits.terms import RESIDUAL_CHANNELS
from fp4train.hardware import Device
from fp4train.precision import (
    NVFP4 as NVFP4Recipe,
    Layer,
    Recipe,
    Residual,
    resolve,
)
from fp4train.run.supervise import planned_calls, run_audits, sums as run_sums

SILENT = ("audit.every=0", "audit.sums=0")
NVFP4 = ("recipe=nvfp4", "policy=all", *STEADY)


def test_an_audit_that_sees_no_backward_pass_is_said(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(self: Observer, run: Any, *arguments: Any, **options: Any) -> Any:
        return run(*arguments, **options)

    monkeypatch.setattr(Observer, "backward", unseen)
    ended = cli("run.name=a", *NVFP4, "audit.every=1")
    assert ended.code == 0
    assert events("runs/a", "audit failed")[0]["reason"] == "its backward pass was not seen"
    assert events("runs/a", "audit") == []


def test_an_audit_that_compared_nothing_is_no_clean_one(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(name: str, recorder: Any, step: int, expect: Any) -> Audited:
        return Audited(layer=name, step=step, uncovered=["fprop: it is not seen"])

    monkeypatch.setattr(planned_calls, "compare_records", compared)
    ended = cli("run.name=a", *NVFP4, "audit.every=1")
    assert events("runs/a", "audit") == []
    assert "no layer was audited: 0 faults; not covered: " in ended.err
    assert "(fprop: it is not seen)" in ended.err


def test_operands_that_are_not_compared_stand_in_the_end_of_the_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Observer.forward

    def without_x(self: Observer, run: Any, *arguments: Any) -> Any:
        result = forward(self, run, *arguments)
        for record in self.records:
            record.x = None
        return result

    monkeypatch.setattr(Observer, "forward", without_x)
    ended = cli("run.name=a", *NVFP4, "audit.every=1")
    assert events("runs/a", "audit fault") == []
    assert len(events("runs/a", "audit")) == 6
    assert "(fprop, operand x: its values are on other ranks)" in ended.err


def test_a_plan_that_cannot_be_tried_is_said_at_the_end(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(run_audits, "check_plan", broken)
    ended = cli("run.name=a", *NVFP4, "audit.every=0")
    assert ended.code == 0
    assert "not covered: the plan (its audit failed: no kernel)" in ended.err


def test_a_start_is_tried_where_layers_are_not_audited_as_on_a_gpu(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_equal_reference(monkeypatch, lambda spec, device: False)
    ended = cli("run.name=a", *NVFP4, "audit.every=0", "audit.action=stop")
    assert ended.code == 1 and "quantises otherwise than the reference" in ended.message
    assert cli("run.name=b", *NVFP4, *SILENT, "audit.action=stop").code == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Observer, "__init__"), (run_sums.StateSums, "_other_rate")],
    ids=["observer", "rates"],
)
def test_an_audit_that_fails_where_it_begins_ends_no_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def broken(*_: Any, **options: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(run_audits, "check_plan", lambda *_: [])
    monkeypatch.setattr(owner, name, broken)
    ended = cli("run.name=a", *NVFP4, "audit.every=1", "audit.sums=1")
    assert ended.code == 0
    assert events("runs/a", "audit failed")[0]["reason"] == "no memory"


def test_a_plan_says_what_audits_will_leave_out(cli: Cli) -> None:
    plan = ("plan", "recipe=nvfp4", "policy=all", "audit.every=100")
    here = " ".join(cli.raw(*plan).out.split())
    head = "not covered: head (other code multiplies its weight)"
    assert f"audits: one of 42 layers every 100 steps; {head}" in here
    assert "partly covered" not in here
    there = " ".join(cli.raw(*plan, "gpu=B200").out.split())
    assert f"audits: one of 42 layers every 100 steps; {head}" in there
    assert "partly covered" not in there
    mesh = ("gpu=H200", "gpus=2", "parallel.dp_shard=2", "recipe.fused_scales=true")
    divided = " ".join(cli.raw(*plan, *mesh).out.split())
    assert f"audits: one of 42 layers every 100 steps; {head}" in divided


@pytest.mark.parametrize(
    ("recipe", "adds_up", "reasons"),
    [
        (NVFP4Recipe(), True, []),
        (NVFP4Recipe(centred=["x"], hadamard=False), False, []),
        (NVFP4Recipe(centred=["x"], hadamard=False), True, [ADDED_TERMS]),
        (NVFP4Recipe(residual=Residual(share=0.1)), False, [RESIDUAL_CHANNELS]),
        (NVFP4Recipe(residual=Residual(share=0.1)), True, [RESIDUAL_CHANNELS, ADDED_TERMS]),
    ],
    ids=["one term", "a mean", "a mean that is added up", "channels", "channels, added up"],
)
def test_what_a_gpu_leaves_out_of_a_layer_of_two_terms_is_known_before(
    recipe: Recipe, adds_up: bool, reasons: list[str]
) -> None:
    layer = Layer(name="up", in_features=64, out_features=64, block=0, blocks=1)
    plan = resolve(layer, recipe, None, "emulate", Device(type="cpu"))
    assert partly_uncovered(plan, "cuda", adds_up=adds_up) == reasons
    assert partly_uncovered(plan, "cpu", adds_up=adds_up) == []
