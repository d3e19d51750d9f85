"""`train.kernels`: which runs take Liger's kernels, what the plan says of it, and where a run goes
on without them.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import adding
import liger_on_cpu
import pytest
import torch
from command_line import Cli, losses
from configured import config_of
from pretended import Machine

import fp4train as f4
from fp4train.config import TrainSettings
from fp4train.errors import UserError
from fp4train.exchange import load_trained
from fp4train.kernels import cpu
from fp4train.models.common import OF_TORCH, Liger, Operation, on_cpu
from fp4train.models.common.on_cpu import CpuOperators
from fp4train.models.llama import Llama
from fp4train.parallel.world import World
from fp4train.run.build import built_or_deferred
from fp4train.run.fuse import fuse, kernels_of_layers


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    liger_on_cpu.install(monkeypatch)


def model() -> Any:
    return f4.convert(
        Llama(width=32, layers=1, heads=2, kv_heads=1).build(vocab_size=60, seq_len=32)
    )


def test_a_package_that_cannot_be_imported_leaves_a_run_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was made for another Triton, say: only who names the kernels is stopped."""
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    built = model()
    settings = TrainSettings(steps=1, batch_size=1, microbatch=None, seq_len=8)
    fuse(built, settings, "cuda")
    assert built.operators is OF_TORCH
    with pytest.raises(
        UserError, match=r"train\.kernels=liger: liger-kernel cannot be imported: .*; train\.ker"
    ):
        fuse(built, replace(settings, kernels="liger"), "cuda")


