"""A model with its plan, measured for one microbatch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from fp4train.lab.costs.blocks import BlockCost, measure_blocks
from fp4train.lab.costs.rows import Made, made_by
from fp4train.lab.costs.weights import BEFORE_BLOCKS, ModelWeight, find_weights
from fp4train.models.common.cut import multiplied, share_blocks, tensor_cut
from fp4train.models.common.loss import LOGIT_BYTES
from fp4train.parallel.config import Mesh
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.recipe import Recipe
from fp4train.run.produced import ProducedNorms
from fp4train.run.state.moments import Moments
from fp4train.run.state.weights import ModelWeights


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run executes a model, beside its plan.

    Args:
        compiled: whether torch.compile fuses what is between the GEMMs.
        recorded: whether a CUDA graph has the step.
        recomputed: share of the blocks' forward work that backward repeats; 1: only the blocks'
            inputs are kept.
        states: title of what the run keeps (`run.states`) → its bytes per parameter.
        liger: whether Liger's kernels run the loss and, where they are not compiled, what they can
            of the blocks.
        fused: whether products that can add dw to the gradients do, and the optimizer's pass clips;
            else, as `train.kernels=torch` asks, autograd and a pass before it.
        logit_bytes: bytes moved per logit by a loss in torch's operators.
    """

    compiled: bool = False
    recorded: bool = False
    recomputed: float = 0.0
    states: Mapping[str, int] = field(
        default_factory=lambda: {ModelWeights.title: 4, Moments.title: 8}
    )
    liger: bool = False
    fused: bool = True
    logit_bytes: float = LOGIT_BYTES

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments per parameter."""
        return self.states[Moments.title]


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
        multiplied: multiplications of every block per token (`models.common.cut.multiplied`).
        last_multiplied: multiplications besides, as of the head, on a pipeline's last stage.
        before_blocks, after_blocks: weights that stand before and after the blocks.
        outside: plans of linear layers outside the blocks.
        row_wise: layers whose inputs tensor parallelism splits.
        segments: rows of each segment of other weights, where each of them is split; by name.
        tokens: tokens of a microbatch, over all ranks that share it.
        vocabulary, width: size of the head; 0 where the model has none.
        tied: whether the head uses the weight of the embedding.
        produced: operands that norms and gates quantise.
        execution: how the run executes it.
    """

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    multiplied: tuple[int, ...]
    last_multiplied: int
    before_blocks: tuple[ModelWeight, ...]
    after_blocks: tuple[ModelWeight, ...]
    outside: tuple[LayerPlan, ...]
    row_wise: frozenset[str]
    segments: Mapping[str, tuple[int, ...]]
    tokens: int
    vocabulary: int
    width: int
    tied: bool
    produced: Made
    execution: Execution

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of a checkpoint."""
        return sum(self.execution.states.values())

    @cached_property
    def weights(self) -> list[ModelWeight]:
        """All weights of the model; alike blocks have those of the first of them."""
        blocks = [weight for kind in self.order for weight in self.kinds[kind].weights]
        return [*blocks, *self.before_blocks, *self.after_blocks]

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(weight.count for weight in self.weights)

    @cached_property
    def active_parameters(self) -> float:
        """Parameters that one token meets: of experts those to which it is routed."""
        return sum(weight.active for weight in self.weights)

    @property
    def flops_per_token(self) -> int:
        """2 per multiplication: once forward, twice backward."""
        return 6 * (sum(self.multiplied) + self.last_multiplied)

    @property
    def distinct(self) -> list[ModelWeight]:
        """The weights of every kind of block, and those outside."""
        return [
            *(w for kind in self.kinds for w in kind.weights),
            *self.before_blocks,
            *self.after_blocks,
        ]

    def shares(self, mesh: Mesh) -> list[list[range]]:
        """The blocks of every rank of a pipeline, as `parallel.stages` shares them out: a range per
        virtual stage."""
        parts = share_blocks(self.multiplied, self.last_multiplied, mesh.pipeline * mesh.virtual)
        return [parts[rank :: mesh.pipeline] for rank in range(mesh.pipeline)]

    def stages(self, mesh: Mesh) -> list[Counter[int]]:
        """Number of blocks of each kind on every rank of a pipeline."""
        return [
            Counter(self.order[block] for part in parts for block in part)
            for parts in self.shares(mesh)
        ]

    def outer(self, stage: int, mesh: Mesh) -> list[ModelWeight]:
        """The weights outside the blocks that a pipeline stage holds; a tied embedding is on the
        first and the last."""
        last = stage == mesh.pipeline - 1
        if stage == 0 or (self.tied and last):
            weights = list(self.before_blocks)
        else:
            weights = []
        if last:
            weights += self.after_blocks
        return weights

    def not_coded(self, mesh: Mesh) -> dict[str, dict[str, int]]:
        """Quantised weights that are not gathered as codes: why → layer in its block
        ("attention.wk") → number of weights."""
        reasons: dict[str, dict[str, int]] = {}
        for kind, times in Counter(self.order).items():
            for weight in self.kinds[kind].weights:
                if (why := weight.why_values(mesh)) is not None:
                    layer = weight.name.removesuffix(".weight")
                    name = layer.rpartition(f".{weight.block}.")[2]
                    names = reasons.setdefault(why, {})
                    names[name] = names.get(name, 0) + times
        return reasons


def workload(
    model: nn.Module,
    plans: Mapping[str, LayerPlan],
    recipe: Recipe,
    *,
    sequences: int,
    seq_len: int,
    execution: Execution | None = None,
    produced: ProducedNorms | None = None,
) -> Workload:
    """Measure a model on the meta device.

    Args:
        plans: plan of each linear layer in one stretch of a run.
        sequences, seq_len: sizes of a microbatch.
        execution: how the run executes the model; None: eagerly, with fp4train's defaults.
        produced: norms and gates that quantise their results.
    """
    execution = execution or Execution()
    produced = produced or ProducedNorms({}, {})
    cut = tensor_cut(model)
    costs = measure_blocks(
        model,
        plans,
        recipe,
        torch.empty(sequences, seq_len, dtype=torch.int64, device="meta"),
        row_wise=frozenset(cut.in_),
        compiled=execution.compiled,
        liger=execution.liger and not execution.compiled,
        produced=produced,
    )
    by_block: dict[int | None, list[ModelWeight]] = {}
    for weight in find_weights(model, plans):
        by_block.setdefault(weight.block, []).append(weight)
    indices: dict[int, int] = {}
    kinds: list[Kind] = []
    order: list[int] = []
    for block, cost in enumerate(costs):
        if id(cost) not in indices:
            indices[id(cost)] = len(kinds)
            layers = tuple(plan for plan in plans.values() if plan.layer.block == block)
            kinds.append(Kind(weights=tuple(by_block.get(block, ())), plans=layers, cost=cost))
        order.append(indices[id(cost)])
    outside = tuple(plan for plan in plans.values() if plan.layer.block is None)
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    multiplied_by_block, besides = multiplied(model, find_blocks(model), seq_len)
    vocabulary, width = max(
        ((plan.layer.out_features, plan.layer.in_features) for plan in outside), default=(0, 0)
    )
    return Workload(
        kinds=tuple(kinds),
        order=tuple(order),
        multiplied=multiplied_by_block,
        last_multiplied=besides,
        before_blocks=tuple(by_block.get(BEFORE_BLOCKS, ())),
        after_blocks=tuple(by_block.get(None, ())),
        outside=outside,
        row_wise=frozenset(cut.in_),
        segments=cut.segments,
        tokens=sequences * seq_len,
        vocabulary=vocabulary,
        width=width,
        tied=any(id(model.get_submodule(p.layer.name).weight) in embeddings for p in outside),
        produced=made_by(produced.producers.values()),
        execution=execution,
    )
