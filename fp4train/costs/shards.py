"""What one rank holds of the weights: their sizes after splitting, and the quantised ones that a shard cuts badly.

Tensor parallelism splits a layer's outputs (column-wise) or its inputs (row-wise), and the vocabulary of embedding and
head. FSDP then cuts every weight along its first dimension. Codes of a shard equal the shard of the codes only where a
shard holds whole blocks of scales: 16 rows for NVFP4, 32 for MX, 128 for FP8 blocks. Other weights are gathered in high
precision, and the plan names them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from fp4train.costs.blocks import packed_bytes
from fp4train.costs.mesh import Mesh
from fp4train.precision.blocks import block_paths
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import LayerPlan
from fp4train.quantize import QuantSpec

ROW_WISE = ("attention.wo", "mlp.down")
"""Layers whose inputs tensor parallelism splits: those that write to the residual stream."""


def row_wise(model: nn.Module) -> frozenset[str]:
    """The linear layers whose inputs tensor parallelism splits: as the model's cut says, else `ROW_WISE`."""
    cut = getattr(model, "fp4train_tensor_cut", None)
    if cut is not None:
        return frozenset(cut().in_)
    return frozenset(name for name in find_layers(model) if name.endswith(ROW_WISE))


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter.

    Args:
        name: of the parameter.
        shape: of the whole parameter.
        block: index of its block; -1 before the blocks, None after them.
        split: dimension that tensor parallelism splits; None: each rank holds it whole.
        plan: of the linear layer it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    block: int | None
    split: int | None
    plan: LayerPlan | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def forms(self) -> tuple[QuantSpec, ...]:
        """The distinct quantised forms: one for square blocks, else a row-wise and a column-wise one."""
        if self.plan is None or len(self.shape) != 2:
            return ()
        row, column = self.plan.fprop.operands.second, self.plan.dgrad.operands.second
        if row is not None and row == column and row.transposable:
            return (row,)
        return tuple(spec for spec in (row, column) if spec is not None)

    def of_rank(self, mesh: Mesh) -> float:
        """Elements after tensor parallelism."""
        return self.count / (1 if self.split is None else mesh.tensor)

    def rows(self, mesh: Mesh) -> float:
        """Rows of a rank's shard."""
        return self.shape[0] / (mesh.tensor if self.split == 0 else 1) / mesh.shard

    def misaligned(self, mesh: Mesh) -> bool:
        """Whether it is quantised and a shard is not made of whole blocks."""
        if mesh.shard * mesh.tensor == 1 or not self.forms:
            return False
        assert self.plan is not None
        columns = self.shape[1] / (mesh.tensor if self.split == 1 else 1)
        row, column = self.plan.fprop.operands.second, self.plan.dgrad.operands.second
        tall = [row.block[0] if row else 1, column.block[1] if column else 1]
        wide = [row.block[1] if row else 1, column.block[0] if column else 1]
        return any(self.rows(mesh) % (n or 1) for n in tall) or any(columns % (n or 1) for n in wide)

    def wire_bytes(self, mesh: Mesh) -> float:
        """Bytes of this rank's part of the weight when it is gathered over the shards."""
        elements = self.of_rank(mesh)
        if mesh.gather == "recipe" and self.forms and not self.misaligned(mesh):
            return sum(packed_bytes(spec, *_matrix(self.shape)) for spec in self.forms) * elements / self.count
        return elements * (2 if mesh.gather == "bf16" and len(self.shape) > 1 else 4)

    def resident_bytes(self, mesh: Mesh) -> float:
        """Bytes of the weight as the GEMMs read it: both forms of its codes, and what was gathered for them."""
        if self.forms:
            codes = 2 / len(self.forms) * sum(packed_bytes(spec, *_matrix(self.shape)) for spec in self.forms)
            made = codes * self.of_rank(mesh) / self.count
            gathered = self.wire_bytes(mesh) if mesh.gather != "recipe" or self.misaligned(mesh) else 0.0
            return made + (gathered if mesh.shard > 1 else 0.0)
        copy = 2 if self.plan is not None else 0
        return self.of_rank(mesh) * copy + (self.wire_bytes(mesh) if mesh.shard > 1 else 0.0)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def find_weights(model: nn.Module, plans: Mapping[str, LayerPlan]) -> list[Weight]:
    """The parameters of a model (on the meta device) in order, each once."""
    paths, rows = block_paths(model), row_wise(model)
    of_block = {id(p): i for i, path in enumerate(paths) for p in model.get_submodule(path).parameters()}
    owners = {f"{name}.{key}": m for name, m in model.named_modules() for key in m._parameters}
    linear = find_layers(model)
    found: list[Weight] = []
    before = True
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        block: int | None = of_block.get(id(parameter))
        before = before and block is None
        plan = plans.get(layer)
        matrix = parameter.dim() > 1
        if layer in linear and block is not None:
            split = 0 if layer not in rows else (1 if matrix else None)
        else:
            split = 0 if matrix and (layer in linear or isinstance(owners[name], nn.Embedding)) else None
        place = block if block is not None else (-1 if before else None)
        found.append(Weight(name=name, shape=tuple(parameter.shape), block=place, split=split, plan=plan))
    return found


def stages(mesh: Mesh, blocks: int) -> list[range]:
    """The blocks of every stage: equal parts; where they do not divide, the first stages have one more."""
    each, more = divmod(blocks, mesh.pipeline)
    starts = [stage * each + min(stage, more) for stage in range(mesh.pipeline + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def aligned_shard(weights: Iterable[Weight], mesh: Mesh) -> Mesh | None:
    """The mesh with the most shards that cuts no block, the rest being replicas; None if there is none."""
    weights = list(weights)
    for shard in range(mesh.shard, 0, -1):
        if mesh.shard % shard == 0:
            other = replace(mesh, shard=shard, replicate=mesh.replicate * mesh.shard // shard)
            if not any(weight.misaligned(other) for weight in weights):
                return other
    return None
