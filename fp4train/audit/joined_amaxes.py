"""Amaxes of x and dy that cover the tokens of several ranks (parallel.amax=data).

What an operand requantises is scaled first, so amaxes are joined in two turns: those of what is
requantised, then those of what this gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fp4train.audit.amaxes import Amaxes, covers_tokens, measured_inner, measured_outer
from fp4train.audit.call import ObservedCall
from fp4train.audit.expected import AuditedCall
from fp4train.audit.observe import Observer
from fp4train.nn.ranks import Ranks
from fp4train.quantize import Operand, QuantSpec, RandomKey

_UNSEEN: Final = "another rank whose tokens share its scales saw no call"


@dataclass
class _OperandAmaxes:
    """The amaxes of one operand of a record.

    Args:
        tensor: the operand in the orientation that is multiplied, of all features that its scale
            covers.
        is_whole: whether other ranks have a part of these features.
        key: key of its random bits; None: it takes none.
        inner, outer: amaxes of what it requantises, and of what is quantised; None: it has none, or
            they are not measured yet.
    """

    operand: Operand
    spec: QuantSpec
    tensor: Tensor
    is_whole: bool
    key: RandomKey | None
    inner: Tensor | None = None
    outer: Tensor | None = None

    def measure(self, *, inner: bool) -> Tensor | None:
        """Measure an amax of this rank's tokens; None: it covers those of no other rank."""
        if inner:
            amax = self.inner = measured_inner(self.tensor, self.spec)
        else:
            amax = self.outer = measured_outer(self.tensor, self.spec, self.key, self.inner)
        return amax if covers_tokens(self.operand, inner=inner) else None


def join_amaxes(ranks: Ranks, observer: Observer | None) -> None:
    """Give the records of a layer the amaxes over the tokens of all ranks. A collective.

    Args:
        ranks: those whose tokens share amaxes.
        observer: observer of the layer, whose passes have run; None: it has none here.
    """
    amaxes: list[_OperandAmaxes] = []
    of_records: list[tuple[ObservedCall, list[_OperandAmaxes]]] = []
    with suppress(Exception):  # the others wait
        if observer is not None and all(record.complete for record in observer.records):
            of_records = [(record, _amaxes_of(record)) for record in observer.records]
            amaxes = [operand for _, operands in of_records for operand in operands]
    for inner in (True, False):
        sent: list[Tensor | None] | None = None
        with suppress(Exception):
            if of_records:
                sent = [operand.measure(inner=inner) for operand in amaxes]
        received = ranks.objects(sent)
        if not _are_alike(received):
            if observer is not None and observer.records:
                observer.hide(_UNSEEN)
            return
        for operand, of_ranks in zip(amaxes, zip(*_lists(received), strict=True), strict=True):
            parts = [amax for amax in of_ranks if amax is not None]
            if parts and inner:
                operand.inner = torch.stack(parts).amax(0)
            elif parts:
                operand.outer = torch.stack(parts).amax(0)
    if observer is None:
        return
    with observer.guarding():
        for record, operands in of_records:
            record.joined = {operand.operand: _of_rank(record, operand) for operand in operands}


def _are_alike(received: Sequence[list[Tensor | None] | None]) -> bool:
    """Whether all ranks sent the amaxes of the same operands."""
    lists = _lists(received)
    shapes = {tuple([None if amax is None else amax.shape for amax in amaxes]) for amaxes in lists}
    return len(lists) == len(received) and len(shapes) == 1


def _lists(received: Sequence[list[Tensor | None] | None]) -> list[list[Tensor | None]]:
    return [amaxes for amaxes in received if amaxes is not None]


def _amaxes_of(record: ObservedCall) -> list[_OperandAmaxes]:
    """The operands of a record whose amaxes cover tokens of other ranks; these are not measured
    yet.
    """
    plan = record.plan
    audited = AuditedCall(record)
    operands: dict[Operand, _OperandAmaxes] = {}
    for (gemm, name), source in plan.sources.items():
        operand = source.prepared_operand
        spec = operand.spec
        tensor = audited.tensor(name)
        if spec is None or tensor is None:
            continue
        if not (covers_tokens(operand) or covers_tokens(operand, inner=True)):
            continue
        tensor = audited.centred(gemm, name, tensor)
        if operand.transposed:
            tensor = tensor.T
        of_all_features = None
        if record.cut is not None:
            of_all_features = record.cut.whole(operand, audited.dtype)
        if of_all_features is not None:
            tensor = of_all_features
        key = audited.key(operand) if spec.random else None
        operands[operand] = _OperandAmaxes(
            operand, spec, tensor, is_whole=of_all_features is not None, key=key
        )
    return list(operands.values())


def _of_rank(record: ObservedCall, operand: _OperandAmaxes) -> Amaxes:
    """The amaxes of the part of an operand that this rank has."""
    amaxes = Amaxes(operand.outer, operand.inner)
    if record.cut is None or not operand.is_whole:
        return amaxes
    return record.cut.of_rank(operand.operand, amaxes)
