"""The time of each GEMM of a layer: in BF16, as planned, and of quantising its operands: all that a
recipe adds to its products is counted here, in bytes and instructions.

In a step a layer runs three GEMMs and quantises three tensors, each in the forms that its GEMMs
need (`LayerPlan.sources`):

    x   row-wise for fprop, column-wise for wgrad         once per microbatch
    w   row-wise for fprop, column-wise for dgrad         once per step, from float32
    dy  row-wise for dgrad, column-wise for wgrad         once per microbatch

A scale that depends on the amax of a row or tensor takes one read of the tensor at the speed of a
copy. Then one kernel reads the tensor and writes all its forms: codes and scales, or decoded values
for emulation, which keeps x for wgrad as codes and decodes them. fp4train's kernels take as long as
their bytes at the speed of a copy, or as their instructions (`instructions.py`) if that is longer.
Transformer Engine's are timed by bytes alone; a Hadamard transform, of whichever GEMM, is a kernel
there that reads for itself. A GEMM that multiplies the values of codes decodes them. Operands of
two terms (`precision/terms.py`) take passes of their own (`term_bytes`), and products of residuals,
which count in fprop. A layer's experts are quantised one by one, and multiplied one by one where no
call multiplies all.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from fp4train.backends import GEMMS, LAYER_BACKENDS
from fp4train.hardware import Gpu, stored_bytes
from fp4train.lab.costs.instructions import issue_seconds, quantising_kernel
from fp4train.lab.costs.roofline import COPY, LAUNCH, gemm_seconds, move_seconds
from fp4train.precision.layer_plan import Gemm, LayerPlan
from fp4train.quantize import QuantSpec

EMULATING = ("emulate", "reference")
"""Backends that use no low-precision tensor cores."""

CENTRED_BYTES = 2 + 4
RESIDUAL_BYTES = 4 + 2 + 4
SUM_BYTES = 4 + 8 + 6
RANK_ONE_BYTES = 8
"""Bytes per element that second terms move: of a tensor whose mean is taken out (the mean reads it,
the subtraction reads and writes it); of one with a residual (it and the values of its codes are
read, what is left is written, read, and written as codes or values); of a result that is a sum in
float32 (a term is written, the sum read and written, then rounded); of a weight's gradient to which
the product of two means is added."""


def decoded_bytes(spec: QuantSpec) -> int:
    """Bytes of a decoded element: BF16, or float32 where its values are not exact in BF16."""
    return 2 if spec.exact_in_bf16 else 4


def code_bytes(spec: QuantSpec) -> float:
    """Bytes of an element's code with its part of the block scale."""
    return stored_bytes(spec.format.bits, spec.block[1] or math.inf)


def quantise_seconds(
    gpu: Gpu,
    count: int,
    specs: Collection[QuantSpec],
    backend: str,
    *,
    read: int = 2,
    kept: QuantSpec | None = None,
) -> float:
    """Time of quantising a tensor of `count` elements into one form per spec.

    Args:
        read: bytes per element of the tensor.
        kept: spec of the form that emulation writes as codes.
    """
    size = decoded_bytes if backend in EMULATING else code_bytes
    moved = read + sum(map(size, specs))
    if kept is not None:
        moved += code_bytes(kept) - size(kept)
    share = COPY
    issued = issued_by_amax = 0.0
    transformed = [spec for spec in specs if spec.hadamard is not None]
    if backend in LAYER_BACKENDS:
        share = gpu.quantise_share
        transforms = {spec.hadamard for spec in specs}
        moved += read * (len(transforms) - 1)
    else:
        kernels = map(quantising_kernel, specs)
        issued = LAUNCH + sum(issue_seconds(gpu, count, kernel) for kernel in kernels) / 2
        if transformed:
            stochastic = ", stochastic" if transformed[0].random else ""
            issued_by_amax = issue_seconds(gpu, count, f"amax{stochastic}")
    seconds = max(move_seconds(gpu, count * moved, share), issued)
    current = [spec for spec in specs if not spec.earlier_amax]
    if any(spec.global_scale in ("tensor", "row") or None in spec.block for spec in current):
        seconds += max(move_seconds(gpu, read * count), issued_by_amax)
    return seconds


def decode_seconds(gpu: Gpu, count: int, spec: QuantSpec) -> float:
    """Time of making the values of the codes of a tensor of `count` elements."""
    moved = count * (code_bytes(spec) + decoded_bytes(spec))
    bits = 4 if spec.format.bits <= 4 else 8
    return max(move_seconds(gpu, moved), issue_seconds(gpu, count, f"{bits} bits decoded"))


def active_experts(plan: LayerPlan, tokens: int) -> int:
    """Experts of the layer that have tokens; 1 for other layers."""
    return min(max(1, plan.layer.experts), plan.layer.rows(tokens))


