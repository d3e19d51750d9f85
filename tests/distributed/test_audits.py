"""Audits of several ranks: weights that come over the wire are compared with what the optimizers
hold, replicas with each other; no clean run has a fault.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from command_line import events
from families import tiny_run
from lengths import long_but

Ranks = Any
CUT = ("parallel.tp=2", "model.kv_heads=2")
AUDITED = (
    "recipe=nvfp4",
    "policy=all",
    "phases=none",
    "eval.every=0",
    "audit.every=1",
    "audit.sums=1",
    "train.steps=2",
)
TWO_ROWS = ("train.batch_size=2", "train.microbatch=1")
FUSED = "recipe.fused_scales=true"
OUTLIERS = (
    "recipe=tetrajet_v2_outliers",
    "recipe.outliers.multiple=8",
    "recipe.outliers.start=1",
    "recipe.outliers.steps=2",
    "train.steps=4",
)
CLEAN = {
    "replicas": ("parallel.dp_replicate=2",),
    "tensor": CUT,
    "tensor, whole tokens": (*CUT, "parallel.sp=false", "recipe=fp8_current"),
    "tensor, tokens that are no whole blocks": (*CUT, "train.seq_len=24", *TWO_ROWS),
    "tensor, amaxes of earlier steps": (*CUT, "recipe=fp8_delayed"),
    "tensor, a scale of x for rows of both ranks": (*CUT, "recipe=mfu_localcta", *TWO_ROWS),
    "tensor, experts": tiny_run("moe", *CUT),
    "experts": tiny_run("moe", "parallel.ep=2", "train.microbatch=1"),
    "stages": ("parallel.pp=2", "train.microbatch=2"),
    "shards, fused scales": ("parallel.dp_shard=2", FUSED),
    "bf16, fused scales": ("parallel.dp_shard=2", FUSED, "parallel.gather=bf16"),
    "tensor, fused scales": (*CUT, FUSED),
    "bf16 of experts, fused scales": tiny_run(
        "moe", "parallel.dp_shard=2", FUSED, "parallel.gather=bf16"
    ),
    "shards, residuals of weights": ("parallel.dp_shard=2", "recipe=chon"),
    "shards, outlier channels": ("parallel.dp_shard=2", *OUTLIERS),
    "replicas, outlier channels of experts": tiny_run("moe", "parallel.dp_replicate=2", *OUTLIERS),
}
"""What the ranks share, and what they send each other of it."""
SHORT = (
    "replicas",
    "tensor, whole tokens",
    "shards, fused scales",
)
SILENT_TOO = (
    "replicas",
    "bf16, fused scales",
    "tensor, amaxes of earlier steps",
    "tensor, fused scales",
    "tensor, experts",
    "experts",
    "stages",
    "shards, outlier channels",
)
"""Of a run on each kind of mesh, and of what layers keep from step to step: their audits change no
bit.
"""
SENT = {
    "tensor": {"sent: dy term x"},
    "tensor, whole tokens": {"sent: dy term", "sent: term x"},
}
"""What ranks send each other of a call where tokens are cut and where they are whole: what others
lack, and no weight.
"""
SAYS_WHAT_IS_SENT = """
import sys
from fp4train.nn.ranks import Ranks
original = Ranks.objects
def objects(self, value):
    if isinstance(value, list) and "term" in value[0]:
        print("sent:", *sorted(value[0]), file=sys.stderr, flush=True)
    return original(self, value)
