"""An extension of TE's real Python that multiplies, and small models on it: for te_steps_on_cpu.py
and te_experts_on_cpu.py, and for the ranks of tests/distributed/test_te.py.

Besides what te_calls_on_cpu.py fakes: quantising rounds to BF16, and the GEMM is one in float64,
whose result is added to what it is given where TE asks for that (cublaslt_gemm.cu: `accumulate` is
β = 1). Histories are rolled by TE's own Python (quantization.py _amax_and_scale_update, which
NVTE_UNFUSED_FP8_UPDATE=1 chooses), amaxes enter by a maximum (quantize_fp8.cuh, cast_transpose.cu:
atomicMaxFloat).
"""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Any

import te_calls_on_cpu
import torch
import transformer_engine_torch as tex
from te_calls_on_cpu import shared_input
from te_on_cpu import K, no_gpu, pretend_gpu, te
from torch import Tensor, nn
from transformer_engine.pytorch.cpp_extensions import gemm as cpp_gemm
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.te import TEExecutor
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.precision import Context, Recipe, recompute, resolve, use
from fp4train.quantize import Position, RunStep
from fp4train.run.run import Run
from fp4train.run.step import train_losses

os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
# quantisers are copied in backward, where nothing else looks for a GPU
torch.cuda.current_device = lambda: 0
CPU = torch.device("cpu")
TOKENS = 32
"""Of a row."""
codes: weakref.WeakSet[Any] = weakref.WeakSet()
"""All quantised tensors that are alive."""
tensors: list[weakref.ref[Any]] = []
"""All `TensorCodes`."""
quantised_from: list[tuple[tuple[int, ...], int]] = []
"""Shape and address of every tensor that was quantised."""


class TensorCodes(QuantizedTensorStorage, QuantizedTensor):
    """What a quantiser of x makes that is not `internal`: a tensor for autograd
    (quantized_tensor.py Quantizer; detach and update_usage of tensor/*_tensor.py). It has the forms
    that were asked for; what it gave up is not remade.
    """

    def __new__(cls, values: Tensor, quantizer: Any, usages: dict[str, bool]) -> TensorCodes:
        made: Any = QuantizedTensor.__new__(cls, values.shape, values.dtype, device=values.device)
        made.values, made._quantizer, made.usages = values, quantizer, dict(usages)
        tensors.append(weakref.ref(made))
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    def detach(self) -> TensorCodes:
        return TensorCodes(self.values, self._quantizer, self.usages)

    def get_usages(self) -> dict[str, bool]:
        return self.usages

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        for name, wanted in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)):
            assert not wanted or self.usages[name], f"the {name} form is not there"
            self.usages[name] &= wanted is not False


def quantise(x: Tensor, quantizer: Any, *_: Any) -> Any:
    if shared_input:
        made = TensorCodes(
            x.detach().to(torch.bfloat16), quantizer, Quantizer.get_usages(quantizer)
        )
    else:  # TE's weights are tensors, too, which nothing here looks at
        made = te_calls_on_cpu.quantise(x, quantizer)
        made.values = x.detach().to(torch.bfloat16)
        codes.add(made)
    quantised_from.append((tuple(x.shape), x.untyped_storage().data_ptr()))
    return made


def gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    _: Any,
    out_dtype: Any,
    *rest: Any,
    **__: Any,
) -> Any:
    """cuBLASLt's D = A·B, or D += A·B, column by column: row by row it is D = op(b)·op(a)."""
    accumulate = rest[7]  # after bias, its dtype, gelu, its input, grad, the workspace and its size
    a, b = (
        each.values if isinstance(each, (te_calls_on_cpu.Codes, TensorCodes)) else each
        for each in (a, b)
    )
    product = ((b.T if transb else b).double() @ (a.T if transa else a).double()).float()
    found = (
        te_calls_on_cpu.TE_DTYPES[out_dtype]
        if out is None
        else str(out.dtype).removeprefix("torch.")
    )
    kind = "wgrad" if transb else "fprop" if transa else "dgrad"
    at = None if out is None else out.data_ptr()
    te_calls_on_cpu.gemms.append({"gemm": kind, "d": found, "at": at})
    if out is None:
        return product.to(getattr(torch, found)), None, None, None
    return (out.add_(product) if accumulate else out.copy_(product)), None, None, None


