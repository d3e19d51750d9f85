"""The time of each GEMM of a layer: in BF16, as planned, and of quantising its operands.

In a step a layer runs three GEMMs and quantises three tensors, each in the forms that its GEMMs
need (`LayerPlan.sources`):

    x   row-wise for fprop, column-wise for wgrad         once per microbatch
    w   row-wise for fprop, column-wise for dgrad         once per step, from float32
    dy  row-wise for dgrad, column-wise for wgrad         once per microbatch

The time of a tensor is divided equally among its GEMMs, so a row is the full cost of a GEMM; that
of an x among the layers that read it. A GEMM that multiplies the values of codes decodes them. A
layer's experts are quantised one by one, and multiplied one by one where no call multiplies all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.table import GEMMS, OPERANDS, Operands
from fp4train.hardware import Gpu
from fp4train.lab.costs.quantising import (
    EMULATING,
    decode_seconds,
    decoded_bytes,
    quantise_seconds,
)
from fp4train.lab.costs.roofline import gemm_seconds
from fp4train.precision.layer_plan import Gemm, LayerPlan
from fp4train.quantize import ValuesOf


@dataclass(frozen=True, kw_only=True)
class GemmCost:
    """One GEMM of one layer, in seconds per step.

    Args:
        size: (rows, columns, contraction) of the product.
        bf16: seconds of the product in BF16.
        gemm: seconds of the product in the recipe.
        quantise: this GEMM's part of quantising its operands; 0 in high precision.
        emulated: why the GPU's low-precision tensor cores do not run it; None if they do, or
            nothing is quantised.
    """

    layer: str
    gemm_name: str
    size: tuple[int, int, int]
    elements: str
    bf16: float
    gemm: float
    quantise: float
    emulated: str | None = None

    @property
    def total(self) -> float:
        return self.gemm + self.quantise

    @property
    def note(self) -> str:
        """A remark for tables."""
        if self.emulated is not None:
            return "emulated"
        return "does not pay" if self.loses else ""

    @property
    def loses(self) -> bool:
        """Whether quantising for the tensor cores costs more than they save; False for emulation,
        and for products of the values of codes, which save nothing.
        """
        saves = self.emulated is None and self.gemm != self.bf16
        return self.quantise > 0 and saves and self.total > self.bf16


def layer_costs(
    plan: LayerPlan,
    gpu: Gpu,
    tokens: int,
    microbatches: float,
    *,
    weight_passes: float = 1,
    weight_bytes: int = 4,
) -> list[GemmCost]:
    """The GEMMs of one layer; of channels that are multiplied apart as rows of their own.

    Args:
        tokens: tokens of a microbatch.
        microbatches: forward passes per step.
        weight_passes: number of times that a step quantises the whole weight; below 1 if ranks each
            quantise a shard of it.
        weight_bytes: bytes of an element of the weight that is quantised: float32, or gathered
            BF16.
    """
    rows = []
    for part in plan.channel_parts:
        quantise = dict.fromkeys(GEMMS, 0.0)
        for tensor, times, read in (
            ("x", microbatches, 2),
            ("w", weight_passes, weight_bytes),
            ("dy", microbatches, 2),
        ):
            for gemm_name, seconds in _quantising(part, gpu, tensor, tokens, read).items():
                quantise[gemm_name] += times * seconds
        for gemm in part.gemms:
            rows.append(_gemm_cost(part, gemm, gpu, tokens, microbatches, quantise[gemm.name]))
    return rows


def _quantising(
    plan: LayerPlan, gpu: Gpu, tensor: str, tokens: int, read: int
) -> Mapping[str, float]:
    """GEMM → its part of the seconds of quantising a tensor once."""
    layer = plan.layer
    using = [
        gemm
        for gemm in plan.gemms
        if tensor in OPERANDS[gemm.name] and plan.sources[gemm.name, tensor].codes is not None
    ]
    if not using:
        return {}
    backend = using[0].backend
    operands = [plan.sources[gemm.name, tensor] for gemm in using]
    if backend in EMULATING:  # decoded square blocks serve both axes
        codes = {operand.shared for operand in operands}
    else:
        codes = {operand.codes for operand in operands}
    specs = [form.spec for form in codes if form is not None]
    count = {
        "x": layer.rows(tokens) * layer.in_features,
        "w": layer.weights,
        "dy": layer.rows(tokens) * layer.out_features,
    }[tensor]
    calls = 1
    if plan.layer_backend is None:
        calls = active_experts(plan, tokens)
    count //= calls
    seconds = calls * quantise_seconds(gpu, count, specs, backend, read=read)
    if tensor == "x":
        seconds /= max(1, len(plan.readers))
    parts = {gemm.name: seconds / len(using) for gemm in using}
    for gemm in using:
        source = plan.sources[gemm.name, tensor].source
        if isinstance(source, ValuesOf):
            parts[gemm.name] += calls * decode_seconds(gpu, count, source.codes.spec)
    return parts


def active_experts(plan: LayerPlan, tokens: int) -> int:
    """Experts of the layer that have tokens; 1 for other layers."""
    return min(max(1, plan.layer.experts), plan.layer.rows(tokens))


def _gemm_cost(
    plan: LayerPlan, gemm: Gemm, gpu: Gpu, tokens: int, microbatches: float, quantise: float
) -> GemmCost:
    experts = active_experts(plan, tokens)
    rows, columns, contraction = plan.size(gemm.name, tokens)
    shape: tuple[float, float, float]
    if gemm.name == "wgrad":  # it sums over tokens
        shape = (rows, columns, contraction / experts)
    else:
        shape = (rows / experts, columns, contraction)
    products = 1
    if gemm.grouped or gemm.backend in LAYER_BACKENDS:
        products = experts
    elements = gemm.elements
    emulated = None
    if gemm.backend in EMULATING:
        emulated = gemm.why
        elements = _emulated_elements(gemm.operands)
    seconds = gemm_seconds(gpu, elements, *shape, products=products)
    return GemmCost(
        layer=plan.layer.name,
        gemm_name=gemm.name,
        size=(rows, columns, contraction),
        elements=gemm.elements,
        bf16=microbatches * experts * gemm_seconds(gpu, "BF16·BF16", *shape),
        gemm=microbatches * experts / products * seconds,
        quantise=quantise,
        emulated=emulated,
    )


def _emulated_elements(operands: Operands) -> str:
    """The dtype that emulation multiplies: BF16, or float32 if a decoded operand needs it."""
    if any(spec is not None and decoded_bytes(spec) == 4 for spec in operands.both):
        return "FP32·FP32"
    return "BF16·BF16"


def square_gain(operands: Operands, gpu: Gpu, n: int, *, backend: str) -> float:
    """Seconds by which a product n×n×n with both operands quantised for it alone beats BF16."""
    specs = [spec for spec in operands.both if spec is not None]
    quantising = sum(quantise_seconds(gpu, n * n, [spec], backend) for spec in specs)
    low_precision = gemm_seconds(gpu, operands.elements("bfloat16"), n, n, n)
    return gemm_seconds(gpu, "BF16", n, n, n) - low_precision - quantising