def quantising_seconds(plan: LayerPlan, gpu: Gpu, tokens: int, w_passes: float) -> dict[str, float]:
    """GEMM → its part of the seconds of quantising the operands of a layer in a microbatch: the
    time of a tensor is divided equally among its GEMMs, that of an x among the layers that read it.

    Args:
        tokens, w_passes: see `layer_costs`.
    """
    passes = {"x": 1 / max(1, len(plan.readers)), "w": w_passes, "dy": 1.0}
    rows, out_features, in_features = plan.size("fprop", tokens)
    elements = {"x": rows * in_features, "w": plan.layer.weights, "dy": rows * out_features}
    seconds = dict.fromkeys(GEMMS, 0.0)
    for gemm, moved in term_bytes(plan, elements).items():
        seconds[gemm] = move_seconds(gpu, moved)
    sources = {key: operand for key, operand in plan.sources.items() if operand.codes is not None}
    for tensor, times in passes.items():
        coded = {gemm: operand for (gemm, name), operand in sources.items() if name == tensor}
        if not coded:
            continue
        backend = next(gemm.backend for gemm in plan.gemms if gemm.name in coded)
        # Decoded square blocks serve both axes.
        forms = {op.shared if backend in EMULATING else op.codes for op in coded.values()}
        specs = [form.spec for form in forms if form is not None]
        calls = 1 if backend in LAYER_BACKENDS else active_experts(plan, tokens)
        count = elements[tensor] // calls
        read = 4 if tensor == "w" else 2
        kept = None
        if tensor == "x" and backend in EMULATING and not plan.keeps_values:
            kept = plan.sources["wgrad", "x"].spec
        of_all = quantise_seconds(gpu, count, specs, backend, read=read, kept=kept)
        for gemm, operand in coded.items():
            seconds[gemm] += times * calls * of_all / len(coded)
            if operand.values is not None and operand.codes is not None:
                seconds[gemm] += times * calls * decode_seconds(gpu, count, operand.codes.spec)
            elif kept is not None and gemm == "wgrad":
                seconds[gemm] += times * calls * decode_seconds(gpu, count, kept)
    return seconds


def term_bytes(plan: LayerPlan, elements: Mapping[str, int]) -> Mapping[str, int]:
    """GEMM → bytes that second terms of operands move in a microbatch, beside their products.

    Args:
        elements: elements of x, w and dy.
    """
    moved: Counter[str] = Counter()
    if not plan.quantised:
        return moved
    for gemm, tensor, result in (("fprop", "x", "dy"), ("dgrad", "dy", "x")):
        if tensor in plan.recipe.centred:
            moved[gemm] += CENTRED_BYTES * elements[tensor] + SUM_BYTES * elements[result]
            moved["wgrad"] = RANK_ONE_BYTES * elements["w"]
    residual = plan.recipe.residual
    for tensor in residual.tensors if residual is not None else ():
        moved["fprop"] += RESIDUAL_BYTES * elements[tensor] + SUM_BYTES * elements["dy"]
    return moved


@dataclass(frozen=True, kw_only=True)
class GemmCost:
    """One GEMM of one layer, in seconds of a microbatch or, in an estimate of a plan, of a step.

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
    quantise: float = 0.0
    emulated: str | None = None

    def times(self, number: int) -> Self:
        """The same GEMM so many times."""
        seconds = {key: number * getattr(self, key) for key in ("bf16", "gemm", "quantise")}
        return replace(self, **seconds)

    @property
    def total(self) -> float:
        return self.gemm + self.quantise

    @property
    def loses(self) -> bool:
        """Whether quantising for the tensor cores costs more than they save; False for emulation,
        and for products of the values of codes, which save nothing.
        """
        saves = self.emulated is None and self.gemm != self.bf16
        return self.quantise > 0 and saves and self.total > self.bf16


def layer_costs(plan: LayerPlan, gpu: Gpu, tokens: int, w_passes: float = 1) -> list[GemmCost]:
    """The GEMMs of one layer and microbatch; of channels that are multiplied apart as rows of their
    own.

    Args:
        tokens: tokens of a microbatch.
        w_passes: share of the weight that a microbatch quantises: ranks may each quantise a
            shard of it, and microbatches share the codes of a step.
    """
    products = [product_cost(plan, *product, gpu, tokens) for product in plan.products]
    quantising: list[float] = []
    for part in plan.channel_parts:
        quantising += quantising_seconds(part, gpu, tokens, w_passes).values()
    rows = [replace(row, quantise=s) for row, s in zip(products, quantising, strict=False)]
    residuals = sum(product.gemm for product in products[len(rows) :])
    return [replace(rows[0], gemm=rows[0].gemm + residuals), *rows[1:]]


def product_cost(plan: LayerPlan, gemm: Gemm, features: int, gpu: Gpu, tokens: int) -> GemmCost:
    """The cost of a product of so many in features whose operands are quantised."""
    experts = active_experts(plan, tokens)
    size = plan.size(gemm.name, tokens, features)
    shape: list[float] = list(size)
    shape[2 if gemm.name == "wgrad" else 0] /= experts  # the axis of tokens, which they share
    emulated = gemm.why if gemm.backend in EMULATING else None
    elements = gemm.elements
    if emulated is not None:
        exact = all(spec.exact_in_bf16 for spec in gemm.operands.both if spec is not None)
        elements = "BF16" if exact else "FP32"
    products = experts if gemm.grouped or gemm.backend in LAYER_BACKENDS else 1
    return GemmCost(
        layer=plan.layer.name,
        gemm_name=gemm.name,
        size=size,
        elements=gemm.elements,
        bf16=experts * gemm_seconds(gpu, "BF16", *shape),
        gemm=experts / products * gemm_seconds(gpu, elements, *shape, products=products),
        emulated=emulated,
    )
