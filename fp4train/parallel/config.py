"""How a run is cut over its ranks: section `parallel` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fp4train.precision.gather import GATHERS
from fp4train.text import check_choice

REST = -1
"""As many as there are ranks left."""

REDUCES = ("float32", "bf16")

SCHEDULES = ("1f1b", "gpipe", "interleaved")
_SPLIT = ("zb", "zbv", "zero_bubble", "interleaved_zb", "dualpipe", "dualpipev", "v")
"""Schedules that run the gradients of inputs and of weights at different times."""


_ABSENT = {
    "cp": "context parallelism cuts the attention of a sequence over ranks, which torch does on GPUs alone, so that no "
    "test here could show that the loss does not depend on it; for long sequences take parallel.tp with parallel.sp, "
    "which cuts tokens between the matrices, and model.recompute=true",
    "ep": "expert parallelism cuts experts over ranks, and no model here has experts; parallel.tp cuts the matrices of "
    "every block",
    "norm": "the gradient norm is summed in float64 on any number of ranks, and there is nothing to choose",
}
DROPPED = ("norm",)
"""Keys that earlier versions had. A saved configuration that holds one is read without it."""


def why_absent(name: str) -> str | None:
    """Why section `parallel` has no key of this name, and what to take instead; None: it is not known for anything."""
    return _ABSENT.get(name)


class Mesh(NamedTuple):
    """Sizes of the dimensions of the mesh, in the order of ranks: the last one varies fastest."""

    stages: int
    replicas: int
    shards: int
    tensors: int


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The sizes of the mesh, and what ranks send each other. A resume may change all of it.

    Args:
        dp_replicate: groups of ranks that each hold the whole model; gradients are summed over them (HSDP).
        dp_shard: ranks that share the weights, gradients and moments of one model (FSDP); -1: all ranks that
            dp_replicate leaves.
        pp: ranks that each hold some of the blocks (pipeline); microbatches pass from one to the next.
            The bits are those of one stage; but a model's own random numbers (dropout) differ.
        pp_schedule: order of forward and backward passes. "1f1b": a backward pass as soon as there is one, so that a
            rank holds the activations of at most pp microbatches (arXiv:1806.03377). "gpipe": all forward passes, then
            all backward ones (arXiv:1811.06965). "interleaved": 1f1b with `pp_chunks` stages per rank, which divides
            the idle time by as much (arXiv:2104.04473).
        pp_chunks: stages per rank under "interleaved".
        tp: ranks that share every block's matrices (tensor parallelism, arXiv:1909.08053); best within one machine.
        sp: with tp, whether tokens between the matrices are shared as well (sequence parallelism, arXiv:2205.05198).
        amax: whose values the largest magnitude of a tensor covers. "tp": those of the ranks that share it, so that
            codes do not depend on tp; "data": also those of the data ranks, so that they do not depend on how a batch
            is cut; "local": this rank's alone.
        gather: what ranks of dp_shard send each other of the weights of the blocks' layers. "recipe": codes and scales
            where the layer's recipe quantises the weight, else values in the recipe's dtype, in every bit as on one
            rank; BF16, which changes digits, where Transformer Engine quantises the weight or outlier channels are
            quantised apart. "bf16": values in BF16, rounded before they are quantised. "fp32": the masters.
        reduce: what ranks of dp_shard send each other of gradients, which are summed in float32 in any case. "bf16":
            each rank's is rounded to BF16, for half the bytes and other digits; replicas send float32.
        timeout: seconds that a rank waits for the others in a collective; then the run ends.
    """

    dp_replicate: int = 1
    dp_shard: int = REST
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_chunks: int = 2
    tp: int = 1
    sp: bool = True
    amax: str = "tp"
    gather: str = "recipe"
    reduce: str = "float32"
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.dp_replicate < 1:
            raise ValueError(f"parallel.dp_replicate={self.dp_replicate} must be at least 1")
        if self.dp_shard < 1 and self.dp_shard != REST:
            raise ValueError(f"parallel.dp_shard={self.dp_shard} must be at least 1, or -1 for all ranks that are left")
        if self.pp < 1:
            raise ValueError(f"parallel.pp={self.pp} must be at least 1")
        if self.pp_schedule in _SPLIT:
            raise ValueError(
                f"parallel.pp_schedule={self.pp_schedule} runs the gradients of inputs and weights at different times, "
                "which would run the GEMMs of every backward pass twice (a layer's backward makes both); allowed are "
                f"{', '.join(SCHEDULES)}"
            )
        if self.pp_schedule not in SCHEDULES:
            raise ValueError(f"parallel.pp_schedule={self.pp_schedule!r} must be one of {', '.join(SCHEDULES)}")
        if self.pp_chunks < 2:
            raise ValueError(f"parallel.pp_chunks={self.pp_chunks} must be at least 2; parallel.pp_schedule=1f1b has 1")
        if self.tp < 1:
            raise ValueError(f"parallel.tp={self.tp} must be at least 1")
        if self.amax not in ("tp", "data", "local"):
            raise ValueError(f"parallel.amax={self.amax!r} must be tp, data or local")
        check_choice("parallel.gather", self.gather, GATHERS)
        check_choice("parallel.reduce", self.reduce, REDUCES)
        if not 1 <= self.timeout <= 1e6:
            raise ValueError(f"parallel.timeout={self.timeout} must lie between 1 and 1000000 seconds")

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.pp_chunks if self.pp > 1 and self.pp_schedule == "interleaved" else 1

    def mesh(self, ranks: int) -> Mesh:
        """The mesh of so many ranks.

        Raises:
            ValueError: the sizes do not go into each other.
        """
        shards, others = self.dp_shard, self.dp_replicate * self.pp * self.tp
        if shards == REST:
            shards, rest = divmod(ranks, others)
            if rest or not shards:
                given = [("dp_replicate", self.dp_replicate), ("pp", self.pp), ("tp", self.tp)]
                said = " × ".join(f"parallel.{name}={size}" for name, size in given if size > 1)
                raise ValueError(
                    f"{said} does not divide the {_count(ranks)} of this run" + (_START if ranks == 1 else "")
                )
        if others * shards != ranks:
            stages = "".join(f"parallel.{k}={n} × " for k, n in (("pp", self.pp), ("tp", self.tp)) if n > 1)
            raise ValueError(
                f"{stages}parallel.dp_replicate={self.dp_replicate} × parallel.dp_shard={self.dp_shard} is "
                f"{_count(others * shards)}, and this run has {ranks}"
                + (_START if ranks == 1 else ": parallel.dp_shard=-1 takes all that are left")
            )
        return Mesh(self.pp, self.dp_replicate, shards, self.tp)


_START = ": start it under torchrun"


def _count(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks != 1 else "")
