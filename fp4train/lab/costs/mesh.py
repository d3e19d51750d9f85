"""The mesh of a plan: how many ranks each kind of parallelism has, and why a model may not fit it.

Ranks are numbered with tensor parallelism innermost, then context, data shards, data replicas, and pipeline stages
outermost, so that what talks most is nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fp4train.lab.costs.links import Group, Interconnect
from fp4train.text import check_choice

GATHERS: Final = ("recipe", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of a mesh and how it communicates.

    Args:
        replicate: data replicas, between which gradients are all-reduced (HSDP).
        shard: ranks that share the weights, gradients and moments of one replica (FSDP).
        tensor: ranks that share each layer; `sequence`: norms and the residual stream are split over them, too.
        context: ranks that share each sequence.
        pipeline: stages; `virtual`: parts of the model per stage (interleaved schedules).
        forward_first: stages run all forward passes of a step before the backward ones (GPipe), not as few as they can.
        microbatches: forward passes per step and data rank.
        gather: how weights are gathered: "recipe" as codes and scales, "bf16", or "fp32".
        reduce_bytes: bytes of a gradient element between shards; replicas send float32.
        codes: activations are gathered over `tensor` as codes, in layers that quantise them.
        joined: layers with a common input gather it once in backward and add their dx before it is scattered, in two
            bytes per element (Megatron-LM). fp4train's layers each do their own, and add in float32.
        own_units: embedding and head are gathered in BF16 and by themselves, the head behind the blocks (torchtitan,
            Megatron-LM). fp4train's travel in float32 before the first block.
        hides_tensor: the collectives of tensor parallelism run beside GEMMs (asynchronous tensor parallelism).
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = True
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    forward_first: bool = False
    microbatches: int = 1
    gather: str = "recipe"
    reduce_bytes: int = 4
    codes: bool = False
    joined: bool = False
    own_units: bool = False
    hides_tensor: bool = False

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "tensor", "context", "pipeline", "virtual", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_choice("gather", self.gather, GATHERS)
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"virtual={self.virtual} parts per stage need a pipeline of at least 2 stages")

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """Ranks that have tokens of their own."""
        return self.replicate * self.shard

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits: (p−1) / (v·m + p−1) (arXiv:2104.04473)."""
        waits = self.pipeline - 1
        return waits / (self.virtual * self.microbatches + waits)

    def in_flight(self, stage: int) -> float:
        """Microbatches whose activations a stage holds at once, as a share of its part of the model.

        GPipe: all. 1F1B: p − stage; interleaved: p · (1 + (p−1)/(p·v)) on the first stage (arXiv:2205.05198), taken for
        each one; at most all of them.
        """
        p, v = self.pipeline, self.virtual
        most = p - stage if v == 1 else p * (1 + (p - 1) / (p * v))
        return self.microbatches if self.forward_first else min(self.microbatches, most)

    def group(self, links: Interconnect, kind: str) -> Group:
        """The ranks of one kind: "tensor", "context", "shard", "replicate" or "pipeline"."""
        order = ("tensor", "context", "shard", "replicate", "pipeline")
        stride = 1
        for name in order[: order.index(kind)]:
            stride *= getattr(self, name)
        return Group.of(links, getattr(self, kind), stride)

    def __str__(self) -> str:
        names = {
            "replicate": "replicas",
            "shard": "shards",
            "tensor": "tensor",
            "context": "context",
            "pipeline": "stages",
        }
        found = [f"{getattr(self, key)} {name}" for key, name in names.items() if getattr(self, key) > 1]
        return " × ".join(found) or "1 rank"

    def overrides(self) -> list[str]:
        """The keys that ask for this mesh on the command line."""
        given = [f"parallel.dp_shard={self.shard}"]
        if self.replicate > 1:
            given.append(f"parallel.dp_replicate={self.replicate}")
        if self.tensor > 1:
            given.append(f"parallel.tp={self.tensor}")
        if self.pipeline > 1:
            given.append(f"parallel.pp={self.pipeline}")
        return given
