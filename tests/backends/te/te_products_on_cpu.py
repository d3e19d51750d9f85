"""An extension of TE's real Python that multiplies, and small models on it: for the programs beside
it, and for the ranks of tests/distributed/test_te.py.

Besides what te_on_cpu.py fakes: quantising rounds to BF16, and the GEMM is one in float64,
whose result is added to what it is given where TE asks for that (cublaslt_gemm.cu: `accumulate` is
β = 1). Histories are rolled by TE's own Python (quantization.py _amax_and_scale_update, which
NVTE_UNFUSED_FP8_UPDATE=1 chooses), amaxes enter by a maximum (quantize_fp8.cuh, cast_transpose.cu:
atomicMaxFloat).
"""

from __future__ import annotations

import os
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import te_on_cpu
import torch
import transformer_engine_torch as tex
from te_on_cpu import K, no_gpu, pretend_gpu, te
from torch import Tensor, nn
from transformer_engine.pytorch.cpp_extensions import gemm as cpp_gemm
from transformer_engine.pytorch.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    Quantizer,
)

from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.te import TEExecutor, TransformerEngine, executor
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.parallel.world import World
from fp4train.precision import Context, Recipe, recompute, resolve, use
from fp4train.quantize import Position, RunStep
from fp4train.run.state.base import LossScale
from fp4train.run.step import train_losses
from fp4train.run.timeline import Course

os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
# quantisers are copied in backward, where nothing else looks for a GPU
torch.cuda.current_device = lambda: 0
CPU = torch.device("cpu")
TOKENS = 32
"""Of a row."""
DTYPES = {
    te_on_cpu.DType.kFloat32: "float32",
    te_on_cpu.DType.kFloat16: "float16",
    te_on_cpu.DType.kBFloat16: "bfloat16",
}
gemms: list[dict[str, Any]] = []
"""Each GEMM, with the kinds of its operands and its result."""
codes: weakref.WeakSet[Any] = weakref.WeakSet()
"""All quantised tensors that are alive."""
quantised_from: list[tuple[tuple[int, ...], int]] = []
"""Shape and address of every tensor that was quantised."""
shared_input: list[bool] = []
"""Not empty while an input is quantised for all layers that read it."""
codes_of = executor._Built.codes_of


def codes_of_input(*arguments: Any) -> Any:
    shared_input.append(True)
    try:
        return codes_of(*arguments)
    finally:
        shared_input.pop()


executor._Built.codes_of = codes_of_input  # type: ignore[method-assign]


class Codes(QuantizedTensorStorage):
    """A quantised tensor of which only `values` is looked at."""

    def __init__(self, x: Tensor, quantizer: Any) -> None:
        self.values = x.detach().to(torch.bfloat16)
        self.dtype = self._dtype = x.dtype
        self.device = x.device
        self._quantizer = quantizer

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def size(self, *dim: int) -> Any:
        return self.values.size(*dim)

    def update_usage(self, **_: Any) -> None:
        pass

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": True}

    def get_data_tensors(self, **_: Any) -> tuple[None, None]:
        return None, None

    def quantize_(self, x: Tensor, *, noop_flag: Any = None) -> Codes:
        """TE's way to quantise a kept weight anew."""
        tex.quantize(x, self._quantizer)
        return self

    def clear(self) -> None:
        pass

    def prepare_for_saving(self) -> tuple[list[Any], Any]:
        return [], self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        return tensors


class TensorCodes(QuantizedTensorStorage, QuantizedTensor):
    """What a quantiser of x makes that is not `internal`: a tensor for autograd
    (quantized_tensor.py Quantizer; detach and update_usage of tensor/*_tensor.py). It has the forms
    that were asked for; what it gave up is not remade.
    """

    def __new__(cls, values: Tensor, quantizer: Any, usages: dict[str, bool]) -> TensorCodes:
        tensor: Any = QuantizedTensor.__new__(cls, values.shape, values.dtype, device=CPU)
        tensor.values = values
        tensor._quantizer = quantizer
        tensor.usages = dict(usages)
        return tensor  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    def detach(self) -> TensorCodes:
        return TensorCodes(self.values, self._quantizer, self.usages)

    def get_usages(self) -> dict[str, bool]:
        return self.usages

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        for name, usage in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)):
            assert not usage or self.usages[name], f"the {name} form is not there"
            self.usages[name] &= usage is not False


def quantise(x: Tensor, quantizer: Any, *_: Any) -> Any:
    """TE's tensor; per-tensor kernels write the amax where delayed scaling will look for it."""
    quantised_from.append((tuple(x.shape), x.untyped_storage().data_ptr()))
    if shared_input:
        usages = Quantizer.get_usages(quantizer)
        return TensorCodes(x.detach().to(torch.bfloat16), quantizer, usages)
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, x.detach().abs().max().float()))
    # TE's weights are tensors, too, which nothing here looks at
    quantised = Codes(x, quantizer)
    codes.add(quantised)
    return quantised


def kind(x: Any) -> str:
    """ "bfloat16" of a plain tensor, else the quantiser that made it."""
    if isinstance(x, Codes | TensorCodes):
        return type(x._quantizer).__name__.removesuffix("Quantizer")
    return str(x.dtype).removeprefix("torch.")


def values(x: Any) -> Any:
    return x.values if isinstance(x, Codes | TensorCodes) else x


def gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    _: Any,
    out_dtype: Any,
    *options: Any,
    **__: Any,
) -> Any:
    """cuBLASLt's D = A·B, or D += A·B, column by column: row by row it is D = op(b)·op(a)."""
    # bias, its dtype, gelu, its input, grad, the workspace, its size, accumulate
    bias = options[0]
    grad = options[4]
    accumulate = options[7]
    dtype = DTYPES[out_dtype] if out is None else kind(out)
    name = "wgrad" if transb else "fprop" if transa else "dgrad"
    gemms.append({"gemm": name, "a": kind(a), "b": kind(b), "d": dtype})
    a = values(a).double()
    b = values(b).double()
    product = ((b.T if transb else b) @ (a.T if transa else a)).float()
    if bias is not None and not grad:
        product += bias.float()
    if out is None:
        return product.to(getattr(torch, dtype)), None, None, None
    return (out.add_(product) if accumulate else out.copy_(product)), None, None, None


def bgrad_quantise(dy: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return dy.sum(0), tex.quantize(dy, quantizer)


call = TEExecutor.__call__


def on_a_gpu(*arguments: Any) -> Tensor:
    *tensors, shared = arguments
    weight_codes = shared.codes

    def codes(column: bool) -> Any:
        with no_gpu():
            return weight_codes(column)

    if weight_codes is not None:
        shared = shared._replace(codes=codes)
    with pretend_gpu():
        return call(*tensors, shared)


manager = te.quantization.FP8GlobalStateManager
updates: list[str] = []
"""Direction of each update of histories."""
roll = manager.reduce_and_update_fp8_tensors


def noted(cls: Any, forward: bool = True) -> None:
    keys = cls.quantization_state.global_amax_buffer
    if any(key.startswith("forward") is forward for key in keys):
        updates.append("forward" if forward else "backward")
    roll(forward=forward)


def replace_extension() -> None:
    autocasts = torch.is_autocast_enabled
    autocast_dtype = torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda device="cpu": autocasts("cpu")
    torch.get_autocast_dtype = lambda device: autocast_dtype("cpu")
    create = te.quantization.RecipeState.create
    te.quantization.RecipeState.create = staticmethod(
        lambda *args, **options: create(*args, **{**options, "device": CPU})
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and hasattr(module, "_empty_tensor"):
            module._empty_tensor = lambda: torch.empty(0)
    for format in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        setattr(manager, f"is_{format}_available", classmethod(lambda cls: (True, "")))
    te.quantization.check_recipe_support = lambda recipe: None
    TransformerEngine.why_not = lambda self, table, layer, device: None  # type: ignore[method-assign]
    manager.reduce_and_update_fp8_tensors = classmethod(noted)
    cpp_gemm._NATIVE_GEMM_INPUT_STORAGES += (Codes, TensorCodes)
    tex.quantize = quantise
    tex.generic_gemm = gemm
    tex.bgrad_quantize = bgrad_quantise
    TEExecutor.__call__ = on_a_gpu  # type: ignore[method-assign]


replace_extension()


class Model(nn.Module):
    """Layers after a table of tokens; the loss is a sum over tokens."""

    recomputes = False

    def __init__(self, layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Buffer(torch.randn(64, K, generator=generator).bfloat16())
        self.targets = nn.Buffer(torch.randn(64, K, generator=generator))
        self.layers = nn.ModuleList(nn.Linear(K, K, bias=False) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.1, generator=generator)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.table[tokens_BT].detach().requires_grad_()
        for layer in self.layers:
            x = recompute(layer, x) if self.recomputes else layer(x)
        return (x.float() * self.targets[targets_BT]).sum()


def small_run(
    recipe: Recipe,
    *,
    backend: str = "te",
    rows: int = 1,
    layers: int = 1,
    in_product: bool = True,
) -> Any:
    """What `train_losses` needs of a run, with four sequences in a batch."""
    model = convert(Model(layers), backend=backend)
    course = Course(timeline=None, plan=None, called=None)  # type: ignore[arg-type]
    if backend == "te":
        course._regions = [(LAYER_BACKENDS["te"], [recipe.table()])]
    run = SimpleNamespace(
        model=model,
        world=World(device=CPU),
        rank_rows=4,
        microbatch_tokens=rows * TOKENS,
        microbatch_rows=rows,
        loss_scale=LossScale(),
        config=SimpleNamespace(
            train=SimpleNamespace(seq_len=TOKENS, batch_size=4),
            policy=None,
            run=SimpleNamespace(seed=0),
        ),
        step=0,
        runner=SimpleNamespace(counters=None),
        course=course,
        teacher=None,
        device=CPU,
        pipeline=None,
        recipe=recipe,
    )
    run.region = lambda: course.region(None)
    for layer in model.layers:
        layer.sum_gradients(True, in_product=in_product)
        apply(layer, recipe)
    return run


def apply(layer: Any, recipe: Recipe) -> None:
    plan = resolve(layer.layer, recipe, None, layer.backend, Device.of(CPU))
    layer.apply_plan(plan, recipe, None, CPU)


def step(run: Any) -> None:
    """Forward and backward of a step's microbatches; gradients stay."""
    generator = torch.Generator().manual_seed(run.step)
    tokens = torch.randint(64, (4, TOKENS), generator=generator)
    rows = [(part, part.flip(1)) for part in tokens.split(run.microbatch_rows)]
    run.model.zero_grad(set_to_none=True)
    for _ in train_losses(run, run.recipe, rows, 1.0):
        pass
    run.step += 1


def step_context(recipe: Recipe, step: int = 0) -> Any:
    position = Position(RunStep(0, step))
    return use(Context(recipe=recipe, position=position, counts="nothing", applied=True))
