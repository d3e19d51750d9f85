"""What stands in for a GPU in a dry run of the scripts for GPU machines. Each says so when it begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers"


def announce(text: str) -> None:
    print(f"stand-in: {text}", flush=True)


def interpret() -> None:
    """From here on; Triton reads it when it is imported."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "Triton was imported before: its kernels are compiled, and a CPU cannot run them"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    helpers()
    import interpreted

    interpreted.hasten()
    announce("Triton's interpreter executes the kernels on the CPU")


def helpers() -> None:
    """Let the tests' stand-ins be found."""
    if str(HELPERS) not in sys.path:
        sys.path.append(str(HELPERS))


@contextmanager
def scaled_products() -> Iterator[list[Any]]:
    """torch's scaled products in every layout, of a matrix and of several experts in one call; gives
    the calls.
    """
    helpers()
    from recorded_products import GroupRecorder, Recorder
    from torch.nn import functional

    from fp4train.backends import native

    announce("scaled products are checked as torch checks them for CUDA, and computed in float64")
    recorder = Recorder()
    groups = GroupRecorder()
    with (
        patch.object(native, "why_not_blocks", lambda *_: None),
        patch.object(functional, "scaled_mm", recorder),
        patch.object(functional, "scaled_grouped_mm", groups),
    ):
        yield recorder.calls


@contextmanager
def graphs(*, recorded: bool = True) -> Iterator[list[Any]]:
    """CUDA graphs of training steps; gives what recorded them. Not `recorded`: the same steps
    without.
    """
    helpers()
    import torch
    from recorder_on_cpu import RecorderOnCpu

    from fp4train.backends import emulate
    from fp4train.models.common import on_cpu
    from fp4train.quantize import cpu, triton_launch
    from fp4train.quantize.quantizer import quantizer
    from fp4train.run import build
    from fp4train.run.step_graph import RecordedSteps

    if recorded:
        announce(
            "a recorder of torch's operators on the CPU repeats them in the place of a CUDA graph"
        )
    recorders: list[Any] = []
    assemble = build.assemble

    def recorder(device: torch.device) -> Any:
        recorders.append(RecorderOnCpu(device))
        return recorders[-1]

    def assembled(*args: Any, **options: Any) -> Any:
        run = assemble(*args, **options)
        if recorded:
            run.runner = RecordedSteps(run, recorder)
        return run

    # The C kernels are no operators of torch: a recorder of operators would not see them.
    unseen = [
        patch.object(module, "why_not", lambda *_: "not seen by the recorder")
        for module in (cpu, on_cpu)
    ]
    widened = patch.object(emulate, "WITHOUT_INSTRUCTIONS", frozenset({torch.bfloat16}))
    queued = patch.object(emulate, "_of_tensors", emulate.queued_factors)
    # as where a CUDA graph is captured: a replay fills every amax again
    zeros = patch.multiple(triton_launch, ZEROS=1, _zeros={})
    quantizer.cache_clear()
    try:
        with (
            patch.object(build, "assemble", assembled),
            unseen[0],
            unseen[1],
            widened,
            queued,
            zeros,
        ):
            yield recorders
    finally:
        quantizer.cache_clear()


@contextmanager
def compiler() -> Iterator[None]:
    """`train.compile=true` without a compiler."""
    import torch

    announce("blocks run eagerly in the place of torch.compile, which takes half a minute of a CPU")
    modules = patch.object(torch.nn.Module, "compile", lambda self, **options: None)
    recorded = patch.multiple(torch.compiler, set_stance=nullcontext)
    with modules, recorded, patch.object(torch, "compile", lambda function: function):
        yield


@contextmanager
def instead_of(words: Sequence[str]) -> Iterator[list[str]]:
    """What stands in for the GPU that the keys of a run ask for: `train.cuda_graph` (false: the
    kernels of runs that are recorded), `train.compile`, `train.kernels=liger`, `backend`; gives the
    keys that a CPU takes.
    """
    with ExitStack() as stack:
        for recorded in (False, True):
            if f"train.cuda_graph={str(recorded).lower()}" in words:
                stack.enter_context(graphs(recorded=recorded))
        if "train.compile=true" in words:
            stack.enter_context(compiler())
        if "train.kernels=liger" in words:
            stack.enter_context(liger_kernels())
        asked = {word for word in words if word in ("backend=te", "backend=native")}
        if asked:
            announce("emulation multiplies in the place of the backend that a run asks for")
        yield [
            word for word in words if not word.startswith("train.cuda_graph=") and word not in asked
        ]