cpp_gemm._NATIVE_GEMM_INPUT_STORAGES += (TensorCodes,)
call = TEExecutor.__call__


def on_a_gpu(*arguments: Any) -> Tensor:
    *tensors, shared = arguments

    def codes(column: bool) -> Any:
        with no_gpu():
            return given_codes(column)

    given_codes = shared.codes
    if given_codes is not None:
        shared = shared._replace(codes=codes)
    with pretend_gpu():
        return call(*tensors, shared)


TEExecutor.__call__ = on_a_gpu  # type: ignore[method-assign]
tex.quantize = quantise
tex.generic_gemm = gemm
tex.bgrad_quantize = lambda dy, quantizer: (dy.sum(0), quantise(dy, quantizer))
updates: list[str] = []
"""Direction of each update of histories."""
manager = te.quantization.FP8GlobalStateManager
roll = manager.reduce_and_update_fp8_tensors


def noted(cls: Any, forward: bool = True) -> None:
    if any(
        key.startswith("forward") is forward for key in cls.quantization_state.global_amax_buffer
    ):
        updates.append("forward" if forward else "backward")
    roll(forward=forward)


manager.reduce_and_update_fp8_tensors = classmethod(noted)


def added(model: nn.Module) -> int:
    """GEMMs that wrote to where the gradients of a model are: the first may be one that autograd
    took.
    """
    gradients = {each.grad.data_ptr() for each in model.parameters() if each.grad is not None}
    return sum(each["at"] in gradients for each in te_calls_on_cpu.gemms)


class Model(nn.Module):
    """Layers after a table of tokens; the loss is a sum over tokens."""

    recomputes = False

    def __init__(self, layers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Buffer(torch.randn(64, K, generator=generator).bfloat16())
        self.wanted = nn.Buffer(torch.randn(64, K, generator=generator))
        self.layers = nn.ModuleList(nn.Linear(K, K, bias=False, dtype=dtype) for _ in range(layers))
        for each in self.layers:
            nn.init.normal_(each.weight, std=0.1, generator=generator)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.table[tokens_BT].detach().requires_grad_()
        for layer in self.layers:
            x = recompute(layer, x) if self.recomputes else layer(x)
        return (x.float() * self.wanted[targets_BT]).sum()


def made(
    recipe: Recipe,
    *,
    backend: str = "te",
    rows: int = 1,
    layers: int = 1,
    sums: bool = True,
    in_product: bool = True,
) -> Any:
    """What `train_losses` needs of a run, with four sequences in a batch."""
    model = Model(layers)
    convert(model, backend=backend)
    for module in model.layers:
        module.sum_gradients(sums, in_product=in_product)
    run = SimpleNamespace(
        model=model,
        world=SimpleNamespace(size=1, data_rank=0, peers=None),
        rank_rows=4,
        microbatch_rows=rows,
        loss_scale=1.0,
        config=SimpleNamespace(
            train=SimpleNamespace(seq_len=TOKENS, batch_size=4),
            policy=None,
            run=SimpleNamespace(seed=0),
        ),
        step=0,
        counters=None,
        called_layers=None,
        teacher=None,
        device=CPU,
        pipeline=None,
    )
    run.region = lambda: Run.region(run)  # type: ignore[arg-type]
    apply(run, recipe)
    return run


def apply(run: Any, recipe: Recipe) -> None:
    for module in run.model.layers:
        module.apply_plan(
            resolve(module.layer, recipe, None, module.backend, Device.of(CPU)), recipe, None, CPU
        )
    te_runs = run.model.layers[0].backend == "te"
    run._regions = [(LAYER_BACKENDS["te"], [recipe.table()])] if te_runs else []
    run.recipe = recipe


def step(run: Any) -> None:
    """Forward and backward of a step's microbatches; gradients stay."""
    generator = torch.Generator().manual_seed(run.step)
    tokens = torch.randint(64, (4, TOKENS), generator=generator)
    rows = [(part, part.flip(1)) for part in tokens.split(run.microbatch_rows)]
    run.model.zero_grad(set_to_none=True)
    for _ in train_losses(run, run.recipe, rows, 1.0):
        pass
    run.step += 1


def step_context(run: Any) -> Any:
    return use(
        Context(
            recipe=run.recipe,
            position=Position(RunStep(0, run.step)),
            counts="nothing",
            applied=True,
        )
    )
