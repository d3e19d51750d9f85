"""What one rank of a mesh holds and gathers of each weight of a model.

Tensor parallelism splits a layer's outputs (column-wise) or its inputs (row-wise), and the
vocabulary of embedding and head. FSDP then cuts every weight along its first dimension. Codes of a
shard equal the shard of the codes only where a shard holds whole blocks of scales: 16 rows for
NVFP4, 32 for MX,
128 for FP8 blocks. Quantised weights whose shards do not are gathered in float32, and the plan
names them: `precision.gather` decides, for a run and here.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from fp4train.models.common.cut import tensor_cut
from fp4train.parallel.config import Mesh
from fp4train.precision.blocks import block_paths
from fp4train.precision.gather import WireForm, wire_form
from fp4train.precision.layer_plan import LayerPlan, part_of
from fp4train.precision.layers import find_layers
from fp4train.quantize import QuantSpec, packed_bytes

BEFORE_BLOCKS = -1
"""In the place of a block's index: the weight stands before the blocks."""


@dataclass(frozen=True, kw_only=True)
class ModelWeight:
    """One parameter.

    Args:
        name: name of the parameter.
        shape: shape of the whole parameter.
        block: index of its block; BEFORE_BLOCKS, or None after them.
        split: dimension that tensor parallelism splits; None: each rank holds it whole.
        segments: rows of each segment, where each of them is split.
        plan: plan of the linear layer it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    block: int | None
    split: int | None
    plan: LayerPlan | None = None
    segments: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def multiplied_by(self) -> LayerPlan | None:
        """The plan of the layer that multiplies it: it is a matrix, or one for each expert."""
        if self.plan is None or len(self.shape) != (3 if self.plan.layer.experts else 2):
            return None
        return self.plan

    @property
    def active(self) -> float:
        """Elements that one token meets: of experts those to which the token is routed."""
        if self.plan is None or not self.plan.layer.experts:
            return self.count
        return self.count * self.plan.layer.per_token / self.plan.layer.experts

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of all its elements, as they are quantised."""
        if self.multiplied_by:
            columns = self.shape[-1]
        else:
            columns = math.prod(self.shape[1:])
        return self.count // columns, columns

    @property
    def forms(self) -> tuple[QuantSpec, ...]:
        """The distinct quantised forms: one for square blocks, else a row- and a column-wise
        one."""
        if (plan := self.multiplied_by) is None:
            return ()
        row = plan.fprop.operands.second
        column = plan.dgrad.operands.second
        if row is not None and row == column and row.transposable:
            return (row,)
        return tuple(spec for spec in (row, column) if spec is not None)

    def rank_share(self, mesh: Mesh) -> float:
        """Share of its elements after tensor parallelism."""
        return 1.0 if self.split is None else 1 / mesh.tensor

    def of_rank(self, mesh: Mesh) -> float:
        """Elements after tensor parallelism."""
        return self.count * self.rank_share(mesh)

    def part(self, mesh: Mesh) -> LayerPlan | None:
        """The plan of a rank's part of the layer."""
        if (plan := self.multiplied_by) is None or self.split is None:
            return plan
        return part_of(plan, ("out", "in")[self.split], mesh.tensor, self.segments)

    def wire(self, mesh: Mesh) -> WireForm:
        """The form in which shards gather it; what lies outside the blocks, and norms, in
        float32."""
        part = self.part(mesh)
        if part is None or self.block is None or self.block == BEFORE_BLOCKS:
            return WireForm()
        return wire_form(part, mesh.shard, mesh.gather)

    def why_values(self, mesh: Mesh) -> str | None:
        """Why a weight that its layer quantises is not gathered as codes; None: it is, or the
        configuration says so."""
        part = self.part(mesh)
        if mesh.shard == 1 or part is None or not self.forms:
            return None
        if (why := self.wire(mesh).why) is not None:
            return why
        assert self.plan is not None
        for uncut, cut in ((self.plan.fprop, part.fprop), (self.plan.dgrad, part.dgrad)):
            if uncut.operands.second and not cut.operands.second:
                return cut.why
        return None

    def misaligned(self, mesh: Mesh) -> bool:
        """Whether fewer shards would let it be gathered as codes."""
        if mesh.shard == 1 or not self.wire(mesh).why:
            return False
        return not self.wire(replace(mesh, shard=1)).why

    def wire_bytes(self, mesh: Mesh, *, backward: bool = False, repeats: bool = False) -> float:
        """Bytes of this rank's part of the weight when it is gathered over the shards, once.

        Args:
            backward: for dgrad, else for fprop.
            repeats: backward also needs what fprop does, to recompute it.
        """
        sent = self.wire(mesh).bytes(*self.matrix, backward=backward, repeats=repeats)
        return sent * self.rank_share(mesh)

    def resident_bytes(self, mesh: Mesh) -> float:
        """Bytes of the weight as the GEMMs read it: both forms of its codes, and what was gathered
        for them."""
        form = self.wire(mesh)
        gathered = self.wire_bytes(mesh) if mesh.shard > 1 else 0.0
        if self.forms:
            codes = 2 / len(self.forms) * self._code_bytes * self.rank_share(mesh)
            return codes if form.coded else codes + gathered
        if self.plan is None:
            return gathered
        dtype = self.plan.table.torch_dtype
        if mesh.shard > 1 and form.dtype == dtype:
            return gathered  # it is multiplied as it came
        return self.of_rank(mesh) * dtype.itemsize + gathered

    def shard_code_bytes(self, mesh: Mesh) -> float:
        """Bytes of the codes of this rank's shard, which are kept within a step."""
        if not self.wire(mesh).coded:
            return 0.0
        return self._code_bytes * self.rank_share(mesh) / mesh.shard

    @property
    def _code_bytes(self) -> float:
        return sum(packed_bytes(spec, *self.matrix) for spec in self.forms)


def find_weights(model: nn.Module, plans: Mapping[str, LayerPlan]) -> list[ModelWeight]:
    """The parameters of a model (on the meta device) in order, each once."""
    cut = tensor_cut(model)
    block_of = {
        id(parameter): index
        for index, path in enumerate(block_paths(model))
        for parameter in model.get_submodule(path).parameters()
    }
    owners = {
        f"{name}.{key}": module
        for name, module in model.named_modules()
        for key in module._parameters
    }
    layers = find_layers(model)
    weights: list[ModelWeight] = []
    outside: int | None = BEFORE_BLOCKS
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        block = block_of.get(id(parameter))
        if block is not None:
            outside = None
        is_matrix = parameter.dim() > 1
        split: int | None = None
        if layer in layers and block is not None:
            columns = 1 if is_matrix else None
            split = columns if layer in cut.in_ else 0
        elif name in cut.rows or (
            is_matrix and (layer in layers or isinstance(owners[name], nn.Embedding))
        ):
            split = 0
        weights.append(
            ModelWeight(
                name=name,
                shape=tuple(parameter.shape),
                block=outside if block is None else block,
                split=split,
                plan=plans.get(layer),
                segments=cut.segments.get(layer, cut.segments.get(name, ())),
            )
        )
    return weights


def aligned_shard(weights: Iterable[ModelWeight], mesh: Mesh) -> Mesh:
    """The mesh with the most shards that keeps no weight from being gathered as codes; replicas are
    the other ranks."""
    weights = list(weights)
    ranks = mesh.data
    for shards in range(mesh.shard, 1, -1):
        fewer = replace(mesh, shard=shards, replicate=ranks // shards)
        if mesh.shard % shards == 0 and not any(weight.misaligned(fewer) for weight in weights):
            return fewer
    return replace(mesh, shard=1, replicate=ranks)
