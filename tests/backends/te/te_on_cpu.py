"""Run TE's real Python code without its CUDA extension; a program, started by test_te_real.py, that
prints JSON.

Real: everything in the `transformer_engine` wheel that is Python: `te.autocast`, `te.Linear`'s
forward and backward, recipe states, `NVFP4Quantizer`, `HybridQuantizer`, `CustomRecipe`, the
pure-torch NVFP4 reference (quantiser and GEMM). Faked: the compiled extension
`transformer_engine_torch` (names and enum values; it computes nothing), a CUDA device,
`Tensor.is_cuda`, the GPU's capability, the cuBLAS workspace, and three optional packages of TE's.
So this says what TE's Python does with our recipes. It says nothing about TE's kernels.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.machinery
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch

warnings.simplefilter("ignore")
# TE's own fusions, as torch computes them: a compiler takes half a minute
os.environ["NVTE_TORCH_COMPILE"] = "0"


class DType(enum.IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class FusedAttention(enum.IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class ForwardSlot(enum.IntEnum):
    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class BackwardSlot(enum.IntEnum):
    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class Extension(types.ModuleType):
    """Any name exists, as a class where TE's annotations need one; nothing of it computes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name.startswith("CommOverlap") else MagicMock(name=name)
        setattr(self, name, value)
        return value


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """TE's Python believes that there is a CUDA device and that tensors lie on it; fp4train must
    not.
    """
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(torch.Tensor, "is_cuda", property(lambda self: True), create=True),
    ):
        yield


@contextmanager
def no_gpu() -> Iterator[None]:
    """Within `pretend_gpu`, for calls of fp4train that TE's Python makes."""
    with patch.object(torch.Tensor, "is_cuda", _IS_CUDA, create=True):
        yield


_IS_CUDA = torch.Tensor.is_cuda


def fake_extension() -> Any:
    """Import `transformer_engine.pytorch` as if its extension and a Hopper GPU were there."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    extension = Extension("transformer_engine_torch")
    extension.DType = DType
    extension.NVTE_Fused_Attn_Backend = FusedAttention
    extension.FP8FwdTensors = ForwardSlot
    extension.FP8BwdTensors = BackwardSlot
    sys.modules["transformer_engine_torch"] = extension
    optional = (
        "einops",
        "onnxscript",
        "nvdlfw_inspect",
        "nvdlfw_inspect.api",
        "nvdlfw_inspect.logging",
    )
    for name in (
        *optional,
        "nvdlfw_inspect.registry",
        "transformer_engine.pytorch.onnx_extensions",
    ):
        module = MagicMock(name=name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["nvdlfw_inspect"].api = sys.modules["nvdlfw_inspect.api"]
    sys.modules["nvdlfw_inspect.api"].DEBUG_MANAGER = None
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import cpp_extensions, utils

    empty = torch.empty(0)
    for module in [m for n, m in sys.modules.items() if n.startswith("transformer_engine.")]:
        if hasattr(module, "get_device_compute_capability"):
            module.get_device_compute_capability = lambda: (9, 0)
    utils._empty_tensor = lambda: empty
    cpp_extensions.gemm.get_cublas_workspace = lambda *args: empty
    from transformer_engine.pytorch.tensor import nvfp4_tensor

    nvfp4_tensor.get_rht_matrix = lambda signed, device: empty
    nvfp4_tensor.get_random_sign_mask_for_rht = lambda signed, device: int(signed)
    return te


with pretend_gpu():
    te = fake_extension()

from transformer_engine.common.recipe import CustomRecipe  # noqa: E402
from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils  # noqa: E402
from transformer_engine.pytorch.quantization import QuantizerRole, RecipeState  # noqa: E402

from fp4train.backends import Table  # noqa: E402
from fp4train.backends.te import (  # noqa: E402
    QuantizerFactory,
    TEExecutor,
    TransformerEngine,
    executor,
    to_te,
)
from fp4train.nn import Linear  # noqa: E402
from fp4train.precision import (  # noqa: E402
    Layer,
    Recipe,
    autocast,
)
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Block, FP8Current, Mixed  # noqa: E402

M = 64
K = 96
N = 32


def describe(quantizer: Any) -> dict[str, Any]:
    """The settings of a TE quantiser."""
    plain = {
        name: value.name if isinstance(value, enum.Enum) else value
        for name, value in vars(quantizer).items()
        if isinstance(value, bool | int | float | str)
    }
    if type(quantizer).__name__ == "HybridQuantizer":
        plain["row"] = describe(quantizer.rowwise_quantizer)
        plain["column"] = describe(quantizer.columnwise_quantizer)
    return {"kind": type(quantizer).__name__, **plain}


def slots(te_recipe: Any) -> dict[str, Any]:
    """What TE builds for the three tensors of a linear layer under `te_recipe`."""

    def quantizers(mode: str, *kinds: str) -> Any:
        roles = [QuantizerRole(module_type="linear", tensor_type=kind, name="") for kind in kinds]
        return RecipeState.create(
            te_recipe,
            mode=mode,
            num_quantizers=len(kinds) + 1,
            device=torch.device("cpu"),
            roles=[*roles, None],
        ).make_quantizers()

    x, w, _ = quantizers("forward", "input", "weight")
    dy, _ = quantizers("backward", "grad_output")
    return {"input": describe(x), "weight": describe(w), "grad_output": describe(dy)}


def recipes() -> dict[str, Recipe]:
    return {
        "nvfp4": NVFP4(),
        "nvfp4_plain_1d": NVFP4(hadamard=False, stochastic_rounding=False, two_d_weights=False),
        "nvfp4_4over6_weights": NVFP4(four_over_six="weights", four_over_six_bound="none"),
        "nvfp4_row_scaled": Mixed(
            fprop=NVFP4(row_scaled_activation=True), dgrad=NVFP4(), wgrad=NVFP4()
        ),
        "mxfp8_hybrid_2d": MXFP8(element="hybrid", two_d_weights=True),
        "fp8_current_pow2": FP8Current(power_of_two=True),
        "fp8_block_fp32": FP8Block(power_of_two=False),
    }


def same_as_native() -> dict[str, bool]:
    """Whether our factory, given a table that TE has a class for, builds the quantisers which that
    class builds.
    """
    same = {}
    for name, recipe in recipes().items():
        native = to_te(recipe.table())
        if type(native) is not CustomRecipe:
            custom = CustomRecipe(qfactory=QuantizerFactory.of(recipe.table()))
            same[name] = slots(custom) == slots(native)
    return same


def reference_recipe(table: Table) -> CustomRecipe:
    """TE's pure-torch reference in place of the kernels that `table` would run on."""
    two_d = table["fprop"].second.block == (16, 16)
    by_row = table["wgrad"].second.global_scale == "row"

    def factory(role: QuantizerRole | None) -> Any:
        kind = "" if role is None else role.tensor_type
        weight = kind == "weight"
        return reference_nvfp4.NVFP4QuantizerRef(
            dtype=reference_utils.Fp4Formats.E2M1,
            quant_tile_shape=(16, 16) if weight and two_d else (1, 16),
            row_scaled_nvfp4=kind == "input" and by_row,
            with_rht=not weight and table["wgrad"].second.hadamard is not None,
        )

    return CustomRecipe(qfactory=factory)


