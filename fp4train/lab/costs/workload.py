"""A model with its plan, measured for one microbatch: what every mesh is estimated from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from fp4train.lab.costs.blocks import BlockCost, measure_blocks
from fp4train.lab.costs.shards import Weight, find_weights, row_wise
from fp4train.parallel.config import Mesh
from fp4train.precision.plan import LayerPlan
from fp4train.precision.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Blocks that are alike: the weights and plans of the first of them, and the cost of each."""

    weights: tuple[Weight, ...]
    plans: tuple[LayerPlan, ...]
    cost: BlockCost


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its plan in one stretch of a run, and one microbatch.

    Args:
        kinds: the distinct blocks.
        order: index into `kinds` of every block.
        before, after: weights that stand before and after the blocks.
        outside: the plans of linear layers outside the blocks.
        row_wise: layers whose inputs tensor parallelism splits.
        tokens: of a microbatch, over all ranks that share it.
        vocabulary, width: of the head; 0 where the model has none.
        tied: whether the head uses the weight of the embedding.
        compiled: whether torch.compile fuses what is between the GEMMs.
        recomputed: share of the blocks' forward work that backward repeats; 1: only the blocks' inputs are kept.
    """

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    before: tuple[Weight, ...]
    after: tuple[Weight, ...]
    outside: tuple[LayerPlan, ...]
    row_wise: frozenset[str]
    tokens: int
    vocabulary: int
    width: int
    tied: bool
    compiled: bool = False
    recomputed: float = 0.0

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        blocks = sum(weight.count for kind in self.order for weight in self.kinds[kind].weights)
        return blocks + sum(weight.count for weight in (*self.before, *self.after))

    @cached_property
    def flops_per_token(self) -> float:
        """6 per weight that multiplies and token, and 6·L·D·T for causal attention (half of the square)."""
        attention = sum(3 * a.flops for kind in self.order for a in self.kinds[kind].cost.attentions) / self.tokens
        embedding = 0 if self.tied else sum(weight.count for weight in self.before)
        return 6 * (self.parameters - embedding) + attention

    @property
    def distinct(self) -> list[Weight]:
        """The weights of every kind of block, and those outside."""
        return [*(w for kind in self.kinds for w in kind.weights), *self.before, *self.after]

    def stage(self, blocks: Iterable[int]) -> Counter[int]:
        """How many blocks of each kind a pipeline stage has."""
        return Counter(self.order[index] for index in blocks)

    def outer(self, stage: int, mesh: Mesh) -> list[Weight]:
        """The weights outside the blocks that a pipeline stage holds; a tied embedding is on the first and the last."""
        last = stage == mesh.pipeline - 1
        before = self.before if stage == 0 or (self.tied and last) else ()
        return [*before, *(self.after if last else ())]

    def not_coded(self, mesh: Mesh) -> dict[str, dict[str, int]]:
        """Of quantised weights that are not gathered as codes: why → layer in its block ("attention.wk") → weights."""
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
    recomputed: float = 0.0,
) -> Workload:
    """Measure a model on the meta device.

    Args:
        plans: what each linear layer runs in one stretch of a run.
        sequences, seq_len: of a microbatch.
        compiled, recomputed: see `Workload`.
    """
    rows = row_wise(model)
    costs = measure_blocks(
        model, plans, recipe, sequences=sequences, seq_len=seq_len, row_wise=rows, sharing=not compiled
    )
    of_block: dict[int | None, list[Weight]] = {}
    for weight in find_weights(model, plans):
        of_block.setdefault(weight.block, []).append(weight)
    known: dict[object, int] = {}
    kinds: list[Kind] = []
    order: list[int] = []
    for index, cost in enumerate(costs):
        weights = tuple(of_block.get(index, ()))
        mine = tuple(plan for plan in plans.values() if plan.layer.block == index)
        key = (cost, tuple((w.shape, w.split, None if w.plan is None else w.plan.gemms) for w in weights))
        if key not in known:
            known[key] = len(kinds)
            kinds.append(Kind(weights=weights, plans=mine, cost=cost))
        order.append(known[key])
    outside = tuple(plan for plan in plans.values() if plan.layer.block is None)
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    vocabulary, width = max(((p.layer.out_features, p.layer.in_features) for p in outside), default=(0, 0))
    return Workload(
        kinds=tuple(kinds),
        order=tuple(order),
        before=tuple(of_block.get(-1, ())),
        after=tuple(of_block.get(None, ())),
        outside=outside,
        row_wise=rows,
        tokens=sequences * seq_len,
        vocabulary=vocabulary,
        width=width,
        tied=any(id(model.get_submodule(p.layer.name).weight) in embeddings for p in outside),
        compiled=compiled,
        recomputed=recomputed,
    )
