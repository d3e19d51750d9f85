"""The amaxes of a whole weight whose rows are cut over ranks: those that its shards' codes need.
All weights join theirs in one all-reduce before a forward pass (`parallel/gather.py`).
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks
from fp4train.parallel.gather_items import GatherItem
from fp4train.precision.context import current
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import (
    QuantSpec,
    amax_extent,
    has_tensor_amax,
    measure_amax,
    quantizer,
)
from fp4train.quantize.source import own

AMAX = "amax"
FUSED = "fused"
"""Keys of the amax of a whole weight, and of the largest of the weights that share a scale with it;
those of each row or column have the item as key.
"""


class GatherAmaxes:
    """The amaxes of one weight while it does not change.

    Args:
        layer: the layer that multiplies it.
        ranks: those that share its rows.

    Attributes:
        constant: that of the passes that began last; None: nothing is kept.
        known: amaxes of the whole weight in them, by the extent that they cover: see `AMAX`.
        delayed: the amax that the layer's state gives in them.
        fused: those of the layers that a recipe may let share a scale with this one, itself
            included, by name.
        shared: the spec of the weight whose scale others share in them.
    """

    def __init__(self, layer: PlannedLayer, ranks: Ranks) -> None:
        self.layer = layer
        self.ranks = ranks
        place = layer.layer_shard
        self.cut = None if place is None else place.cut
        """The features along which ranks that share the amaxes of the weight cut it."""
        self.fused: Mapping[str, GatherAmaxes] = {}
        self.shared: QuantSpec | None = None
        self.constant: ConstantWeights | None = None
        self.known: dict[object, Tensor] = {}
        self.delayed: Tensor | None = None

    def begin(self, constant: ConstantWeights | None) -> bool:
        """Whether the weight may have changed, so that its amaxes are not known."""
        new = constant is None or constant is not self.constant
        if new:
            self.known.clear()
        self.constant = constant
        return new

    def missing(
        self, shard: Tensor, items: Iterable[GatherItem]
    ) -> Iterator[tuple[object, int, Tensor]]:
        """The keys of the amaxes that items need of the whole weight and that are not yet known;
        those of this rank's shard among zeros, at their place in those of the whole, which is the
        number.
        """
        needed = {self.key(item, shard): item for item in items}
        if self.shared is not None:
            needed = {key: item for key, item in needed.items() if key != FUSED} | {
                AMAX: GatherItem(own(self.shared, "in"))
            }
        for key, item in needed.items():
            if item.spec is not None and key is not None and key not in self.known:
                amax = measure_amax(shard.T if item.column else shard, item.spec)
                start, size = self._slot(item, amax.numel())
                vector = amax.new_zeros(size)
                vector[start : start + amax.numel()] = amax.reshape(-1)
                self.known[key] = amax
                yield key, start, vector

    def key(self, item: GatherItem, shard: Tensor) -> object:
        """The key of the amaxes that an item needs of what other ranks hold; None if it needs
        none.
        """
        spec = item.spec
        if spec is None or self.layer.layer.experts:  # a rank has whole weights of a group
            return None
        if spec.earlier_amax or amax_extent(spec) == "tensor":
            if self.shared is not None and has_tensor_amax(spec):
                return FUSED
            return AMAX
        if amax_extent(spec) != "row":
            return None
        if item.column or self.cut == "in":
            return item
        return None

    def _slot(self, item: GatherItem, count: int) -> tuple[int, int]:
        """(start of this rank's `count` amaxes in those of the whole weight, their number)."""
        if item.spec is None or self.cut != "in" or amax_extent(item.spec) != "row":
            return 0, count
        place = self.layer.layer_shard
        assert place is not None and place.tensor is not None
        if item.column:  # of columns that tensor parallelism cuts
            return place.first, count * place.tensor.size
        return self.ranks.rank * count, count * self.ranks.size

    def join_fused(self) -> None:
        """Take the largest amax of the weights that share a scale."""
        if self.shared is None:
            return
        names = self.layer.layer.fused
        if missing := [name for name in names if name not in self.fused]:
            raise ValueError(
                f"recipe.fused_scales: {', '.join(names)} share one scale, and "
                f"{', '.join(missing)} is gathered "
                f"otherwise: its rows do not divide over {self.ranks.size} shards; use "
                "parallel.gather=fp32"
            )
        self.known[FUSED] = torch.stack([self.fused[name].known[AMAX] for name in names]).amax()

    def enter(self, shard: Tensor, items: Iterable[GatherItem], training: bool) -> None:
        """Take the amax that the layer's state gives; the weight's own enters it."""
        specs = (item.spec for item in items)
        spec = next((spec for spec in specs if spec is not None and spec.earlier_amax), None)
        context = current()
        if spec is None or context is None:
            return
        executor = self.layer.executor_in(context, shard.device)
        call = self.layer.new_call(context, executor, 0, training=training)
        if call.scaling is None:  # high precision: the items of backward are those of training
            return
        self.delayed, _ = call.weights.delayed_amax(
            self.known[AMAX], quantizer(spec, shard.device.type), call
        )

    def of(self, item: GatherItem, shard: Tensor) -> Tensor | None:
        """The amax that the codes of an item are made with; None: that of what is quantised."""
        if item.spec is not None and item.spec.earlier_amax:
            return self.delayed
        key = self.key(item, shard)
        return None if key is None else self.known[key]
