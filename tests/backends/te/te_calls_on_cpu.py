"""The calls that TE's real Python makes of its extension; a program, started by test_te_calls.py,
that prints JSON.

Besides what te_on_cpu.py fakes: quantising gives tensors without values, and the GEMM writes down
the dtypes of its operands and of its result, and gives zeros. cuBLASLt multiplies operands of one
dtype, so what is not quantised must be equal, and of the recipe's dtype.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import te_on_cpu
import torch
import transformer_engine_torch as tex
from prepared import sharing
from te_on_cpu import K, M, pretend_gpu, te
from torch import nn
from transformer_engine.pytorch.cpp_extensions import gemm as cpp_gemm
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

from fp4train import backends
from fp4train.backends.te import executor, region
from fp4train.nn import convert
from fp4train.precision import LayerPolicy, Recipe, autocast
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed
from fp4train.precision.settings import ConstantWeights

TE_DTYPES = {
    te_on_cpu.DType.kFloat32: "float32",
    te_on_cpu.DType.kFloat16: "float16",
    te_on_cpu.DType.kBFloat16: "bfloat16",
}
gemms: list[dict[str, str]] = []
updates: list[str] = []


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
    """A quantised tensor without values."""

    def __init__(self, x: torch.Tensor, quantizer: Any) -> None:
        self.size_ = tuple(x.shape)
        self.dtype = x.dtype
        self.device = x.device
        self._quantizer = quantizer
        self._dtype = x.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.size_)

    def size(self, *dim: int) -> Any:
        return self.shape if not dim else self.shape[dim[0]]

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        pass

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": True}

    def get_data_tensors(self, **_: Any) -> tuple[None, None]:
        return None, None

    def quantize_(self, x: torch.Tensor, *, noop_flag: Any = None) -> Codes:
        """TE's way to quantise a kept weight anew."""
        tex.quantize(x, self._quantizer)
        return self

    def clear(self) -> None:
        pass

    def prepare_for_saving(self) -> tuple[list[Any], Any]:
        return [], self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        return tensors


def kind(x: Any) -> str:
    """ "bfloat16" of a plain tensor, else the quantiser that made it."""
    if isinstance(x, Codes):
        return type(x._quantizer).__name__.removesuffix("Quantizer")
    return str(x.dtype).removeprefix("torch.")


def gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    _: Any,
    out_dtype: Any,
    *__: Any,
    **___: Any,
) -> Any:
    """cuBLASLt's D = A·B, column by column, of which TE's y = x·wᵀ is A = w, B = x."""
    rows = b.shape[1] if transb else b.shape[0]
    columns = a.shape[0] if transa else a.shape[1]
    name = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}[transa, transb]
    found = TE_DTYPES[out_dtype] if out is None else kind(out)
    gemms.append({"gemm": name, "a": kind(a), "b": kind(b), "d": found})
    d = torch.zeros(rows, columns, dtype=getattr(torch, found)) if out is None else out
    return d, None, None, None


def quantise(x: torch.Tensor, quantizer: Any, *_: Any) -> Any:
    """TE's tensor without values; per-tensor kernels write the amax where delayed scaling will look
    for it.
    """
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, x.detach().abs().max().float()))
    return Codes(x, quantizer)


def update(amax: Any, histories: Any, scales: Any, algorithm: Any, dtype: Any, margin: Any) -> None:
    """One roll of all histories of a direction; the gradients' are those of two tensors each."""
    updates.append("backward" if histories[0].shape[1] == 2 else "forward")
    for history in histories:
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()


autocasts = torch.is_autocast_enabled
autocast_dtype = torch.get_autocast_dtype
torch.is_autocast_enabled = lambda device="cpu": autocasts("cpu")
torch.get_autocast_dtype = lambda device: autocast_dtype("cpu")
create = te.quantization.RecipeState.create
te.quantization.RecipeState.create = staticmethod(
    lambda *args, **options: create(*args, **{**options, "device": torch.device("cpu")})
)
for module in [
    m
    for n, m in sys.modules.items()
    if n.startswith("transformer_engine") and hasattr(m, "_empty_tensor")
]:
    module._empty_tensor = lambda: torch.empty(0)
