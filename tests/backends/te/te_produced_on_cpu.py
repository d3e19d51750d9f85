"""Norms and gates that quantise their results for layers on TE's real Python: a program, started by
test_te_produced.py, that prints JSON.

Besides what te_codes_on_cpu.py fakes: x and dy of NVFP4, and all of MXFP8, are quantised to TE's
real tensors, by fp4train's reference in the place of `tex.quantize` (tensor/nvfp4_tensor.py: codes
in pairs, the column-wise form transposed, an amax of each, scales in tiles where
`optimize_for_gemm`; tensor/mxfp8_tensor.py: both forms [M, K]). `tex.rmsnorm_fwd` and its backward
(csrc/extensions/normalization.cpp) compute what torch's operators do, round as they do so that bits
compare, and quantise by the quantizer that they get; TE's kernels do not round to BF16 in between.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import te_codes_on_cpu as codes
import torch
import transformer_engine_torch as tex
from torch import Tensor, nn

sys.path.append(str(pathlib.Path(__file__).parents[2] / "helpers"))
import interpreted
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

import fp4train as f4
from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.te.given import CUDNN
from fp4train.config import TrainSettings
from fp4train.hardware import Device
from fp4train.models.llama import Llama
from fp4train.nn import KernelNorm, PlannedLayer, operands, scaling, weight_form, weights
from fp4train.nn.fused_layers import outlines
from fp4train.precision import MXFP8, NVFP4, Timeline, autocast, find_layers, make_plan
from fp4train.quantize import quantizer, sharded, to_torch, triton_launch
from fp4train.run.fuse import fuse
from fp4train.run.produced import produced_by, with_sources

NEAREST = NVFP4(stochastic_rounding=False)
HYBRID = MXFP8(element="hybrid")
MX, MX_DY = (HYBRID.table()[gemm].first for gemm in ("fprop", "dgrad"))
EPS = Llama().norm_eps
ROW = NEAREST.table()["fprop"].first
COLUMN = NEAREST.table()["wgrad"].second
interpreted.hasten(checks_overflow=False)
quantised: list[str] = []
"""Each call of TE's kernel that quantises."""
launched: list[str] = []
sentences: list[str] = []
"""The plan's, of the last model."""


def quantise(x: Tensor, quantiser: Any, *rest: Any) -> Any:
    """x, dy, and MXFP8's weights; TE's linear layer quantises NVFP4's weights in 16×16 blocks."""
    x = x.detach().reshape(-1, x.shape[-1])
    if isinstance(quantiser, MXFP8Quantizer):
        spec = MX if quantiser.dtype == DType.kFloat8E4M3 else MX_DY
        pair = [quantizer(spec, "cpu", "reference").codes(each) for each in (x, x.T)]
        forms = {"rowwise_data": pair[0].codes, "rowwise_scale_inv": pair[0].scales}
        forms |= {
            "columnwise_data": pair[1].codes.T.contiguous(),
            "columnwise_scale_inv": pair[1].scales.T.contiguous(),
        }
        named = {
            "fp8_dtype": quantiser.dtype,
            "quantizer": quantiser,
            "with_gemm_swizzled_scales": False,
        }
        made: Any = MXFP8Tensor(
            shape=x.shape, dtype=torch.bfloat16, device=x.device, **forms, **named
        )
        storage = MXFP8TensorStorage
    elif isinstance(quantiser, NVFP4Quantizer) and not quantiser.with_2d_quantization:
        both = (
            quantizer(ROW, "cpu", "reference").codes(x),
            quantizer(COLUMN, "cpu", "reference").codes(x.T),
        )
        made = LAYER_BACKENDS["te"].sources.given((to_torch(both[0]), to_torch(both[1])), x.shape)
        storage = NVFP4TensorStorage
    else:
        return codes.quantise(x, quantiser, *rest)
    quantised.append("quantised")
    if quantiser.internal:
        made = storage(**made.get_metadata())
    made.update_usage(
        **{
            f"{form}_usage": getattr(quantiser, f"{form}_usage")
            for form in ("rowwise", "columnwise")
        }
    )
    return made


def made_by(name: str, quantiser: Any, x: Tensor) -> Any:
    """The result of a kernel of TE, which is not one of `tex.quantize`."""
    made = quantise(x, quantiser)
    quantised.pop()
    launched.append(name)
    assert made.get_usages() == {"rowwise": True, "columnwise": True}
    return made


def rmsnorm(
    h: Tensor, weight: Tensor, eps: float, out: None, quantiser: Any, dtype: Any, *_: Any
) -> Any:
    assert (
        dtype == DType.kBFloat16 and h.dtype == weight.dtype == torch.bfloat16 and h.is_contiguous()
    )
    x = torch.nn.functional.rms_norm(h, (h.shape[-1],), weight, eps)
    rstd = (h.float().square().mean(-1) + eps).rsqrt()
    return made_by("rmsnorm_fwd", quantiser, x), None, rstd