def test_the_plan_says_which_kernels_run_and_why(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "Norms, gates, rotations and the loss run in"
    in_c = "The loss runs in torch's operators"
    assert in_c in cli("plan").out
    assert (
        f"{what} torch's operators: train.kernels=torch asks for them."
        in cli("plan", "train.kernels=torch").out
    )
    assert "train.kernels=liger: they are for GPUs" in cli("plan", "train.kernels=liger").message
    Machine(monkeypatch).runs_liger()
    assert (
        f"{what} liger's kernels (train.kernels=liger)." in cli("plan", "train.kernels=liger").out
    )
    assert in_c in cli("plan").out
    compiled = cli("plan", "train.compile=true").out
    assert "The loss runs in liger's kernels (train.kernels=auto)." in compiled


@pytest.mark.long
def test_torchs_kernels_leave_the_sum_of_gradients_to_autograd(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that adds dw within its product as a GPU does. With recomputed blocks every second
    microbatch of both steps adds the 14 gradients of two blocks; losses have the same bits.
    """
    added = adding.begin(monkeypatch)
    found = []
    options = (
        "recipe=bf16",
        "train.steps=2",
        "train.microbatch=2",
        "train.batch_size=4",
        "model.recompute=true",
    )
    for kernels, count in (("auto", 2 * 14), ("torch", 0)):
        assert cli(f"run.name={kernels}", *options, f"train.kernels={kernels}").code == 0
        assert len(added) == count
        added.clear()
        found.append(losses(f"runs/{kernels}"))
    assert found[0] == found[1]


@pytest.mark.long
def test_the_plan_says_which_norms_gates_and_rotations_c_kernels_make_and_why_not_others(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layers run: of four blocks the policy keeps one in high precision."""
    what = "norms, gates and rotations run in"
    shape = ("model.width=128", "model.hidden=384", "model.layers=4")
    for recipe in ("bf16", "nvfp4"):
        said = cli("plan", *shape, f"recipe={recipe}").out
        assert (
            f"17 {what} C kernels, in the bits of torch's operators." in said
            and "torch's operators: " not in said
        )
    assert "C kernels" not in cli("plan", *shape, "train.kernels=torch").out
    said = cli("plan", *shape, "model.width=160", "recipe=bf16").out
    assert f"9 {what} torch's operators: 160 features are no multiple of 64." in said
    assert f"4 {what} torch's operators: 80 features are no multiple of 64." in said
    monkeypatch.setattr(on_cpu, "whole_vectors", lambda elements: False)
    said = cli("plan", *shape, "recipe=bf16").out
    assert (
        f"4 {what} torch's operators: 128 tokens of 384 features do not fill the vectors of" in said
    )
    assert f"13 {what} C kernels" in said
    monkeypatch.undo()
    assert (
        f"17 {what} torch's operators: activations are float16."
        in cli("plan", *shape, "recipe=fp16").out
    )


@pytest.mark.parametrize(
    ("kernels", "compiled", "used"),
    [("auto", False, True), ("auto", True, False), ("torch", False, False)],
)
def test_a_run_on_a_cpu_has_c_kernels_unless_torchs_or_the_compilers_are_asked_for(
    kernels: str, compiled: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainSettings(
        steps=1, batch_size=1, microbatch=None, seq_len=8, kernels=kernels, compile=compiled
    )
    built = model()
    fuse(built, settings, "cpu")
    parts = (built.norm, built.blocks[0].mlp, built.blocks[0].attention)
    assert {isinstance(part.operators, CpuOperators) for part in parts} == {used}
    monkeypatch.setattr(cpu, "unavailable", lambda: "not built")
    built = model()
    fuse(built, settings, "cpu")
    assert built.norm.operators is OF_TORCH


def test_asked_for_by_name_on_a_cpu_they_are_refused(cli: Cli) -> None:
    found = cli("run.name=a", "train.kernels=liger")
    assert found.code != 0 and "train.kernels=liger: they are for GPUs" in found.message
    assert "train.kernels" in cli("run.name=a", "train.kernels=fast").message


def test_a_run_with_them_resumes_to_the_bit_and_is_read_where_they_do_not_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("train.kernels=liger", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=4")
    with monkeypatch.context() as patch:
        Machine(patch).runs_liger()
        assert cli("run.name=a", *words).code == 0
        whole = losses("runs/a")
        liger_on_cpu.calls.clear()
        assert cli.raw("resume=runs/a", "resume_step=2").code == 0
        assert losses("runs/a") == whole
    assert {"norm", "product", "rotation", "loss"} <= {name for name, _ in liger_on_cpu.calls}
    trained = load_trained(Path("runs/a"))
    assert isinstance(trained.model.operators, CpuOperators)
    refused = cli.raw("resume=runs/a", "train.steps=5")
    assert refused.code != 0 and "train.kernels=torch needs no other package" in refused.message
    assert cli.raw("resume=runs/a", "train.steps=5", "train.kernels=torch").code == 0


def test_a_model_that_gets_its_memory_after_it_was_built_runs_in_them() -> None:
    """On several ranks, from a folder of weights, and where a GPU draws the weights itself."""
    config = config_of("model=llama_1b", "device=cpu")
    built, deferred = built_or_deferred(config, 257, World(device=torch.device("cuda")), True)
    assert (
        deferred
        and isinstance(built.operators, Liger)
        and isinstance(built.blocks[0].attention.operators, Liger)
    )


@pytest.mark.parametrize(("asked", "used"), [("auto", True), ("torch", False)])
def test_a_run_on_a_gpu_takes_them_unless_torchs_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, used: bool
) -> None:
    built = model()
    fuse(
        built,
        TrainSettings(steps=1, batch_size=1, microbatch=None, seq_len=8, kernels=asked),
        "cuda",
    )
    assert {isinstance(part.operators, Liger) for part in (built, built.blocks[0].mlp)} == {used}
    Machine(monkeypatch).has_liger(None)
    with pytest.raises(UserError, match="liger-kernel is not installed"):
        fuse(
            built,
            TrainSettings(steps=1, batch_size=1, microbatch=None, seq_len=8, kernels="liger"),
            "cuda",
        )


class Layer(torch.nn.Module):
    """A layer of a user's own."""

    def fp4train_operations(self) -> list[Operation]:
        return [Operation(kind="recurrence", width=2, software=self.software)]

    def software(self, device: str, deterministic: bool) -> str:
        return f"recurrences by own kernels on {device}{' in order' if deterministic else ''}"


def test_any_layer_may_say_which_kernels_compute_it_and_it_is_said_once() -> None:
    mixed = torch.nn.Sequential(Layer(), torch.nn.Linear(2, 2), torch.nn.Sequential(Layer()))
    assert kernels_of_layers(mixed, "cpu", deterministic=True) == [
        "recurrences by own kernels on cpu in order"
    ]
    assert kernels_of_layers(mixed[1], "cpu", deterministic=False) == []