cpp_gemm._NATIVE_GEMM_INPUT_STORAGES += (Codes,)
tex.generic_gemm = gemm
tex.quantize = quantise
tex.bgrad_quantize = lambda dy, quantizer: (dy.sum(0), quantise(dy, quantizer))
tex.fused_amax_and_scale_update_after_reduction = update
te.quantization.FP8GlobalStateManager.is_fp8_available = classmethod(lambda cls: (True, ""))
te.quantization.FP8GlobalStateManager.is_mxfp8_available = classmethod(lambda cls: (True, ""))
te.quantization.FP8GlobalStateManager.is_nvfp4_available = classmethod(lambda cls: (True, ""))
te.quantization.FP8GlobalStateManager.is_fp8_block_scaling_available = classmethod(
    lambda cls: (True, "")
)
te.quantization.check_recipe_support = lambda recipe: None
backends.te.TransformerEngine.why_not = lambda self, table, layer, device: None


def model(layers: int, *, dtype: torch.dtype, bias: bool = False) -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(K, K, bias=bias, dtype=dtype) for _ in range(layers)))
    convert(made, backend="te")
    return made


def run(
    made: nn.Module,
    recipe: Recipe,
    *,
    step: int = 0,
    grad: bool = True,
    policy: Any = None,
    size: float = 1.0,
    constant: ConstantWeights | None = None,
) -> None:
    x = size * torch.randn(M, K, generator=torch.Generator().manual_seed(step))
    x = x.to(torch.bfloat16).requires_grad_()
    tables = (
        [recipe.table()] if policy is None else [recipe.table(), policy.recipe_for_kept.table()]
    )
    with pretend_gpu():
        with (
            nullcontext() if grad else torch.no_grad(),
            region(*tables),
            autocast(recipe, step=step, policy=policy),
            sharing(constant),
        ):
            y = made(x)
        if grad:
            y.backward(torch.ones_like(y))


def calls() -> dict[str, list[dict[str, str]]]:
    """The GEMMs of one forward and backward pass, by recipe and dtype of the weights."""
    base = {
        "nvfp4": NVFP4(),
        "mxfp8": MXFP8(),
        "fp8_current": FP8Current(),
        "fp8_block": FP8Block(),
    }
    found = {}
    for name, recipe in base.items():
        variants = {
            name: recipe,
            f"{name} fprop high": recipe.with_high_precision("fprop"),
            f"{name} wgrad high": recipe.with_high_precision("wgrad"),
            f"{name} forward only": recipe.with_high_precision("dgrad", "wgrad"),
        }
        for variant, each in variants.items():
            for dtype in (torch.float32, torch.bfloat16):
                for bias in (False, True):
                    gemms.clear()
                    label = (
                        f"{variant}, {str(dtype).removeprefix('torch.')} "
                        f"weights{', bias' if bias else ''}"
                    )
                    try:
                        run(model(1, dtype=dtype, bias=bias), each)
                    except Exception as error:
                        gemms.append(
                            {
                                "gemm": "error",
                                "a": f"{type(error).__name__}: {error}"[:300],
                                "b": "",
                                "d": "",
                            }
                        )
                    found[label] = list(gemms)
    return found


