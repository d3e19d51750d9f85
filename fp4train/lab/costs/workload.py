"""A model with its plan, measured for one microbatch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from fp4train.lab.costs.blocks import BlockCost, measure_blocks
from fp4train.lab.costs.weights import ModelWeight, find_weights
from fp4train.models.common.cut import multiplied, share_blocks
from fp4train.models.common.loss import LOGIT_BYTES
from fp4train.nn.conversion import weight_groups
from fp4train.parallel.config import Mesh
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.recipe import Recipe
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
        logit_bytes: bytes moved per logit by a loss in torch's operators.
    """

    compiled: bool = False
    recorded: bool = False
    recomputed: float = 0.0
    states: Mapping[str, float] = field(
        default_factory=lambda: {ModelWeights.title: 4, Moments.title: 8}
    )
    liger: bool = False
    logit_bytes: float = LOGIT_BYTES

    @property
    def moment_bytes(self) -> float:
        """Bytes of the optimizer's moments per parameter."""
        return self.states.get(Moments.title, 0)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Blocks that are alike: the weights of the first of them, and the cost of each."""

    weights: tuple[ModelWeight, ...]
    cost: BlockCost

    @property
    def layers(self) -> list[ModelWeight]:
        """The weights that planned layers multiply."""
        return [weight for weight in self.weights if weight.plan is not None]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its plan in one stretch of a run, and one microbatch.

    Args:
        kinds: the distinct blocks.
        order: index into `kinds` of every block.
        multiplied: multiplications of every block per token (`models.common.cut.multiplied`).
        last_multiplied: multiplications besides, as of the head, on a pipeline's last stage.
        outside: weights outside the blocks.
        parameters, active_parameters: parameters of the model, and those that one token meets.
        tokens: tokens of a microbatch, over all ranks that share it.
        vocabulary, width: size of the head; 0 where the model has none.
        execution: how the run executes it.
    """

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    multiplied: tuple[int, ...]
    last_multiplied: int
    outside: tuple[ModelWeight, ...]
    parameters: int
    active_parameters: int
    tokens: int
    vocabulary: int
    width: int
    execution: Execution

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter of a checkpoint."""
        return sum(self.execution.states.values())

    @property
    def flops_per_token(self) -> int:
        """2 per multiplication: once forward, twice backward."""
        return 6 * (sum(self.multiplied) + self.last_multiplied)

    def shares(self, mesh: Mesh) -> list[list[range]]:
        """The blocks of every rank of a pipeline, as `parallel.stages` shares them out: a range per
        virtual stage.
        """
        parts = share_blocks(self.multiplied, self.last_multiplied, mesh.pipeline * mesh.virtual)
        return [parts[rank :: mesh.pipeline] for rank in range(mesh.pipeline)]

    def stages(self, mesh: Mesh) -> list[Counter[int]]:
        """Number of blocks of each kind on every rank of a pipeline."""
        return [
            Counter(self.order[block] for part in parts for block in part)
            for parts in self.shares(mesh)
        ]

    def outer(self, stage: int, mesh: Mesh) -> list[ModelWeight]:
        """The weights outside the blocks that a pipeline stage holds; of a tied head the last one
        has a copy.
        """
        names = {"first"} if stage == 0 else set()
        if stage == mesh.pipeline - 1:
            names.add("last")
        return [
            weight
            for weight in self.outside
            if weight.spec.stage in names and not (weight.tied and stage == 0)
        ]

    @property
    def head(self) -> list[ModelWeight]:
        """The weights outside the blocks that planned layers multiply."""
        return [weight for weight in self.outside if weight.plan is not None]


def workload(
    model: nn.Module,
    plans: Mapping[str, LayerPlan],
    recipe: Recipe,
    *,
    sequences: int,
    seq_len: int,
    execution: Execution | None = None,
) -> Workload:
    """Measure a model on the meta device.

    Args:
        plans: plan of each linear layer in one stretch of a run.
        sequences, seq_len: sizes of a microbatch.
        execution: how the run executes the model; None: eagerly, with fp4train's defaults.
    """
    execution = execution or Execution()
    tokens = torch.empty(sequences, seq_len, dtype=torch.int64, device="meta")
    liger = execution.liger and not execution.compiled
    costs, order = measure_blocks(model, plans, recipe, tokens, liger=liger)
    by_block: dict[int | None, list[ModelWeight]] = {}
    for weight in find_weights(model, plans):
        by_block.setdefault(weight.block, []).append(weight)
    kinds = [
        Kind(weights=tuple(by_block.get(order.index(index), ())), cost=cost)
        for index, cost in enumerate(costs)
    ]
    multiplied_by_block, besides = multiplied(model, find_blocks(model), seq_len)
    outside = [plan.layer for plan in plans.values() if plan.layer.block is None]
    vocabulary, width = max(
        ((layer.out_features, layer.in_features) for layer in outside), default=(0, 0)
    )
    groups = weight_groups(model)
    return Workload(
        kinds=tuple(kinds),
        order=tuple(order),
        multiplied=multiplied_by_block,
        last_multiplied=besides,
        outside=tuple(by_block.get(None, ())),
        parameters=sum(group.parameters for group in groups),
        active_parameters=sum(group.active for group in groups),
        tokens=sequences * seq_len,
        vocabulary=vocabulary,
        width=width,
        execution=execution,
    )
