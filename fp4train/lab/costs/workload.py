"""A model with its plan, measured for one microbatch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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

BlockCounts = Counter[BlockCost]
"""The number of blocks of each kind."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its plan in one stretch of a run, and one microbatch.

    Args:
        blocks: every block; those that are alike are one object.
        multiplied: multiplications of every block per token (`models.common.cut.multiplied`).
        last_multiplied: multiplications besides, as of the head, on a pipeline's last stage.
        outside: weights outside the blocks.
        parameters, active_parameters: parameters of the model, and those that one token meets.
        sequences, tokens: sizes of a microbatch, over all ranks that share it.
        compiled: whether torch.compile fuses what is between the GEMMs.
        liger: whether Liger's kernels run the loss and, where they are not compiled, what they can
            of the blocks.
        recomputed: share of the blocks' forward work that backward repeats; 1: only the blocks'
            inputs are kept.
        states: title of what the run keeps (`run.states`) → its bytes per parameter.
        logit_bytes: bytes moved per logit by a loss in torch's operators.
    """

    blocks: list[BlockCost]
    multiplied: tuple[int, ...]
    last_multiplied: int
    outside: list[ModelWeight]
    parameters: int
    active_parameters: int
    sequences: int
    tokens: int
    states: Mapping[str, float]
    compiled: bool = False
    liger: bool = False
    recomputed: float = 0.0
    logit_bytes: float = LOGIT_BYTES

    @property
    def vocabulary(self) -> int:
        """Rows of the head; 0 where the model has none."""
        return max((weight.shape[0] for weight in self.head), default=0)

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

    def stages(self, mesh: Mesh) -> list[BlockCounts]:
        """The blocks on every rank of a pipeline."""
        shares = self.shares(mesh)
        return [Counter(self.blocks[i] for part in parts for i in part) for parts in shares]

    def outer(self, stage: int, mesh: Mesh) -> list[ModelWeight]:
        """The weights outside the blocks that a pipeline stage holds; of a tied head the last one
        has a copy.
        """
        held = {"first": stage == 0, "last": stage == mesh.pipeline - 1}
        return [
            weight
            for weight in self.outside
            if held.get(weight.spec.stage) and not (weight.tied and stage == 0)
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
    states: Mapping[str, float],
    compiled: bool = False,
    liger: bool = False,
    recomputed: float = 0.0,
) -> Workload:
    """Measure a model on the meta device.

    Args:
        plans: plan of a rank's part of each linear layer in one stretch of a run.
        sequences, seq_len: sizes of a microbatch.
        states, compiled, liger, recomputed: see `Workload`.
    """
    weights = find_weights(model, plans)
    tokens = torch.empty(sequences, seq_len, dtype=torch.int64, device="meta")
    own_kernels = liger and not compiled
    multiplied_by_block, besides = multiplied(model, find_blocks(model), seq_len)
    groups = weight_groups(model)
    return Workload(
        blocks=measure_blocks(model, weights, recipe, tokens, liger=own_kernels),
        multiplied=multiplied_by_block,
        last_multiplied=besides,
        outside=[weight for weight in weights if weight.block is None],
        parameters=sum(group.parameters for group in groups),
        active_parameters=sum(group.active for group in groups),
        sequences=sequences,
        tokens=tokens.numel(),
        states=states,
        compiled=compiled,
        liger=liger,
        recomputed=recomputed,
    )
