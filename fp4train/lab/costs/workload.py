"""A model with its plan, measured for one microbatch, and what one rank of a mesh holds of its weights.

Tensor parallelism splits a layer's outputs (column-wise) or its inputs (row-wise), and the vocabulary of embedding and
head. FSDP then cuts every weight along its first dimension. Codes of a shard equal the shard of the codes only where a
shard holds whole blocks of scales: 16 rows for NVFP4, 32 for MX, 128 for FP8 blocks. Quantised weights whose shards do
not are gathered in float32, and the plan names them: `precision.gather` decides, for a run and here.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import cast

import torch
from torch import nn

from fp4train.lab.costs.blocks import BlockCost, measure_blocks
from fp4train.lab.costs.elementwise import Made, made_by
from fp4train.models.common.cut import TensorCut, TensorParallel, multiplied, share_blocks
from fp4train.models.common.loss import LOGIT_BYTES
from fp4train.nn.produced import Producer
from fp4train.parallel.config import Mesh
from fp4train.precision.blocks import block_paths
from fp4train.precision.gather import WireForm, wire_form
from fp4train.precision.layer_plan import LayerPlan, part_of
from fp4train.precision.layers import find_blocks, find_layers
from fp4train.precision.recipe import Recipe
from fp4train.quantize import QuantSpec, packed_bytes


def tensor_cut(model: nn.Module) -> TensorCut:
    """How tensor parallelism splits a model, as it says itself; nothing, where it does not."""
    says = hasattr(model, "fp4train_tensor_cut")
    return cast(TensorParallel, model).fp4train_tensor_cut() if says else TensorCut(out=(), in_=())


@dataclass(frozen=True, kw_only=True)
class ModelWeight:
    """One parameter.

    Args:
        name: of the parameter.
        shape: of the whole parameter.
        block: index of its block; -1 before the blocks, None after them.
        split: dimension that tensor parallelism splits; None: each rank holds it whole.
        segments: rows of each segment, where each of them is split.
        plan: of the linear layer it belongs to.
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
    def is_multiplied(self) -> bool:
        """Whether it is the weight of a planned layer: a matrix or, of experts, one for each."""
        return self.plan is not None and len(self.shape) == (3 if self.plan.layer.experts else 2)

    @property
    def active(self) -> float:
        """Elements that one token meets: of experts those to which the token is routed."""
        experts = 0 if self.plan is None else self.plan.layer.experts
        return self.count * self.plan.layer.per_token / experts if self.plan is not None and experts else self.count

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of all its elements, as they are quantised."""
        columns = self.shape[-1] if self.is_multiplied else math.prod(self.shape[1:])
        return self.count // columns, columns

    @property
    def forms(self) -> tuple[QuantSpec, ...]:
        """The distinct quantised forms: one for square blocks, else a row-wise and a column-wise one."""
        if self.plan is None or not self.is_multiplied:
            return ()
        row, column = self.plan.fprop.operands.second, self.plan.dgrad.operands.second
        if row is not None and row == column and row.transposable:
            return (row,)
        return tuple(spec for spec in (row, column) if spec is not None)

    def of_rank(self, mesh: Mesh) -> float:
        """Elements after tensor parallelism."""
        return self.count / (1 if self.split is None else mesh.tensor)

    def part(self, mesh: Mesh) -> LayerPlan | None:
        """The plan of a rank's part of the layer."""
        if self.plan is None or not self.is_multiplied:
            return None
        if self.split is None:
            return self.plan
        return part_of(self.plan, ("out", "in")[self.split], mesh.tensor, self.segments)

    def wire(self, mesh: Mesh) -> WireForm:
        """The form in which shards gather it."""
        part = self.part(mesh)
        if part is None or self.block is None or self.block < 0:
            # What lies outside the blocks, and norms, are gathered as they are.
            return WireForm(dtype=torch.bfloat16 if mesh.own_units and len(self.shape) > 1 else torch.float32)
        return wire_form(part, mesh.shard, mesh.gather)

    def why_values(self, mesh: Mesh) -> str | None:
        """Why a weight that its layer quantises is not gathered as codes; None: it is, or the configuration says so."""
        part, form = self.part(mesh), self.wire(mesh)
        if mesh.shard == 1 or part is None or not self.forms or form.why is not None:
            return form.why if self.forms and mesh.shard > 1 else None
        assert self.plan is not None
        pairs = ((self.plan.fprop, part.fprop), (self.plan.dgrad, part.dgrad))
        return next((mine.why for whole, mine in pairs if whole.operands.second and not mine.operands.second), None)

    def misaligned(self, mesh: Mesh) -> bool:
        """Whether fewer shards would let it be gathered as codes."""
        return mesh.shard > 1 and bool(self.wire(mesh).why) and not self.wire(replace(mesh, shard=1)).why

    def wire_bytes(self, mesh: Mesh, *, backward: bool = False, repeats: bool = False) -> float:
        """Bytes of this rank's part of the weight when it is gathered over the shards, once.

        Args:
            backward: for dgrad, else for fprop.
            repeats: backward also needs what fprop does, to recompute it.
        """
        sent = self.wire(mesh).bytes(*self.matrix, backward=backward, repeats=repeats)
        return sent * self.of_rank(mesh) / self.count

    def resident_bytes(self, mesh: Mesh) -> float:
        """Bytes of the weight as the GEMMs read it: both forms of its codes, and what was gathered for them."""
        form = self.wire(mesh)
        if self.forms:
            codes = 2 / len(self.forms) * sum(packed_bytes(spec, *self.matrix) for spec in self.forms)
            made = codes * self.of_rank(mesh) / self.count
            gathered = 0.0 if form.coded else self.wire_bytes(mesh)
            return made + (gathered if mesh.shard > 1 else 0.0)
        came = self.wire_bytes(mesh) if mesh.shard > 1 else 0.0
        if self.plan is None or (mesh.shard > 1 and form.dtype == self.plan.table.torch_dtype):
            return came  # it is multiplied as it came
        return self.of_rank(mesh) * self.plan.table.torch_dtype.itemsize + came

    def code_bytes(self, mesh: Mesh) -> float:
        """Bytes of the codes of this rank's shard, which are kept within a step."""
        form = self.wire(mesh)
        if not form.coded:
            return 0.0
        whole = sum(packed_bytes(spec, *self.matrix) for spec in self.forms)
        return whole * self.of_rank(mesh) / (self.count * mesh.shard)


