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
from lengths import long_but
from pretended import Machine

import fp4train as f4
from fp4train.config import TrainSettings
from fp4train.errors import UserError
from fp4train.exchange import load_trained
from fp4train.hardware import Device, find_gpu
from fp4train.kernels import cpu
from fp4train.models.common import OF_TORCH, Liger, Operation, on_cpu
from fp4train.models.common.on_cpu import CpuOperators
from fp4train.models.llama import Llama
from fp4train.models.moe import ExpertShape, MixtureOfExperts
from fp4train.nn.fused_layers import outlines
from fp4train.parallel.world import World
from fp4train.precision import NVFP4, Timeline, find_layers, make_plan
from fp4train.run.build import built_or_deferred
from fp4train.run.fuse import fuse, kernels_of_layers
from fp4train.run.produced import produced_by, with_sources


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


def test_torchs_kernels_leave_the_sum_of_gradients_to_autograd(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that adds dw within its product as a GPU does. With recomputed blocks every second
    microbatch of both steps adds the 14 gradients of two blocks; losses have the same bits.
    """
    added = adding.begin(monkeypatch.setattr)
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


def test_the_plan_says_which_norms_and_gates_are_quantised_where_they_are_made_and_why_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = f4.convert(
        Llama(width=64, layers=2, heads=2, kv_heads=1, hidden=96).build(vocab_size=60, seq_len=32)
    )
    timeline = Timeline(recipe=NVFP4(), steps=1)
    device = Device.elsewhere(find_gpu("B200"))
    plan = make_plan(
        find_layers(built).values(), timeline, None, tokens=64, device=device, backend="native"
    )
    settings = TrainSettings(steps=1, batch_size=1, microbatch=None, seq_len=8)
    Machine(monkeypatch).quantises_by_triton()

    def said(**changed: Any) -> list[str]:
        planned = with_sources(plan, outlines(built), replace(settings, **changed), "cuda")
        return produced_by(planned, "cuda")

    made = "norms and gates are quantised where they are made"
    each = "attention_norm, mlp_norm, mlp of block"
    adds = "; these norms also add what a layer returns to the residual stream."
    all_six = f"6 {made} ({each}s 0–1), and not written in BF16{adds}"
    assert said() == [all_six]
    assert "train.kernels=torch asks for torch's operators" in said(kernels="torch")[0]
    assert "the compiler has the blocks" in said(compile=True)[0]


def test_the_plan_for_a_gpu_says_by_stretch_which_norms_and_gates_are_quantised_where_they_are_made(
    cli: Cli,
) -> None:
    shape = ("gpu=B200", "model.width=128", "model.hidden=384", "model.layers=4", "train.steps=100")
    each = "(attention_norm, mlp_norm, mlp of blocks 0–3)"
    said = cli("plan", *shape, "policy=all", "phases=cooldown_bf16").out
    assert f"steps 0–79: 12 norms and gates are quantised where they are made {each}" in said
    assert (
        f"steps 80–99: 12 norms and gates write BF16 {each}: a layer is in high precision and "
        "needs values, not codes." in said
    )


@pytest.mark.parametrize("gpu", long_but(["H100"], ["H100", "H200"]))
def test_the_plan_for_a_gpu_where_two_kernels_are_faster_than_one_says_so(
    cli: Cli, gpu: str
) -> None:
    shape = (f"gpu={gpu}", "model.width=128", "model.hidden=384", "model.layers=4")
    said = cli("plan", *shape, "backend=native", "recipe=fp8_current", "policy=all").out
    assert "norms and gates write BF16" in said and "take less time than one" in said
    assert "quantised where they are made" not in said


def test_the_plan_blames_a_product_in_high_precision_before_the_kernels_of_transformer_engine(
    cli: Cli,
) -> None:
    shape = ("gpu=B200", "model.width=128", "model.hidden=384", "model.layers=4", "train.steps=100")
    each = "12 norms and gates write BF16 (attention_norm, mlp_norm, mlp of blocks 0–3)"
    for recipe in ("nvfp4", "fp8_current"):
        plan = (*shape, "policy=all", "backend=te", f"recipe={recipe}")
        said = cli("plan", *plan, "phases=cooldown_fprop").out
        assert (
            f"steps 80–99: {each}: a GEMM of a layer is in high precision and needs the "
            "values of x." in said
        )
    norms = (
        "steps 0–79: 8 norms and gates write BF16 (attention_norm, mlp_norm of blocks 0–3): a "
        "layer: "
    )
    assert (
        f"{norms}Transformer Engine's kernel of a norm writes BF16, then quantises (fp8_current)."
        in said
    )


def test_the_plan_names_what_reads_a_norm_beside_layers_of_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norm of a layer of experts stays: its router takes it in float32."""
    shape = MixtureOfExperts(
        width=64, layers=2, dense=1, heads=2, kv_heads=1, experts=ExpertShape(shared=1)
    )
    built = f4.convert(shape.build(vocab_size=60, seq_len=32))
    timeline = Timeline(recipe=NVFP4(), steps=1)
    device = Device.elsewhere(find_gpu("B200"))
    plan = make_plan(
        find_layers(built).values(), timeline, None, tokens=64, device=device, backend="native"
    )
    settings = TrainSettings(steps=1, batch_size=1, microbatch=None, seq_len=8)
    Machine(monkeypatch).quantises_by_triton()
    planned = with_sources(plan, outlines(built), settings, "cuda")
    assert planned.stretches[0].sources["blocks.1.mlp_norm"].why_written == (
        "Router reads the same values, and takes no codes"
    )
    shared = "blocks.1.mlp.shared"
    stretch = planned.stretches[0]
    of_norms = {"blocks.0.mlp.gate", "blocks.0.mlp.up"}
    assert of_norms <= stretch.readers_of_codes and f"{shared}.down" in stretch.readers_of_codes
    assert stretch.writers_of_sources == {*of_norms, f"{shared}.gate", f"{shared}.up"}
    assert not {f"{shared}.gate", "blocks.1.mlp.gate_up"} & stretch.readers_of_codes
    assert produced_by(planned, "cuda") == [
        "5 norms and gates are quantised where they are made (attention_norm, mlp_norm, mlp "
        "of block 0; "
        "attention_norm, mlp.shared of block 1), and not written in BF16; these norms also "
        "add what a layer returns "
        "to the residual stream.",
        "1 norms and gates write BF16 (mlp_norm of block 1): Router reads the same "
        "values, and takes no codes.",
    ]
    fuse(built, settings, "cuda")
    assert built.blocks[1].attention_in.enabled and not built.blocks[1].mlp_in.enabled


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
    config = config_of("model=llama_tiny", "model.draw=counter", "device=cpu")
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