def rmsnorm_backward(
    dy: Tensor, h: Tensor, rstd: Tensor, weight: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    launched.append("rmsnorm_bwd")
    assert dy.shape == h.shape == (len(rstd), len(weight))
    h = h.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    with torch.enable_grad():
        torch.nn.functional.rms_norm(h, (h.shape[-1],), weight, EPS).backward(dy)
    return h.grad, weight.grad  # type: ignore[return-value]


tex.rmsnorm_fwd = rmsnorm
tex.rmsnorm_bwd = rmsnorm_backward
tex.quantize = quantise
launch = triton_launch.Launch.__call__


def noted(self: Any, *pointers: Any, **words: Any) -> Any:
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)


triton_launch.Launch.__call__ = noted  # type: ignore[method-assign]
codes_of_norm = KernelNorm.codes


def counted(self: KernelNorm, x: Tensor, change: Tensor | None, weight: Tensor) -> Any:
    launched.extend(["sums"] * (change is not None))
    return codes_of_norm(self, x, change, weight)


KernelNorm.codes = counted  # type: ignore[method-assign]
for module in (operands, scaling, sharded, weight_form, weights):
    module.quantizer = lambda spec, device: quantizer(spec, device, "triton")  # type: ignore[attr-defined]
TOKENS = torch.randint(60, (2, 32), generator=torch.Generator().manual_seed(1))


def model(kernels: str, recipe: Any, sums: bool, tokens: int, **shape: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "width": 64,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 96,
        "tied": False,
    } | shape
    made = f4.convert(Llama(**sizes).build(vocab_size=60, seq_len=32), backend="te").train()
    settings = TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=32, kernels=kernels)
    options: dict[str, Any] = {"tokens": 64, "device": Device(type="cpu"), "backend": "te"}
    plan = make_plan(find_layers(made).values(), Timeline(recipe=recipe, steps=9), None, **options)
    layers = plan.stretches[0].layers
    for layer in made.modules():
        if isinstance(layer, PlannedLayer):
            layer.sum_gradients(sums)
            layer.apply_plan(layers[layer.layer.name], recipe, None, torch.device("cpu"))
    fuse(made, settings, "cpu")
    plan = with_sources(replace(plan, tokens=tokens), outlines(made), settings, "cpu")
    sentences[:] = produced_by(plan, "cpu")
    return made


def trained(
    recipe: Any,
    kernels: str,
    *,
    step: int = 0,
    sums: bool = False,
    tokens: Tensor = TOKENS,
    **shape: Any,
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Loss and gradients of two microbatches of a step, and of an evaluation; what was launched."""
    made = model(kernels, recipe, sums, tokens.numel(), **shape)
    launched.clear()
    quantised.clear()
    for _ in range(2):
        with autocast(recipe, step=step):
            loss = made(tokens, tokens.flip(1))
        loss.backward()
    counts = Counter(launched + quantised)
    with torch.no_grad(), autocast(recipe, step=step):
        evaluated = made(tokens, tokens.flip(1))
    return {"loss": loss, "evaluated": evaluated} | {
        n: p.grad for n, p in made.named_parameters()
    }, counts


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Relative distance of the tensors that are not equal in every bit."""
    return {
        n: float((other[n] - g).norm() / g.norm())
        for n, g in one.items()
        if not torch.equal(other[n], g)
    }


MXFP8_CASES: dict[str, dict[str, Any]] = {
    "mxfp8": {},
    "mxfp8, recomputed": {"recompute": True},
    "mxfp8, cudnn": {},
    "mxfp8, cudnn, summed": {"sums": True},
    "mxfp8, cudnn, recomputed": {"recompute": True},
    "mxfp8, two blocks, recomputed": {"layers": 2, "recompute": True},
}


def results() -> dict[str, Any]:
    """Of each case what was called for two microbatches, without and with producers, and which
    tensors differ.
    """
    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "summed": {"sums": True},
        "recomputed": {"recompute": True},
    }
    cases |= {"two blocks": {"layers": 2}, "odd": {"tokens": TOKENS[:, :31]}}
    for name, options in cases.items():
        (plain, before), (fused, counts) = (
            trained(NEAREST, kernels, **options) for kernels in ("torch", "auto")
        )
        found[name] = {
            "before": before,
            "counts": counts,
            "apart": apart(plain, fused),
            "said": list(sentences),
        }
    for name, options in MXFP8_CASES.items():
        os.environ[CUDNN] = str(int("cudnn" in name))
        (plain, before), (fused, counts) = (
            trained(HYBRID, kernels, **options) for kernels in ("torch", "auto")
        )
        found[name] = {
            "before": before,
            "counts": counts,
            "apart": apart(plain, fused),
            "said": list(sentences),
        }
    del os.environ[CUDNN]
    first, again, later = (trained(NVFP4(), "auto", step=step)[0] for step in (0, 0, 1))
    found["random bits"] = {
        "again": len(apart(first, again)),
        "of another step": len(apart(first, later)),
    }
    return found


if __name__ == "__main__":
    print(json.dumps(results()))