def find_weights(model: nn.Module, plans: Mapping[str, LayerPlan]) -> list[ModelWeight]:
    """The parameters of a model (on the meta device) in order, each once."""
    paths, cut = block_paths(model), tensor_cut(model)
    of_block = {id(p): i for i, path in enumerate(paths) for p in model.get_submodule(path).parameters()}
    owners = {f"{name}.{key}": m for name, m in model.named_modules() for key in m._parameters}
    linear = find_layers(model)
    found: list[ModelWeight] = []
    before = True
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        block: int | None = of_block.get(id(parameter))
        before = before and block is None
        plan = plans.get(layer)
        matrix = parameter.dim() > 1
        if layer in linear and block is not None:
            split = 0 if layer not in cut.in_ else (1 if matrix else None)
        elif name in cut.rows:
            split = 0
        else:
            split = 0 if matrix and (layer in linear or isinstance(owners[name], nn.Embedding)) else None
        place = block if block is not None else (-1 if before else None)
        shape, segments = tuple(parameter.shape), cut.segments.get(layer, cut.segments.get(name, ()))
        found.append(ModelWeight(name=name, shape=shape, block=place, split=split, plan=plan, segments=segments))
    return found


def aligned_shard(weights: Iterable[ModelWeight], mesh: Mesh) -> Mesh:
    """The mesh with the most shards that keeps no weight from being gathered as codes, the rest being replicas."""
    weights, ranks = list(weights), mesh.shard * mesh.replicate
    counts = (n for n in range(mesh.shard, 0, -1) if mesh.shard % n == 0)
    fewer = (replace(mesh, shard=n, replicate=ranks // n) for n in counts)
    return next(other for other in fewer if not any(weight.misaligned(other) for weight in weights))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Blocks that are alike: the weights and plans of the first of them, and the cost of each."""

    weights: tuple[ModelWeight, ...]
    plans: tuple[LayerPlan, ...]
    cost: BlockCost


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its plan in one stretch of a run, and one microbatch.

    Args:
        kinds: the distinct blocks.
        order: index into `kinds` of every block.
        multiplied: what every block multiplies per token (`models.common.cut.multiplied`).
        last_multiplied: what is multiplied besides, as by the head; the last stage of a pipeline does it.
        before, after: weights that stand before and after the blocks.
        outside: the plans of linear layers outside the blocks.
        row_wise: layers whose inputs tensor parallelism splits.
        segments: of the others' weights, the rows of each segment, where each of them is split; by name.
        tokens: of a microbatch, over all ranks that share it.
        vocabulary, width: of the head; 0 where the model has none.
        tied: whether the head uses the weight of the embedding.
        made: what norms and gates quantise.
        compiled: whether torch.compile fuses what is between the GEMMs.
        recorded: whether a CUDA graph has the step.
        recomputed: share of the blocks' forward work that backward repeats; 1: only the blocks' inputs are kept.
        moment_bytes: of the optimizer's moments per parameter.
        liger: whether Liger's kernels run the loss and, where they are not compiled, what they can of the blocks.
        fused: whether products that can add dw to the gradients do, and the optimizer's pass clips; else, as
            `train.kernels=torch` asks, autograd and a pass before it.
        logit_bytes: moved per logit by a loss in torch's operators.
    """

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    multiplied: tuple[int, ...]
    last_multiplied: int
    before: tuple[ModelWeight, ...]
    after: tuple[ModelWeight, ...]
    outside: tuple[LayerPlan, ...]
    row_wise: frozenset[str]
    segments: Mapping[str, tuple[int, ...]]
    tokens: int
    vocabulary: int
    width: int
    tied: bool
    made: Made
    compiled: bool = False
    recorded: bool = False
    recomputed: float = 0.0
    moment_bytes: int = 8
    liger: bool = False
    fused: bool = True
    logit_bytes: float = LOGIT_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of a checkpoint: the float32 weight and the moments."""
        return 4 + self.moment_bytes

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        blocks = sum(weight.count for kind in self.order for weight in self.kinds[kind].weights)
        return blocks + sum(weight.count for weight in (*self.before, *self.after))

    @cached_property
    def active_parameters(self) -> float:
        """Parameters that one token meets: of experts those to which it is routed."""
        blocks = sum(weight.active for kind in self.order for weight in self.kinds[kind].weights)
        return blocks + sum(weight.active for weight in (*self.before, *self.after))

    @cached_property
    def flops_per_token(self) -> int:
        """2 per multiplication: once forward, twice backward."""
        return 6 * (sum(self.multiplied) + self.last_multiplied)

    @property
    def distinct(self) -> list[ModelWeight]:
        """The weights of every kind of block, and those outside."""
        return [*(w for kind in self.kinds for w in kind.weights), *self.before, *self.after]

    def shares(self, mesh: Mesh) -> list[list[range]]:
        """The blocks of every rank of a pipeline, as `parallel.stages` shares them out: a range per virtual stage."""
        parts = share_blocks(self.multiplied, self.last_multiplied, mesh.pipeline * mesh.virtual)
        return [parts[rank :: mesh.pipeline] for rank in range(mesh.pipeline)]

    def stages(self, mesh: Mesh) -> list[Counter[int]]:
        """How many blocks of each kind every rank of a pipeline has."""
        return [Counter(self.order[index] for part in held for index in part) for held in self.shares(mesh)]

    def outer(self, stage: int, mesh: Mesh) -> list[ModelWeight]:
        """The weights outside the blocks that a pipeline stage holds; a tied embedding is on the first and the last."""
        last = stage == mesh.pipeline - 1
        before = self.before if stage == 0 or (self.tied and last) else ()
        return [*before, *(self.after if last else ())]

    def not_coded(self, mesh: Mesh) -> dict[str, dict[str, int]]:
        """Quantised weights that are not gathered as codes: why → layer in its block ("attention.wk") → weights."""
        found: dict[str, dict[str, int]] = {}
        for kind, times in Counter(self.order).items():
            for weight in self.kinds[kind].weights:
                if (why := weight.why_values(mesh)) is not None:
                    name = weight.name.removesuffix(".weight").rpartition(f".{weight.block}.")[2]
                    names = found.setdefault(why, {})
                    names[name] = names.get(name, 0) + times
        return found


def workload(
    model: nn.Module,
    plans: Mapping[str, LayerPlan],
    recipe: Recipe,
    *,
    sequences: int,
    seq_len: int,
    compiled: bool = False,
    recorded: bool = False,
    recomputed: float = 0.0,
    moment_bytes: int = 8,
    liger: bool = False,
    fused: bool = True,
    producers: Mapping[nn.Module, Producer] = MappingProxyType({}),
    between: Collection[nn.Module] = (),
) -> Workload:
    """Measure a model on the meta device.

    Args:
        plans: what each linear layer runs in one stretch of a run.
        sequences, seq_len: of a microbatch.
        compiled, recomputed, moment_bytes, liger, fused: see `Workload`.
        recorded: `train.cuda_graph`.
        producers: of the norms and gates that quantise their results.
        between: the norms that add up the stream at the end of the block before theirs.
    """
    cut = tensor_cut(model)
    rows = frozenset(cut.in_)
    costs = measure_blocks(
        model,
        plans,
        recipe,
        sequences=sequences,
        seq_len=seq_len,
        row_wise=rows,
        sharing=not compiled,
        liger=liger and not compiled,
        producers=producers,
        between=between,
    )
    made = made_by(producers.values())
    of_block: dict[int | None, list[ModelWeight]] = {}
    for weight in find_weights(model, plans):
        of_block.setdefault(weight.block, []).append(weight)
    known: dict[object, int] = {}
    kinds: list[Kind] = []
    order: list[int] = []
    for index, cost in enumerate(costs):
        weights = tuple(of_block.get(index, ()))
        mine = tuple(plan for plan in plans.values() if plan.layer.block == index)
        own = tuple(made.get((plan.layer.name, tensor)) for plan in mine for tensor in ("x", "dy"))
        key = (cost, own, tuple((w.shape, w.split, None if w.plan is None else w.plan.gemms) for w in weights))
        if key not in known:
            known[key] = len(kinds)
            kinds.append(Kind(weights=weights, plans=mine, cost=cost))
        order.append(known[key])
    outside = tuple(plan for plan in plans.values() if plan.layer.block is None)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    by_block, besides = multiplied(model, find_blocks(model), seq_len)
    vocabulary, width = max(((p.layer.out_features, p.layer.in_features) for p in outside), default=(0, 0))
    return Workload(
        kinds=tuple(kinds),
        order=tuple(order),
        multiplied=by_block,
        last_multiplied=besides,
        before=tuple(of_block.get(-1, ())),
        after=tuple(of_block.get(None, ())),
        outside=outside,
        row_wise=rows,
        segments=cut.segments,
        tokens=sequences * seq_len,
        vocabulary=vocabulary,
        width=width,
        tied=any(id(model.get_submodule(p.layer.name).weight) in embeddings for p in outside),
        compiled=compiled,
        recorded=recorded,
        recomputed=recomputed,
        moment_bytes=moment_bytes,
        liger=liger,
        fused=fused,
        made=made,
    )
