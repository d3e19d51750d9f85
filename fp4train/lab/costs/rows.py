"""The time of each GEMM of a layer: in BF16, as planned, and of quantising its operands.

In a step a layer runs three GEMMs and quantises three tensors, each in the forms that its GEMMs
need:

    x   row-wise for fprop, column-wise for wgrad         once per microbatch
    w   row-wise for fprop, column-wise for dgrad         once per step, from float32
    dy  row-wise for dgrad, column-wise for wgrad         once per microbatch

The time of a tensor is divided equally among its GEMMs, so a row is the full cost of a GEMM. The
plan decides which GEMMs run on the GPU's low-precision tensor cores; `roofline.py` and
`quantising.py` compute the seconds.

A layer's experts are quantised one by one, and multiplied one by one where no call multiplies all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.table import FORMS, GEMMS, Operands
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.quantising import (
    decode_seconds,
    decoded_bytes,
    needs_amax,
    own_seconds,
    te_seconds,
)
from fp4train.lab.costs.roofline import LAUNCH, gemm_seconds
from fp4train.nn.fused_layers import FusedLayers
from fp4train.precision.layer_plan import Gemm, LayerPlan
from fp4train.quantize import QuantSpec, ValuesOf

EMULATING: Final = ("emulate", "reference")
"""Backends that use no low-precision tensor cores."""

SCALED_LAUNCHES: Final = 2
"""Kernels beside an emulated product with scales of whole tensors, which cuBLAS reads from the GPU:
the one that makes their factor, and the one that has nothing to do where there is one
(`backends/scaled.py`). The product moves the bytes of one in BF16."""

TRITON_SHARE: Final = 0.85
"""Assumed share of cuBLAS's rate that Triton's product reaches, which emulation takes for scales of
rows."""


class MadeFrom(NamedTuple):
    """The kind of `SourceTensors` that x or dy of a layer is quantised from, and the number of
    layers that take the result."""

    kind: str
    layers: int


Made = Mapping[tuple[str, str], MadeFrom]
"""(Layer, "x" or "dy") that norms, gates and their gradients quantise."""
NOTHING_MADE: Made = MappingProxyType({})


def made_by(producers: Iterable[FusedLayers]) -> Made:
    """Operands that these norms and gates quantise."""
    operands = {}
    for producer in producers:
        for layer in producer.readers:
            operands[layer.layer.name, "x"] = MadeFrom(producer.kind, len(producer.readers))
        for layer in producer.writers:
            operands[layer.layer.name, "dy"] = MadeFrom("gradients", len(producer.writers))
    return operands


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
        if self.emulated is not None:
            return "emulated"
        return "does not pay" if self.loses else ""

    @property
    def loses(self) -> bool:
        """Whether quantising for the tensor cores costs more than they save; False for emulation,
        and for products of the values of codes, which save nothing."""
        saves = self.emulated is None and self.gemm != self.bf16
        return self.quantise > 0 and saves and self.total > self.bf16


def why_emulated(gemm: Gemm) -> str | None:
    """Why the GPU's low-precision tensor cores do not run it; None if they do, or nothing is
    quantised."""
    return gemm.why if gemm.backend in EMULATING else None


def shares_x(plan: LayerPlan) -> bool:
    """Whether layers that read the x of this one quantise it once for all, on a GPU elsewhere."""
    if plan.layer_backend is not None:
        backend = LAYER_BACKENDS[plan.layer_backend]
        return backend.shares_input(plan.table, Device(type="cuda", here=False))
    if plan.layer.experts:
        return False
    specs = (plan.fprop.operands.first, plan.wgrad.operands.second)
    return not any(spec is not None and (spec.random or spec.delayed is not None) for spec in specs)


def layer_costs(
    plan: LayerPlan,
    gpu: Gpu,
    tokens: int,
    microbatches: int,
    *,
    weight_passes: float = 1,
    weight_bytes: int = 4,
    layers: Mapping[str, LayerPlan] = MappingProxyType({}),
    produced: Made = NOTHING_MADE,
    sharing: bool = True,
) -> list[GemmCost]:
    """The GEMMs of one layer; of channels that are multiplied apart as rows of their own.

    Args:
        tokens: tokens of a microbatch.
        microbatches: forward passes per step.
        weight_passes: number of times that a step quantises the whole weight; below 1 if ranks each
            quantise a shard of it.
        weight_bytes: bytes of an element of the weight that is quantised: float32, or gathered
            BF16.
        layers: plans of the layers that may share the x of this one, by name.
        produced: operands that norms and gates quantise.
        sharing: whether layers that read one x quantise it once (`shares_x`); not under
            train.compile.
    """
    parts = plan.channel_parts
    if len(parts) > 1:
        rows, outlier_rows = (
            layer_costs(
                part,
                gpu,
                tokens,
                microbatches,
                weight_passes=weight_passes,
                weight_bytes=weight_bytes,
            )
            for part in parts
        )
        return [*rows, *outlier_rows]
    readers = 1
    if sharing and shares_x(plan):
        readers = max(1, sum(name in layers for name in plan.readers))
    quantise = dict.fromkeys(GEMMS, 0.0)
    for tensor in FORMS:
        operand = _Operand(plan, gpu, tensor, tokens)
        source = produced.get((plan.layer.name, tensor))
        if source is not None:
            seconds = operand.from_source(source)
        else:
            seconds = operand.quantised(weight_bytes)
            if tensor == "x":
                seconds /= readers
        times = weight_passes if tensor == "w" else microbatches
        for gemm, spec in operand.uses:
            quantise[gemm.name] += times * seconds / len(operand.uses)
            if tensor == "x" and gemm.name == "wgrad":
                quantise[gemm.name] += times * operand.decoding(gemm, spec)
        for name, spec in operand.values_of:
            quantise[name] += microbatches * operand.decode_seconds(spec)
    return [_gemm_cost(plan, gpu, gemm, tokens, microbatches, quantise) for gemm in plan.gemms]


def _members(plan: LayerPlan, tokens: int) -> int:
    """Experts of the layer that have tokens; 1 for other layers."""
    return min(max(1, plan.layer.experts), plan.layer.rows(tokens))


class _Operand:
    """x, w or dy of a layer, and the GEMMs that quantise it.

    Args:
        tensor: "x", "w" or "dy".
    """

    def __init__(self, plan: LayerPlan, gpu: Gpu, tensor: str, tokens: int) -> None:
        self._gpu = gpu
        self._tensor = tensor
        layer = plan.layer
        gemms = {gemm.name: gemm for gemm in plan.gemms}
        self.uses: list[tuple[Gemm, QuantSpec]] = []
        """GEMMs with the spec by which each multiplies the tensor, where one does."""
        for name, side in FORMS[tensor]:
            spec = getattr(gemms[name].operands, side)
            if spec is not None:
                self.uses.append((gemms[name], spec))
        self.values_of: list[tuple[str, QuantSpec]] = []
        """GEMMs that multiply the values of codes of another, with the spec of the codes."""
        for name, _ in FORMS[tensor]:
            source = plan.sources[name, tensor].source
            if isinstance(source, ValuesOf):
                self.values_of.append((name, source.codes.spec))
        rows = layer.rows(tokens)
        self._count = {
            "x": rows * layer.in_features,
            "w": layer.weights,
            "dy": rows * layer.out_features,
        }[tensor]
        # A backend that runs the whole layer quantises all experts in one call.
        if plan.layer_backend is not None:
            self._calls = 1
        else:
            self._calls = _members(plan, tokens)

    def quantised(self, weight_bytes: int) -> float:
        """Seconds to quantise the tensor for all GEMMs that do."""
        read = weight_bytes if self._tensor == "w" else None
        forms = [(spec, gemm.backend) for gemm, spec in self.uses]
        count = self._count // self._calls
        return self._calls * _forms_seconds(self._gpu, count, forms, read, self._tensor == "x")

    def from_source(self, source: MadeFrom) -> float:
        """Seconds of this layer's part of quantising both forms from the tensors of a source."""
        (_, row), (_, column) = self.uses
        seconds = own_seconds(self._gpu, self._count, row, column, codes=True, source=source.kind)
        return seconds / source.layers

    def decoding(self, gemm: Gemm, spec: QuantSpec) -> float:
        """Seconds to decode x for an emulated wgrad."""
        if gemm.backend not in EMULATING:
            return 0.0
        return self.decode_seconds(spec)

    def decode_seconds(self, spec: QuantSpec) -> float:
        """Seconds to make values of the codes of the tensor."""
        return self._calls * decode_seconds(self._gpu, self._count // self._calls, spec)


def _forms_seconds(
    gpu: Gpu,
    count: int,
    forms: list[tuple[QuantSpec, str]],
    weight: int | None = None,
    kept: bool = False,
) -> float:
    """Seconds to quantise `count` elements into at most two forms, each (spec, backend).

    Args:
        weight: bytes per element that are read of a weight; None: it is x or dy.
        kept: whether emulation keeps codes of the column-wise form.
    """
    seconds = 0.0
    for backend in dict.fromkeys(backend for _, backend in forms):
        specs = [spec for spec, used_by in forms if used_by == backend]
        row, column = (*specs, None)[:2]
        if backend in LAYER_BACKENDS:
            seconds += te_seconds(gpu, count, row, column, read=weight or 2)
        else:
            codes = backend == "native"
            seconds += own_seconds(gpu, count, row, column, codes=codes, weight=weight, kept=kept)
    return seconds


def _gemm_cost(
    plan: LayerPlan,
    gpu: Gpu,
    gemm: Gemm,
    tokens: int,
    microbatches: int,
    quantise: Mapping[str, float],
) -> GemmCost:
    """A row, with the seconds of quantising its operands by name of the GEMM."""
    members = _members(plan, tokens)
    rows, columns, contraction = plan.size(gemm.name, tokens)
    shape: tuple[float, float, float]
    if gemm.name == "wgrad":  # it sums over tokens
        shape = (rows, columns, contraction / members)
    else:
        shape = (rows / members, columns, contraction)
    emulated = why_emulated(gemm)
    if emulated is None:
        elements = gemm.elements
    else:
        elements = _multiplied(gemm.operands)
    if gemm.grouped or plan.layer_backend is not None:
        in_one_call = members
    else:
        in_one_call = 1
    seconds = members / in_one_call * gemm_seconds(gpu, elements, *shape, products=in_one_call)
    scaling = 0.0
    if emulated is not None:
        scaling = members * _scaling_seconds(gemm.operands, seconds / members)
    return GemmCost(
        layer=plan.layer.name,
        gemm_name=gemm.name,
        size=(rows, columns, contraction),
        elements=gemm.elements,
        bf16=microbatches * members * gemm_seconds(gpu, "BF16·BF16", *shape),
        gemm=microbatches * seconds,
        quantise=quantise[gemm.name] + microbatches * scaling,
        emulated=emulated,
    )


def _specs(operands: Operands) -> list[QuantSpec]:
    return [spec for spec in (operands.first, operands.second) if spec is not None]


def _multiplied(operands: Operands) -> str:
    """The dtype that emulation multiplies: BF16, or float32 if a decoded operand needs it."""
    wide = any(decoded_bytes(spec) == 4 for spec in _specs(operands))
    return "FP32·FP32" if wide else "BF16·BF16"


def _scaling_seconds(operands: Operands, product: float) -> float:
    """Seconds by which scales of whole tensors or rows make an emulated product longer."""
    specs = _specs(operands)
    if any(spec.global_scale == "row" or spec.block == (1, None) for spec in specs):
        return product * (1 / TRITON_SHARE - 1)
    of_tensor = any(needs_amax(spec) or spec.delayed for spec in specs)
    return SCALED_LAUNCHES * LAUNCH if of_tensor else 0.0


def square_gain(operands: Operands, gpu: Gpu, n: int, *, backend: str) -> float:
    """Seconds by which a product n×n×n with both operands quantised for it alone beats BF16."""
    quantising = sum(_forms_seconds(gpu, n * n, [(spec, backend)]) for spec in _specs(operands))
    low_precision = gemm_seconds(gpu, operands.elements("bfloat16"), n, n, n)
    return gemm_seconds(gpu, "BF16", n, n, n) - low_precision - quantising
