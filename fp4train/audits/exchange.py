"""Exchange of one call of a layer between the ranks that tensor parallelism cuts it over.

Every rank of the layer calls `exchange`, in the same order of layers: also one that has nothing to
send, or whose audit failed.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fp4train.audits.call import ObservedCall
from fp4train.audits.cut import CutCall
from fp4train.audits.observe import Observer
from fp4train.audits.products import sampled
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks

_UNSEEN = "another rank that has a part of it saw no call"


class _CutTensors(NamedTuple):
    """Names of what is cut where features are.

    features: the tensor whose features are cut; tokens: the one whose tokens may be.
    summed: the GEMM that contracts the cut features.
    weight_axis: the axis along which w is cut.
    """

    features: str
    tokens: str
    summed: str
    weight_axis: int


_CUT: Final[Mapping[str | None, _CutTensors]] = {
    "out": _CutTensors("dy", "x", "dgrad", 0),
    "in": _CutTensors("x", "dy", "fprop", 1),
}


def exchange(
    layer: PlannedLayer,
    observer: Observer | None,
    weight: Tensor | None = None,
    *,
    turn: int = 0,
) -> None:
    """Give the records of a layer what the other ranks have of them; nothing where no rank has a
    part of its features. A collective.

    Args:
        observer: observer of the layer, whose passes have run; None: it has none here.
        weight: the weight that the layer multiplies, whole and in main memory; None: those of the
            calls are joined. All ranks that have an observer give it, or none.
        turn: number of the audit, for `products.sampled`: the same on all ranks.
    """
    shard = layer.layer_shard
    if shard is None:
        return
    if shard.tensor is not None and shard.cut in ("in", "out"):
        _exchange_parts(shard, shard.tensor, observer, weight, turn)


def _exchange_parts(
    shard: LayerShard,
    ranks: Ranks,
    observer: Observer | None,
    weight: Tensor | None,
    turn: int,
) -> None:
    """Give the records the parts that other ranks of tensor parallelism have."""
    sent = None
    with suppress(Exception):  # the others wait
        if observer is not None and all(record.complete for record in observer.records):
            names = _needed(shard, weight)
            sent = [_sent(record, shard, names, turn) for record in observer.records]
    received = ranks.objects(sent)
    if observer is None or not observer.records:
        return
    counts = {0 if parts is None else len(parts) for parts in received}
    if counts != {len(observer.records)}:
        observer.hide(_UNSEEN)
        return
    with observer.guarding():
        for number, record in enumerate(observer.records):
            of_ranks = [parts[number] for parts in received if parts]
            _join(record, shard, of_ranks, weight, turn)


def _needed(shard: LayerShard, weight: Tensor | None) -> tuple[str, ...]:
    """The tensors of a call of which other ranks need this rank's part."""
    names = _CUT[shard.cut]
    needed = {
        names.features: True,
        "w": weight is None,
        names.tokens: shard.sequence,
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def _sent(
    record: ObservedCall, shard: LayerShard, names: Sequence[str], turn: int
) -> dict[str, Tensor | None]:
    """What other ranks need of a call: these tensors, and some rows of its term of the sum."""
    term = record.products.get(_CUT[shard.cut].summed)
    rows = None
    if term is not None:
        rows = term.result[sampled(len(term.result), turn)]
    sent = {name: getattr(record, name) for name in names}
    if record.fused:
        sent["fused"] = torch.stack([weight.abs().max() for weight in record.fused])
    return {**sent, "term": rows}


def _join(
    record: ObservedCall,
    shard: LayerShard,
    parts: Sequence[dict[str, Any]],
    weight: Tensor | None,
    turn: int,
) -> None:
    assert shard.tensor is not None and shard.cut in ("in", "out")
    cut = _CUT[shard.cut]

    def joined(name: str, axis: int) -> Tensor | None:
        tensors: list[Any] = [part.get(name) for part in parts]
        if any(tensor is None for tensor in tensors):
            return None
        return torch.cat(tensors, dim=axis)

    if shard.sequence and (all_tokens := joined(cut.tokens, 0)) is not None:
        setattr(record, cut.tokens, all_tokens)
    layer_tensors = {cut.features: joined(cut.features, 1), "w": weight}
    if weight is None:
        layer_tensors["w"] = joined("w", cut.weight_axis)
    if record.fused:
        record.fused = [part["fused"] for part in parts]
    terms = [part["term"] for part in parts]
    seen = all(term is not None for term in terms)
    rank = shard.tensor.rank
    if shard.cut == "out":
        record.first_out = rank * record.plan.layer.out_features
    else:
        record.first_feature = rank * record.plan.layer.in_features
    product = record.products.get(cut.summed)
    record.cut = CutCall(
        along=shard.cut,
        rank=rank,
        ranks=shard.tensor.size,
        sequence=shard.sequence,
        runs=shard.runs if len(shard.runs) > 1 else (),
        tensors={name: tensor for name, tensor in layer_tensors.items() if tensor is not None},
        rows=sampled(0 if product is None else len(product.result), turn),
        terms=torch.stack(terms) if seen else None,
    )
