"""What one rank of a mesh holds and gathers of each weight of a model, and what tensor-parallel
ranks send each other because of it.

Tensor parallelism cuts a weight as the table of parameters says (`ParameterSpec.cut`). FSDP then
cuts every weight along its first dimension, and ranks gather it in the form that
`precision.gather.wire_form` decides, for a run and here.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fp4train.parallel.config import Mesh
from fp4train.parameters import ParameterSpec, Split, declared
from fp4train.precision.blocks import block_paths
from fp4train.precision.gather import WireForm, wire_form
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize.source import source_bytes

_SIDE = 1 << 12
"""Rows and columns of a tensor whose bytes per element stand for those of all."""


class WeightPart(NamedTuple):
    """What a rank holds and receives of some weights after tensor parallelism.

    Args:
        elements: their number.
        held: those of them that its shard has.
        forward, backward: bytes when shards gather them for fprop, and for backward: for dgrad,
            again for fprop if that is recomputed; what lies outside the blocks stays gathered.
        codes, rounded: bytes of codes, and of values in the recipe's dtype, that stay from step to
            step.
        resident: bytes as the GEMMs read them, and of what was gathered for them, if that is
            something else.
    """

    elements: float = 0.0
    held: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    codes: float = 0.0
    rounded: float = 0.0
    resident: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelWeight:
    """One parameter.

    Args:
        shape: shape of the whole parameter.
        spec: its entry in the table of parameters.
        block: index of its block; None outside the blocks.
        plan: plan of a rank's part of the linear layer whose weight it is.
        tied: whether it is the tensor of another parameter.
    """

    shape: tuple[int, ...]
    spec: ParameterSpec
    block: int | None = None
    plan: LayerPlan | None = None
    tied: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def signature(self) -> object:
        """What it has in common with weights that cost the same."""
        return self.shape, self.plan and self.plan.products

    @property
    def sources(self) -> int:
        """Ranks that share it as experts."""
        return 1 if self.plan is None else self.plan.layer.sources

    def wire(self, mesh: Mesh) -> WireForm:
        """The form in which shards gather it; what lies outside the blocks, and norms, in
        float32.
        """
        if self.plan is None:
            return WireForm()
        return wire_form(self.plan, mesh.weight_ranks, mesh.gather)

    def on_rank(self, mesh: Mesh, *, repeats: bool = False) -> WeightPart:
        """What a rank holds of it; `repeats`: backward runs fprop again."""
        columns = self.shape[-1]
        rows = self.count // columns
        holders = mesh.weight_ranks // self.sources
        share = (1 / mesh.tensor if self.spec.cut.divides else 1.0) / self.sources
        elements = share * self.count
        form = self.wire(mesh)
        forward = share * form.bytes(rows, columns, backward=False)
        backward = share * form.bytes(rows, columns, backward=True, repeats=repeats)
        if self.block is None:
            backward = 0.0
        part = WeightPart(elements, elements / holders, forward, backward)
        if self.plan is None:
            return part._replace(resident=4 * elements)
        operands = {self.plan.sources[gemm, "w"].shared for gemm in ("fprop", "dgrad")}
        sizes = [source_bytes(codes, "w", rows, columns) for codes in operands if codes is not None]
        codes = share * sum(sizes)
        if sizes:
            read = 2 * codes / len(sizes)  # square blocks are read in both directions, as copies
            kept = read if holders == 1 else form.coded * codes / holders
            return part._replace(codes=kept, resident=read + (not form.coded) * forward)
        dtype = self.plan.table.torch_dtype
        read = elements * dtype.itemsize
        rounded = (holders == 1 and dtype.itemsize < 4) * read
        return part._replace(rounded=rounded, resident=read + (form.dtype != dtype) * forward)


def on_rank(weights: Iterable[ModelWeight], mesh: Mesh, *, repeats: bool = False) -> WeightPart:
    """What a rank holds of weights together."""
    parts = [weight.on_rank(mesh, repeats=repeats) for weight in weights]
    return WeightPart(*map(sum, zip(*parts, strict=True)))


def find_weights(model: nn.Module, plans: Mapping[str, LayerPlan]) -> Iterator[ModelWeight]:
    """The parameters of a model (on the meta device) in order; a tied one again where a planned
    layer multiplies it.
    """
    specs = declared(model)
    paths = block_paths(model)
    met: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plan = plans.get(name.removesuffix(".weight"))
        if plan is not None or parameter not in met:
            yield ModelWeight(
                shape=tuple(parameter.shape),
                spec=specs.get(name, ParameterSpec(name=name, stage="last")),
                block=next((i for i, at in enumerate(paths) if name.startswith(f"{at}.")), None),
                plan=plan,
                tied=parameter in met,
            )
        met.add(parameter)


def tensor_traffic(
    weights: Sequence[ModelWeight], stream: float, mesh: Mesh
) -> tuple[list[float], list[float]]:
    """Bytes of each tensor that tensor-parallel ranks gather or scatter of the residual stream in a
    block and microbatch, forward and backward.

    They follow from the table of parameters (`ParameterSpec.cut`):

        OUT       forward gathers x, once for the layers that read it; backward gathers it again for
                  wgrad, since a rank keeps its tokens only, once for them, too, and scatters dx
        IN        forward scatters the sum y; backward gathers dy
        EXPERTS   forward gathers the router's input and scatters the sum; backward likewise, once
                  for all layers of experts of a block
        FEATURES  each pass all-reduces a float32 per token, for the mean square of a norm

    Without sequence parallelism the sums are all-reduced and nothing else is sent. Operands that
    the recipe quantises are gathered as codes (`LayerPlan.sources`), but for those of experts.

    Args:
        weights: weights of the block.
        stream: bytes of the residual stream in BF16.
    """
    plans = [(weight.spec.cut, weight.plan) for weight in weights if weight.plan is not None]
    readers = [plan for cut, plan in plans if cut is Split.OUT]
    writers = [plan for cut, plan in plans if cut is Split.IN]
    routed = any(cut is Split.EXPERTS for cut, _ in plans)
    # Layers of one input gather it once.
    inputs = list({plan.layer.fused or (plan.layer.name,): plan for plan in readers}.values())
    sums = mesh.sum_bytes / 2 * stream
    of_experts = [(1 if mesh.joined else 2) * stream] * routed  # float32
    if mesh.joined:
        readers = inputs
        sums = stream
    forward = [sums] * len(writers) + of_experts
    backward = [sums] * len(readers) + of_experts
    if mesh.sequence:
        forward += [stream] * routed
        forward += [_sent(stream, plan, "x", "fprop") for plan in inputs]
        backward += [stream] * routed
        backward += [_sent(stream, plan, "dy", "dgrad", "wgrad") for plan in writers]
        backward += [_sent(stream, plan, "x", "wgrad") for plan in inputs]
    else:
        forward *= 2
        backward *= 2
    norms = sum(weight.spec.cut is Split.FEATURES for weight in weights)
    statistics = 2 * norms * [2 * stream / plan.layer.in_features for plan in readers[:1]]
    return forward + statistics, backward + statistics


def exchanged_rows(weights: Sequence[ModelWeight], tokens: int) -> list[float]:
    """Bytes that a rank sends to the experts of a block in a microbatch of `tokens`, and gets back,
    in the recipe's dtype; backward their gradients. Nothing, where no ranks share experts.
    """
    for weight in weights:
        if weight.plan is not None and weight.sources > 1:
            layer, size = weight.plan.layer, weight.plan.table.torch_dtype.itemsize
            return 2 * [float(layer.rows(tokens) * layer.in_features * size)]
    return []


def _sent(stream: float, plan: LayerPlan, tensor: str, *gemms: str) -> float:
    """Bytes of a tensor of `stream` BF16 bytes when it is gathered for some GEMMs; one tensor in
    high precision serves them all.
    """
    operands = [plan.sources[gemm, tensor] for gemm in gemms]
    if any(operand.codes is None for operand in operands):
        return stream
    return sum(stream / 2 * operand.bytes(_SIDE, _SIDE, 2) / _SIDE**2 for operand in operands)
