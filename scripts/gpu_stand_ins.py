"""What stands in for a GPU in a dry run of the scripts for GPU machines. Each says so when it begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
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
    """torch's scaled products in every layout; gives the calls."""
    helpers()
    from recorded_products import Recorder
    from torch.nn import functional

    from fp4train.backends import native

    announce("scaled_mm is checked as torch checks it for CUDA, recorded, and computed in float64")
    recorder = Recorder()
    with (
        patch.object(native, "why_not_blocks", lambda *_: None),
        patch.object(functional, "scaled_mm", recorder),
    ):
        yield recorder.calls


@contextmanager
def grouped_products() -> Iterator[list[Any]]:
    """torch's scaled products of several experts in one call, and of one; gives the calls of the
    first.
    """
    helpers()
    from recorded_products import GroupRecorder
    from torch.nn import functional

    announce(
        "scaled_grouped_mm is checked as torch checks it for CUDA, recorded, and computed in "
        "float64"
    )
    recorder = GroupRecorder()
    with scaled_products(), patch.object(functional, "scaled_grouped_mm", recorder):
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
    from fp4train.quantize import cpu
    from fp4train.quantize.quantizer import quantizer
    from fp4train.run import build
    from fp4train.run.step_graph import RecordedSteps

    if recorded:
        announce(
            "a recorder of torch's operators on the CPU repeats them in the place of a CUDA graph"
        )
    made: list[Any] = []
    assemble = build.assemble

    def recorder(device: torch.device) -> Any:
        made.append(RecorderOnCpu(device))
        return made[-1]

    def assembled(*args: Any, **options: Any) -> Any:
        run = assemble(*args, **options)
        if recorded:
            run.runner = RecordedSteps(run, recorder)
        return run

    # The C kernels are no operators of torch: a recorder of operators would not see them.
    unseen = [
        patch.object(each, "why_not", lambda *_: "not seen by the recorder")
        for each in (cpu, on_cpu)
    ]
    widened = patch.object(emulate, "WITHOUT_INSTRUCTIONS", frozenset({torch.bfloat16}))
    queued = patch.object(emulate, "_of_tensors", emulate.queued_factors)
    quantizer.cache_clear()
    try:
        with patch.object(build, "assemble", assembled), unseen[0], unseen[1], widened, queued:
            yield made
    finally:
        quantizer.cache_clear()


@contextmanager
def compiler() -> Iterator[None]:
    """`train.compile=true` without a compiler."""
    import torch

    announce("blocks run eagerly in the place of torch.compile, which takes half a minute of a CPU")
    whole = patch.object(torch.nn.Module, "compile", lambda self, **options: None)
    recorded = patch.multiple(torch.compiler, set_stance=nullcontext)
    with whole, recorded, patch.object(torch, "compile", lambda function: function):
        yield


@contextmanager
def instead_of(words: Sequence[str]) -> Iterator[list[str]]:
    """What stands in for the GPU that the keys of a run ask for: `train.cuda_graph` (false: the
    kernels of runs that are recorded), `train.compile`, `backend`; gives the keys that a CPU takes.
    """
    with ExitStack() as stack:
        for recorded in (False, True):
            if f"train.cuda_graph={str(recorded).lower()}" in words:
                stack.enter_context(graphs(recorded=recorded))
        if "train.compile=true" in words:
            stack.enter_context(compiler())
        asked = {word for word in words if word in ("backend=te", "backend=native")}
        if asked:
            announce(
                "emulation multiplies in the place of the backend that a recorded run asks for"
            )
        yield [
            word for word in words if not word.startswith("train.cuda_graph=") and word not in asked
        ]


@contextmanager
def liger_kernels() -> Iterator[None]:
    """The package liger-kernel."""
    helpers()
    import liger_on_cpu

    announce("torch's operators compute what liger's kernels do, and write where they write")
    with patch.dict(sys.modules, liger_on_cpu.modules()):
        yield


class _DecodedWeight:
    """In the place of `TEExecutor`: torch's product with the weight as its codes say, or as they
    would.
    """

    def __init__(self, *, name: str) -> None:
        self.name = name

    def __call__(
        self, x: Any, weight: Any, bias: None, table: Any, *, freed: bool, codes: Any
    ) -> Any:
        from fp4train.quantize import quantize

        spec = table["fprop"].second
        made = codes(False) if codes is not None else quantize(weight.detach(), spec)
        change = made.dequantize().to(x.dtype) - weight.detach().to(x.dtype)
        return x @ (weight.to(x.dtype) + change).T


@contextmanager
def te_layers(script: Any) -> Iterator[None]:
    """Transformer Engine in the parts of `te_selfcheck`."""
    import time
    from types import SimpleNamespace

    import te_given

    from fp4train.nn import Linear
    from fp4train.precision import NVFP4

    announce(
        "a second emulated layer, whose random bits differ, runs in the place of Transformer "
        "Engine's"
    )
    announce("emulation multiplies in the place of Transformer Engine's reference modules")
    announce("torch multiplies by decoded codes of a weight in the place of Transformer Engine")
    layers = script.layers

    def emulated(problem: Any, dtype: Any = None) -> tuple[Linear, Linear]:
        ours, theirs = layers(problem) if dtype is None else layers(problem, dtype)
        place = replace(theirs.layer, name="te")
        return ours, Linear.from_linear(theirs, place, "emulate")

    def milliseconds(step: Any) -> float:
        began = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - began)

    nearest = NVFP4(stochastic_rounding=False)
    stand_ins: dict[str, Any] = {
        "layers": emulated,
        "why_not": lambda recipe, problem: None,
        "te_reference": lambda problem: script.emulated(nearest, problem, "emulate"),
        "with_reference": lambda layer, recipe: layer,
        "milliseconds": milliseconds,
    }
    stand_ins_of_given: dict[str, Any] = {
        "TEExecutor": _DecodedWeight,
        "TRANSFORMER_ENGINE": SimpleNamespace(why_values=lambda *_: None),
    }
    with patch.multiple(script, **stand_ins), patch.multiple(te_given, **stand_ins_of_given):
        yield


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
        capability = (10, 0) if blocks else (9, 0)
        unit = tensor_cores.unit_for(capability, first.spec.format)
        assert unit is not None
        return tensor_cores.product(first, second, unit, fast=backend.fast).to(out_dtype)

    with patch.object(Native, "product", product):
        yield