def microbatches() -> dict[str, list[int]]:
    """How often the weight is quantised in each pass: two microbatches that share what they make
    of it, an evaluation, two other microbatches, and one that shares nothing.
    """
    found = {}
    weights: list[Any] = []
    plain = tex.quantize

    def noted(x: torch.Tensor, quantizer: Any, *rest: Any) -> Any:
        if x.shape == (K, K):
            weights.append(x)
        return plain(x, quantizer, *rest)

    for name, recipe in (
        ("mxfp8", MXFP8()),
        ("fp8_current", FP8Current()),
        ("fp8_delayed", FP8Delayed(history=4)),
    ):
        made = model(1, dtype=torch.float32)
        counts = []
        tex.quantize = noted
        first, second = ConstantWeights(), ConstantWeights()
        for constant, grad in (
            (first, True),
            (first, True),
            (second, False),
            (second, True),
            (second, True),
            (None, True),
        ):
            weights.clear()
            run(made, recipe, grad=grad, constant=constant)
            counts.append(len(weights))
        found[name] = counts
        tex.quantize = plain
    return found


def described(value: Any) -> Any:
    """What a call hands over by value: numbers and switches, those of quantisers too; of tensors
    shape and dtype.
    """
    if isinstance(value, (torch.Tensor, Codes)):
        return [kind(value), *value.shape]
    if isinstance(value, (tuple, list)):
        return [described(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    held = {
        k: v
        for k, v in sorted(getattr(value, "__dict__", {}).items())
        if isinstance(v, (bool, int, float, str))
    }
    return [type(value).__name__, *(str(item) for item in held.items())]


def repeats() -> dict[str, list[Any]]:
    """The calls of two microbatches, in each of three steps, with all that they hand over by
    value.
    """
    plain = tex.quantize
    multiply = tex.generic_gemm
    seen: list[Any] = []

    def noting(name: str, call: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Any:
            seen.append(
                [name, described(args), {key: described(each) for key, each in options.items()}]
            )
            return call(*args, **options)

        return noted

    found = {}
    for name, recipe in {
        **{
            "nvfp4": NVFP4(),
            "mxfp8": MXFP8(),
            "fp8_current": FP8Current(),
            "fp8_block": FP8Block(),
        },
        "nvfp4 fprop high": NVFP4().with_high_precision("fprop"),
    }.items():
        made = model(2, dtype=torch.float32)
        steps = []
        tex.quantize, tex.generic_gemm = noting("quantize", plain), noting("gemm", multiply)
        for step in range(3):
            seen.clear()
            run(made, recipe, step=step)
            run(made, recipe, step=step)
            steps.append(list(seen))
        found[name] = steps
        tex.quantize = plain
        tex.generic_gemm = multiply
    return found


def delayed() -> dict[str, Any]:
    """Updates of delayed scaling per step, and what evaluation leaves in the histories."""
    recipe = FP8Delayed(history=4)
    made = model(3, dtype=torch.float32)
    counts = []
    for step in range(3):
        updates.clear()
        run(made, recipe, step=step)
        counts.append(
            {direction: updates.count(direction) for direction in ("forward", "backward")}
        )
    before = [layer.states["te"].state() for layer in made]
    updates.clear()
    run(made, recipe, step=7, grad=False, size=100.0)
    after = [layer.states["te"].state() for layer in made]
    same = all(torch.equal(a[k], b[k]) for a, b in zip(before, after, strict=True) for k in a)
    entered = [float(state["amax_history_fwd"].max()) for state in after]
    mixed = model(3, dtype=torch.bfloat16)
    policy = LayerPolicy(first=1, last=0, recipe_for_kept=MXFP8())
    run(mixed, recipe, step=0, policy=policy)  # makes the buffers
    updates.clear()
    run(mixed, recipe, step=1, policy=policy)
    both = {direction: updates.count(direction) for direction in ("forward", "backward")}
    fresh = model(1, dtype=torch.bfloat16)
    run(fresh, recipe, grad=False)
    never = float(fresh[0].states["te"].state()["amax_history_fwd"].abs().max())
    return {
        "updates": counts,
        "entered in training": entered,
        "evaluation leaves the histories alone": same,
        "beside other recipes": both,
        "entered by evaluation alone": never,
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    json.dump(
        {
            "calls": calls(),
            "delayed": delayed(),
            "microbatches": microbatches(),
            "repeats": repeats(),
        },
        sys.stdout,
    )
