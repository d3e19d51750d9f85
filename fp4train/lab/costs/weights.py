"""What one rank of a mesh holds and gathers of each weight of a model.

Tensor parallelism cuts a weight as the table of parameters says (`ParameterSpec.cut`). FSDP then
cuts every weight along its first dimension, and ranks gather it in the form that
`precision.gather.wire_form` decides, for a run and here.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from fp4train.parallel.config import Mesh
from fp4train.parameters import ParameterSpec, Split, declared
from fp4train.precision.blocks import block_paths
from fp4train.precision.gather import WireForm, wire_form
from fp4train.precision.layer_plan import LayerPlan, part_of
from fp4train.quantize.source import source_bytes

_DIVIDED: Final = (Split.OUT, Split.IN, Split.EXPERTS, Split.VOCABULARY, Split.ROWS)
"""Cuts by which each tensor-parallel rank has its part of a parameter."""


@dataclass(frozen=True, kw_only=True)
class ModelWeight:
    """One parameter.

    Args:
        name: name of the parameter.
        shape: shape of the whole parameter.
        spec: its entry in the table of parameters.
        block: index of its block; None outside the blocks.
        plan: plan of the linear layer whose weight it is.
        tied: whether it is the tensor of another parameter.
    """

    name: str
    shape: tuple[int, ...]
    spec: ParameterSpec
    block: int | None = None
    plan: LayerPlan | None = None
    tied: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is multiplied."""
        if self.plan is None:
            return torch.float32
        return self.plan.table.torch_dtype

    def of_rank(self, mesh: Mesh) -> float:
        """Elements after tensor parallelism."""
        return self.count * self._share(mesh)

    def _share(self, mesh: Mesh) -> float:
        if self.spec.cut in _DIVIDED:
            return 1 / mesh.tensor
        return 1.0

    def part(self, mesh: Mesh) -> LayerPlan:
        """The plan of a rank's part of the layer.

        Raises:
            ValueError: it is no weight of a layer.
        """
        if self.plan is None:
            raise ValueError(f"{self.name} is no weight of a linear layer")
        cut = "in" if self.spec.cut is Split.IN else "out"
        return part_of(self.plan, cut, mesh.tensor, self.spec.segments)

    def wire(self, mesh: Mesh) -> WireForm:
        """The form in which shards gather it; what lies outside the blocks, and norms, in
        float32.
        """
        if self.plan is None or self.block is None:
            return WireForm()
        return wire_form(self.part(mesh), mesh.shard, mesh.gather)

    def wire_bytes(self, mesh: Mesh, *, backward: bool = False, repeats: bool = False) -> float:
        """Bytes of this rank's part of the weight when it is gathered over the shards, once.

        Args:
            backward: for dgrad, else for fprop.
            repeats: backward also needs what fprop does, to recompute it.
        """
        sent = self.wire(mesh).bytes(*self._matrix, backward=backward, repeats=repeats)
        return sent * self._share(mesh)

    @property
    def _matrix(self) -> tuple[int, int]:
        """(rows, columns) of all its elements, as they are quantised."""
        return self.count // self.shape[-1], self.shape[-1]

    def code_bytes(self, mesh: Mesh) -> float:
        """Bytes of the codes of this rank's part of the weight, each once."""
        if self.plan is None:
            return 0.0
        codes = {self.plan.sources[gemm, "w"].shared for gemm in ("fprop", "dgrad")}
        size = sum(source_bytes(form, "w", *self._matrix) for form in codes if form is not None)
        return size * self._share(mesh)

    def resident_bytes(self, mesh: Mesh) -> float:
        """Bytes of the weight as the GEMMs read it, and of what was gathered for them."""
        gathered = self.wire_bytes(mesh) if mesh.shard > 1 else 0.0
        if self.plan is None:
            return gathered
        form = self.wire(mesh)
        codes = self.code_bytes(mesh)
        if codes:
            operands = [self.plan.sources[gemm, "w"] for gemm in ("fprop", "dgrad")]
            # GEMMs read square blocks in both directions, as two copies.
            copies = 2 / len({operand.shared for operand in operands if operand.codes})
            return copies * codes + (0.0 if form.coded else gathered)
        if mesh.shard > 1 and form.dtype == self.dtype:
            return gathered  # it is multiplied as it came
        return self.of_rank(mesh) * self.dtype.itemsize + gathered


def find_weights(model: nn.Module, plans: Mapping[str, LayerPlan]) -> list[ModelWeight]:
    """The parameters of a model (on the meta device) in order; a tied one again where a planned
    layer multiplies it.
    """
    specs = declared(model)
    block_of = {
        id(parameter): index
        for index, path in enumerate(block_paths(model))
        for parameter in model.get_submodule(path).parameters()
    }
    weights: list[ModelWeight] = []
    met: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer, _, kind = name.rpartition(".")
        plan = plans.get(layer) if kind == "weight" else None
        tied = id(parameter) in met
        if tied and plan is None:
            continue
        met.add(id(parameter))
        weights.append(
            ModelWeight(
                name=name,
                shape=tuple(parameter.shape),
                spec=specs.get(name, ParameterSpec(name=name, stage="last")),
                block=block_of.get(id(parameter)),
                plan=plan,
                tied=tied,
            )
        )
    return weights


def elements(weights: Iterable[ModelWeight], mesh: Mesh) -> float:
    """Elements of some weights after tensor parallelism."""
    return sum(weight.of_rank(mesh) for weight in weights)