Ranks.objects = objects
"""


@pytest.mark.parametrize("name", long_but(SHORT, CLEAN))
def test_a_clean_run_has_no_fault_and_the_same_bits(ranks: Ranks, name: str) -> None:
    mesh = CLEAN[name]
    ended = ranks(2, "run.name=a", *AUDITED, *mesh, patch=SAYS_WHAT_IS_SENT)
    assert not any(ended.codes)
    assert events(ranks.folder / "runs/a", "audit fault") == []
    assert events(ranks.folder / "runs/a", "audit failed") == []
    audits = events(ranks.folder / "runs/a", "audit")
    steps = len(ranks.losses("a"))
    stages = 2 if "parallel.pp=2" in mesh else 1  # each audits a layer that it has
    assert len(audits) == steps * stages and all(len(entry["gemms"]) >= 2 for entry in audits)
    assert not any(entry["uncovered"] for entry in audits)
    text = " ".join((ended.out[0] + ended.err[0]).split())
    counts = re.search(r"audit: (\d+) audits of \d+ layers of (\d+): 0 faults", text)
    layers = re.search(r"audits: one of (\d+) layers every", text)
    assert counts is not None and layers is not None
    assert counts[1] == str(steps * stages)
    assert int(counts[2]) == int(layers[1]) + 1  # the head, whose weight is multiplied elsewhere
    assert text.count("not covered: head (other code multiplies its weight)") == 2
    if name in SENT:
        lines = {line for line in "\n".join(ended.err).splitlines() if line.startswith("sent:")}
        assert lines == SENT[name]
    if name in SILENT_TOO:
        ranks.train(2, "silent", *AUDITED, *mesh, "audit.every=0", "audit.sums=0")
        ranks.same("a", "silent")


DRIFTS = """
import fp4train.train as loop, torch
original = loop.train_step
def train_step(run, recipe):
    step = original(run, recipe)
    if run.step == 1 and rank:
        from fp4train.shards import local
        weight = local(next(run.model.parameters())).detach()
        weight.view(torch.int32).view(-1)[3] ^= 1 << 9
    return step
loop.train_step = train_step
"""


@pytest.mark.long
@pytest.mark.parametrize("gather", ["recipe", "bf16"])
def test_a_clean_run_whose_cut_layers_are_sharded_too_has_no_fault(
    ranks: Ranks, gather: str
) -> None:
    sharded = ("parallel.dp_shard=2", f"parallel.gather={gather}", "model.layers=1")
    assert not any(ranks(4, "run.name=a", *AUDITED, *CUT, *sharded).codes)
    assert events(ranks.folder / "runs/a", "audit fault") == []
    assert events(ranks.folder / "runs/a", "audit failed") == []
    audits = events(ranks.folder / "runs/a", "audit")
    assert len(audits) == 2 and all(len(entry["gemms"]) >= 2 for entry in audits)


@pytest.mark.long
def test_a_replica_that_drifts_is_found_with_its_tensor(ranks: Ranks) -> None:
    mesh = ("parallel.dp_replicate=2", "audit.every=0", "audit.action=stop")
    ended = ranks(2, "run.name=a", *AUDITED, *mesh, "audit.sums=1", patch=DRIFTS)
    assert "model/embed.weight" in ended.message and "the audit found" in ended.message


def test_a_replica_that_drifted_unseen_is_found_by_the_sums_of_the_others(ranks: Ranks) -> None:
    mesh = ("parallel.dp_replicate=2", "audit.every=0", "audit.sums=3", "train.steps=4")
    ranks(2, "run.name=a", *AUDITED, *mesh, patch=DRIFTS)
    faults = events(ranks.folder / "runs/a", "audit fault")
    assert {entry["what"] for entry in faults} == {
        "its bits differ between the replicas of ranks 0, 1"
    }
    assert all(entry["rank"] is None for entry in faults)


ROUNDED = """
import torch
from fp4train.parallel.gather import WeightGather
original = WeightGather._make
def shard(self):
    master = self.parameter._sharded_local_tensor
    return master.bfloat16().to(master.dtype) if vars(self).get("sending") else master
def make(self, part):
    self.sending = True
    try:
        return original(self, part)
    finally:
        self.sending = False
WeightGather.shard = property(shard)
WeightGather._make = make
"""


@pytest.mark.long
def test_bf16_on_the_wire_is_found_and_named(ranks: Ranks) -> None:
    ranks(2, "run.name=a", *AUDITED, "parallel.dp_shard=2", "train.steps=4", patch=ROUNDED)
    faults = events(ranks.folder / "runs/a", "audit fault")
    names = {fault["cause"] for fault in faults}
    assert any("rounded to BF16 before" in name for name in names), faults


FAILS = """
import fp4train.run.supervise.sums as sums
def broken(run):
    raise RuntimeError("no memory")
if rank:
    sums.state_sums = broken
"""


def test_a_rank_whose_audits_fail_still_takes_part_in_those_of_the_others(ranks: Ranks) -> None:
    mesh = ("parallel.dp_replicate=2", "audit.every=0")
    assert not any(ranks(2, "run.name=a", *AUDITED, *mesh, "audit.sums=1", patch=FAILS).codes)
    assert events(ranks.folder / "runs/a", "audit fault") == []


NO_WEIGHT = """
import fp4train.run.supervise.planned_calls as planned_calls
def broken(*arguments):
    raise RuntimeError("no memory")