def run(layer: Linear, recipe: Recipe, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    layer.weight.grad = None
    x = x.detach().requires_grad_()
    with pretend_gpu() if layer.backend == "te" else nullcontext():
        with autocast(recipe):
            y = layer(x)
        y.backward(dy)
    return [y.detach().float(), x.grad.float(), layer.weight.grad.float()]


def against_emulation() -> dict[str, list[bool]]:
    """Whether y, dx, dw of TE's real Linear on its reference quantisers are ours.

    One layer runs all recipes one after the other, there and back: each must get its own
    quantisers.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N, K, generator=generator).bfloat16()
    x = torch.randn(2, M // 2, K, generator=generator).bfloat16()
    dy = torch.randn(2, M // 2, N, generator=generator).bfloat16()
    place = Layer(name="layer", in_features=K, out_features=N, block=0, blocks=1)

    def plain() -> torch.nn.Linear:
        linear = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
        linear.weight.data.copy_(weight)
        return linear

    ours = Linear.from_linear(plain(), place, "reference")
    theirs = Linear.from_linear(plain(), place, "te")
    TransformerEngine.why_not = lambda self, table, layer, device: None
    executor.shares_codes = lambda table: False  # which asks what TE's kernels run
    theirs.states["te"] = TEExecutor(name="layer", translate=reference_recipe)
    base = NVFP4(stochastic_rounding=False)
    switched = {
        "rht_2d": base,
        "no_rht": dataclasses.replace(base, hadamard=False),
        "1d": dataclasses.replace(base, two_d_weights=False),
        "per_token": dataclasses.replace(base, row_scaled_activation=True),
        "rht_2d_again": base,
    }
    return {
        name: list(map(torch.equal, run(ours, recipe, x, dy), run(theirs, recipe, x, dy)))
        for name, recipe in switched.items()
    }


def main() -> None:
    torch.manual_seed(0)
    report: dict[str, Any] = {"against_emulation": against_emulation()}
    with pretend_gpu():
        report["row scaled"] = slots(to_te(recipes()["nvfp4_row_scaled"].table()))["input"]
        report["same_as_native"] = same_as_native()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