def fp4train(words: Sequence[str]) -> None:
    """`fp4train words` in this process.

    Raises:
        ValueError: it failed.
    """
    from fp4train.cli import main

    drawn = patch("fp4train.lab.analysis.curves.draw_curves", lambda run: Path(run) / "curves.png")
    with instead_of(words) as kept, drawn:
        try:
            main(kept)
        except SystemExit as ended:
            if ended.code:
                raise ValueError(f"exit code {ended.code}") from None


@contextmanager
def liger_kernels() -> Iterator[None]:
    """The package liger-kernel."""
    helpers()
    import liger_on_cpu

    from fp4train.models.common import liger

    announce("torch's operators compute what liger's kernels do, and write where they write")
    here = patch.object(liger, "why_not", lambda device: None)
    with here, patch.dict(sys.modules, liger_on_cpu.modules()):
        yield


@contextmanager
def native_layers(script: Any) -> Iterator[None]:
    """The products of a B200 in `gpu_layers`."""
    from fp4train.hardware import Device, find_gpu
    from fp4train.precision.layer_plan import resolve

    b200 = Device.elsewhere(find_gpu("B200"))

    def plan(layer: Any, recipe: Any) -> Any:
        return resolve(layer.layer, recipe, None, layer.backend, b200)

    with scaled_products(), patch.object(script, "plan_here", plan):
        yield


class _DecodedWeight:
    """In the place of `TEExecutor`: torch's product with the weight as its codes say, or as they
    would.
    """

    def __init__(self, *, name: str) -> None:
        self.name = name

    def __call__(self, x: Any, weight: Any, bias: None, table: Any, call: Any) -> Any:
        from fp4train.quantize import quantize

        spec = table["fprop"].second
        codes = call.codes(False) if call.codes is not None else quantize(weight.detach(), spec)
        change = codes.dequantize().to(x.dtype) - weight.detach().to(x.dtype)
        return x @ (weight.to(x.dtype) + change).T


@contextmanager
def te_layers(script: Any) -> Iterator[None]:
    """Transformer Engine in `gpu_layers`."""
    from fp4train.nn import Linear

    announce("second emulated layers, whose random bits differ, run in the place of TE's")
    announce("emulation multiplies in the place of TE's reference, torch by decoded weights")
    make = script.linear
    experts = script.experts

    def linear(problem: Any, backend: str) -> Any:
        layer = make(problem, "emulate")
        if backend == "te":
            return Linear.from_linear(layer, replace(layer.layer, name="te"), "emulate")
        return layer

    stand_ins: dict[str, Any] = {
        "linear": linear,
        "experts": lambda problem, backend: experts(problem, "emulate"),
        "te_reference": lambda problem: script.emulated_products(
            script.NEAREST, problem, "emulate"
        ),
        "TEExecutor": _DecodedWeight,
        "TRANSFORMER_ENGINE": SimpleNamespace(why_values=lambda *_: None),
    }
    with patch.multiple(script, **stand_ins):
        yield


CAPABILITIES = {True: (10, 0), False: (9, 0)}
"""Compute capabilities whose sums stand in, by whether operands have scales of blocks."""


@contextmanager
def known_sums() -> Iterator[None]:
    """Products of codes by what is known of the sums of Hopper (FP8 with one scale) and Blackwell
    (blocks).
    """
    import torch

    from fp4train.backends import tensor_cores
    from fp4train.backends.native import Native

    announce("the known sums of tensor cores stand in the place of torch's scaled products")

    def product(
        backend: Native, first: Any, second: Any, *, out_dtype: torch.dtype
    ) -> torch.Tensor:
        blocks = first.spec.block != (None, None)
        capability = CAPABILITIES[blocks]
        unit = tensor_cores.unit_for(capability, first.spec.format)
        assert unit is not None
        return tensor_cores.product(first, second, unit, fast=backend.fast).to(out_dtype)

    with patch.object(Native, "product", product):
        yield