if rank:
    planned_calls.is_sharded = broken
"""
NOT_AS_SENT = """
from fp4train.run.supervise.planned_calls import PlannedCalls
def broken(*arguments):
    raise RuntimeError("no memory")
if rank:
    PlannedCalls.multiplied = broken
"""


@pytest.mark.parametrize(
    ("mesh", "patch", "words"),
    [
        (("parallel.dp_shard=2",), NO_WEIGHT, "another rank could not take the weight"),
        pytest.param(
            (*CUT, "model.layers=1"),
            NOT_AS_SENT,
            "another rank that has a part of it saw no call",
            marks=pytest.mark.long,
        ),
    ],
    ids=["before the weight is gathered", "before calls are exchanged"],
)
def test_an_audit_that_fails_on_one_rank_lets_no_other_wait(
    ranks: Ranks, mesh: tuple[str, ...], patch: str, words: str
) -> None:
    ended = ranks(2, "run.name=a", *AUDITED, *mesh, "train.steps=3", patch=patch)
    assert not any(ended.codes), ended.err
    assert words in ended.err[0] and "(its audit failed: no memory)" in ended.err[0]
    assert events(ranks.folder / "runs/a", "audit fault") == []


FAILS_IN_BACKWARD = """
from fp4train.audits.observe import Observer
if rank:
    Observer.backward = lambda self, run, *arguments, **options: run(*arguments, **options)
"""


@pytest.mark.long
def test_the_end_of_a_run_names_what_other_ranks_left_out(ranks: Ranks) -> None:
    ended = ranks(2, "run.name=a", *AUDITED, "parallel.dp_replicate=2", patch=FAILS_IN_BACKWARD)
    assert not any(ended.codes)
    assert "(its backward pass was not seen)" in ended.err[0]


NOT_JOINED = """
from fp4train.nn.layer_shard import LayerShard
LayerShard.amax_ranks = lambda self, *arguments, **options: ()
"""
FROM_THE_FIRST = """
from fp4train.nn.layer_shard import LayerShard
LayerShard.starts = lambda self, tensor: (0, 0)
"""
BF16_SUMS = """
from fp4train.nn.ranks import Ranks
original, rows = Ranks.sum, Ranks.sum_rows
Ranks.sum = lambda self, x: original(self, x.bfloat16().to(x.dtype))
Ranks.sum_rows = lambda self, x: rows(self, x.bfloat16().to(x.dtype))
"""
LEFT_OUT = """
from fp4train.nn.ranks import Ranks
original, rows = Ranks.sum, Ranks.sum_rows
Ranks.sum = lambda self, x: original(self, x * self.rank)
Ranks.sum_rows = lambda self, x: rows(self, x * self.rank)
"""


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (NOT_JOINED, "its own amax alone"),
        pytest.param(
            FROM_THE_FIRST,
            "the values of the codes are not those of the reference",
            marks=pytest.mark.long,
        ),
        pytest.param(
            BF16_SUMS,
            "something else than the sum of the terms of all ranks",
            marks=pytest.mark.long,
        ),
        pytest.param(
            LEFT_OUT,
            "something else than the sum of the terms of all ranks",
            marks=pytest.mark.long,
        ),
    ],
    ids=["amax", "place", "BF16", "left out"],
)
def test_what_tensor_parallel_ranks_do_wrongly_is_found(
    ranks: Ranks, patch: str, words: str
) -> None:
    ranks(2, "run.name=a", *AUDITED, *CUT, "model.layers=1", "train.steps=4", patch=patch)
    faults = events(ranks.folder / "runs/a", "audit fault")
    assert any(words in fault["what"] + fault["cause"] for fault in faults), faults


NOT_FUSED = """
from fp4train.parallel.gather_amaxes import AMAX, FUSED, GatherAmaxes
def join_fused(self):
    if self.shared is not None:
        self.known[FUSED] = self.known[AMAX]
GatherAmaxes.join_fused = join_fused
"""


@pytest.mark.long
def test_amaxes_of_fused_weights_that_ranks_do_not_join_are_found_and_named(ranks: Ranks) -> None:
    mesh = ("parallel.dp_shard=2", FUSED)
    ranks(2, "run.name=a", *AUDITED, *mesh, "model.layers=1", patch=NOT_FUSED)
    faults = events(ranks.folder / "runs/a", "audit fault")
    named = {fault["operand"] for fault in faults if "its own amax alone" in fault["cause"]}
    assert "w" in named, faults
