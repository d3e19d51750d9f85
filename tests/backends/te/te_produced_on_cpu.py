"""Norms and gates that quantise their results for layers on TE's real Python: a program, started by
test_te_produced.py, that prints JSON.

Besides what te_products_on_cpu.py fakes: x and dy are quantised to TE's real NVFP4 tensors, by fp4train's reference in
the place of `tex.quantize` (tensor/nvfp4_tensor.py: codes in pairs, the column-wise form transposed, an amax of each;
scales in tiles where `optimize_for_gemm`), and the GEMM decodes the form that it multiplies: rows for fprop and dgrad,
columns for wgrad (csrc/extensions/gemm.cpp, by `transa` and `transb`). Weights are rounded to BF16.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import te_products_on_cpu as products
import torch
import transformer_engine_torch as tex
from torch import Tensor, nn
from transformer_engine.pytorch.cpp_extensions import gemm as cpp_gemm
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

import fp4train as f4
from fp4train.backends.te import given
from fp4train.config.schema import TrainSettings
from fp4train.models.llama import Llama
from fp4train.nn import operands, scaling, weights
from fp4train.precision import NVFP4
from fp4train.precision.context import autocast
from fp4train.quantize import Quantized, quantizer, sharded, to_torch, triton_launch
from fp4train.run.fuse import fuse

NEAREST = NVFP4(stochastic_rounding=False)
ROW, COLUMN = NEAREST.table()["fprop"].first, NEAREST.table()["wgrad"].second
quantised: list[str] = []
"""Who asked TE's kernel to quantise x or dy, by kind of tensor."""
launched: list[str] = []


def quantise(x: Tensor, quantiser: Any, *rest: Any) -> Any:
    """NVFP4 of x and of dy; TE's linear layer quantises weights in 16×16 blocks."""
    if not isinstance(quantiser, NVFP4Quantizer) or quantiser.with_2d_quantization:
        return products.quantise(x, quantiser, *rest)
    quantised.append("x or dy")
    x = x.detach().reshape(-1, x.shape[-1])
    pair = (quantizer(ROW, "cpu", "reference").codes(x), quantizer(COLUMN, "cpu", "reference").codes(x.T))
    made: Any = given.tensor((to_torch(pair[0]), to_torch(pair[1])), x.shape)
    if quantiser.internal:
        made = NVFP4TensorStorage(**made.get_metadata())
    made.update_usage(**{f"{form}_usage": getattr(quantiser, f"{form}_usage") for form in ("rowwise", "columnwise")})
    return made


def decoded(codes: Any, column: bool) -> Any:
    """[M, K] of what a GEMM multiplies; after the transform of the column-wise form."""
    if not isinstance(codes, NVFP4TensorStorage):
        return codes
    form = "columnwise" if column else "rowwise"
    data, scales, amax = (getattr(codes, name) for name in (f"_{form}_data", f"_{form}_scale_inv", f"_amax_{form}"))
    spec, shape = (COLUMN if column else ROW), (data.shape[0], 2 * data.shape[1])
    assert codes._with_gemm_swizzled_scales and tuple(scales.shape) == padded(shape)
    found = Quantized(spec, shape, data, scales.reshape(-1), amax.reshape(())).dequantize()
    return found.T if column else found


def padded(shape: tuple[int, int]) -> tuple[int, int]:
    """NVFP4Quantizer.get_scale_shape."""
    return -(-shape[0] // 128) * 128, -(-shape[1] // 16 // 4) * 4


def gemm(a: Any, transa: bool, b: Any, transb: bool, *rest: Any, **options: Any) -> Any:
    wgrad = transb
    return products.gemm(decoded(a, wgrad), transa, decoded(b, wgrad), transb, *rest, **options)


cpp_gemm._NATIVE_GEMM_INPUT_STORAGES += (NVFP4TensorStorage,)
tex.quantize, tex.generic_gemm = quantise, gemm
launch = triton_launch.Launch.__call__


def noted(self: Any, *pointers: Any, **words: Any) -> Any:
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)


triton_launch.Launch.__call__ = noted  # type: ignore[method-assign]
for module in (operands, scaling, sharded, weights):
    module.quantizer = lambda spec, device: quantizer(spec, device, "triton")  # type: ignore[attr-defined]
TOKENS = torch.randint(60, (2, 32), generator=torch.Generator().manual_seed(1))


def model(kernels: str, **shape: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"width": 64, "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 96, "tied": False} | shape
    made = f4.convert(Llama(**sizes).build(vocab_size=60, seq_len=32), backend="te").train()
    fuse(made, TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=32, kernels=kernels), "cpu")
    return made


def trained(
    recipe: Any, kernels: str, *, step: int = 0, sums: bool = False, tokens: Tensor = TOKENS, **shape: Any
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Loss and gradients of two microbatches of a step, and of an evaluation; what was launched."""
    made = model(kernels, **shape)
    for layer in made.modules():
        if sums and isinstance(layer, f4.nn.Linear):
            layer.sum_gradients(True)
    launched.clear()
    quantised.clear()
    for _ in range(2):
        with autocast(recipe, step=step):
            loss = made(tokens, tokens.flip(1))
        loss.backward()
    counts = Counter(launched + quantised)
    with torch.no_grad(), autocast(recipe, step=step):
        evaluated = made(tokens, tokens.flip(1))
    return {"loss": loss, "evaluated": evaluated} | {n: p.grad for n, p in made.named_parameters()}, counts


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Relative distance of the tensors that are not equal in every bit."""
    return {n: float((other[n] - g).norm() / g.norm()) for n, g in one.items() if not torch.equal(other[n], g)}


def results() -> dict[str, Any]:
    """Of each case what was called for two microbatches, without and with producers, and which tensors differ."""
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {"plain": {}, "summed": {"sums": True}, "recomputed": {"recompute": True}}
    for name, options in (cases | {"odd": {"tokens": TOKENS[:, :31]}}).items():
        (plain, before), (fused, counts) = (trained(NEAREST, kernels, **options) for kernels in ("torch", "auto"))
        found[name] = {"before": before, "counts": counts, "apart": apart(plain, fused)}
    first, again, later = (trained(NVFP4(), "auto", step=step)[0] for step in (0, 0, 1))
    found["random bits"] = {"again": len(apart(first, again)), "of another step": len(apart(first, later))}
    return found


if __name__ == "__main__":
    print(json.dumps(results()))
