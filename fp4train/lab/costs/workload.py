"""A model with its plan and one microbatch; what it costs is measured when it is asked for."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from fp4train.lab.costs.blocks import BlockCost, measure_blocks
from fp4train.lab.costs.weights import ModelWeight, find_weights
from fp4train.models.common.cut import multiplied, share_blocks
from fp4train.models.common.loss import LOGIT_BYTES
from fp4train.nn.conversion import WeightGroup, weight_groups
from fp4train.parallel.config import Mesh
from fp4train.precision.layers import find_blocks
from fp4train.precision.plan import PlannedStretch

BlockCounts = Counter[BlockCost]
"""The number of blocks of each kind."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on the meta device, its plan in one stretch of a run, and one microbatch.

    Args:
        stretch: stretch of a plan, which has a rank's part of each linear layer.
        sequences, seq_len: sizes of a microbatch, over all ranks that share it.
        states: title of what the run keeps (`run.states`) → its bytes per parameter.
        compiled: whether torch.compile fuses what is between the GEMMs.
        liger: whether Liger's kernels run the loss and, where they are not compiled, what they can
            of the blocks.
        logit_bytes: bytes moved per logit by a loss in torch's operators.
    """

    model: nn.Module
    stretch: PlannedStretch
    sequences: int
    seq_len: int
    states: Mapping[str, float]
    compiled: bool = False
    liger: bool = False
    logit_bytes: float = LOGIT_BYTES

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequences * self.seq_len

    @cached_property
    def weights(self) -> list[ModelWeight]:
        """The weights of the model."""
        return list(find_weights(self.model, self.stretch.layers))

    @cached_property
    def blocks(self) -> list[BlockCost]:
        """Every block; those that are alike are one object."""
        tokens = torch.empty(self.sequences, self.seq_len, dtype=torch.int64, device="meta")
        liger = self.liger and not self.compiled
        return measure_blocks(self.model, self.weights, self.stretch.recipe, tokens, liger=liger)

    @cached_property
    def outside(self) -> list[ModelWeight]:
        """The weights outside the blocks."""
        return [weight for weight in self.weights if weight.block is None]

    @property
    def head(self) -> list[ModelWeight]:
        """The weights outside the blocks that planned layers multiply."""
        return [weight for weight in self.outside if weight.plan is not None]

    @property
    def vocabulary(self) -> int:
        """Rows of the head; 0 where the model has none."""
        return max((weight.shape[0] for weight in self.head), default=0)

    @cached_property
    def groups(self) -> list[WeightGroup]:
        """The weights by how they are multiplied."""
        return weight_groups(self.model)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(group.parameters for group in self.groups)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return sum(group.active for group in self.groups)

    @cached_property
    def multiplied(self) -> tuple[tuple[int, ...], int]:
        """(Multiplications of every block per token, those besides, as of the head, on a pipeline's
        last stage); see `models.common.cut.multiplied`.
        """
        return multiplied(self.model, find_blocks(self.model), self.seq_len)

    @property
    def flops_per_token(self) -> int:
        """2 per multiplication: once forward, twice backward."""
        of_blocks, besides = self.multiplied
        return 6 * (sum(of_blocks) + besides)

    def shares(self, mesh: Mesh) -> list[list[range]]:
        """The blocks of every rank of a pipeline, as `parallel.stages` shares them out: a range per
        virtual stage.
        """
        parts = share_blocks(*self.multiplied, mesh.pipeline * mesh.virtual)
        return [parts[rank :: mesh.pipeline] for rank in range(mesh.pipeline)]

    def stages(self, mesh: Mesh) -> list[BlockCounts]:
        """The blocks on every rank of a pipeline."""
        shares = self.shares(mesh)
        return [Counter(self.blocks[i] for part in parts for i in part) for parts in shares]

    def outer(self, stage: int, mesh: Mesh) -> list[ModelWeight]:
        """The weights outside the blocks that a pipeline stage holds; of a tied head the last one
        has a copy.
        """
        is_stage = {"first": stage == 0, "last": stage == mesh.pipeline - 1}
        return [
            weight
            for weight in self.outside
            if is_stage.get(weight.spec.stage) and not (weight.tied and stage == 0)
        ]
