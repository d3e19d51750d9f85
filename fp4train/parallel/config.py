"""How a run is cut over its ranks: section `parallel` of the configuration, and the mesh that it
makes of them.
"""

from dataclasses import dataclass

from fp4train.precision.gather import GATHERS
from fp4train.text import check_choice, check_least, next_fitting

REST = -1
"""The size of a mesh dimension that takes all ranks left over."""
MOST_RANKS = 1 << 20
"""A number of ranks beyond this is a slip of the hand."""

REDUCES = ("float32", "ordered", "bf16")

SCHEDULES = ("1f1b", "gpipe", "interleaved")
_SPLIT = ("zb", "zbv", "zero_bubble", "interleaved_zb", "dualpipe", "dualpipev", "v")
"""Schedules that run the gradients of inputs and of weights at different times."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The ranks of a run by their use, and how they communicate: the run, its plan, and the cost
    model have this one.

    Ranks are numbered with tensor parallelism innermost, then context, data shards, data replicas,
    and pipeline stages outermost, so that those that send each other most are nearest.

    Args:
        replicate: data replicas, between which gradients are all-reduced (HSDP).
        shard: ranks with sequences of their own that share the weights of one replica (FSDP).
        tensor: ranks that share each layer; `sequence`: norms and the residual stream are split
            over them, too.
        context: ranks that share each sequence, and the weights of one replica.
        expert: ranks of `shard` that share the experts: each has some of them whole, which the
            other ranks of `shard` with the same ones share.
        pipeline: stages; `virtual`: parts of the model per stage (interleaved schedules).
        forward_first: stages run all forward passes of a step before the backward ones (GPipe), not
            as few as they can.
        microbatches: forward passes per step and data rank.
        gather: how weights are gathered: "recipe" as codes and scales, "bf16", or "fp32".
        sum_bytes: bytes of an element of the partial sums that tensor-parallel ranks send, 2 with
            `sequence` alone.
        reduce_bytes: bytes of a gradient element between shards; replicas send float32.
        joined: layers with a common input add their dx before it is scattered, in two bytes per
            element; ranks that share sequences each hold the weights,
            and pass keys and values round beside the products (Megatron-LM). fp4train's layers each
            scatter their own.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = True
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    virtual: int = 1
    forward_first: bool = False
    microbatches: int = 1
    gather: str = "recipe"
    sum_bytes: int = 4
    reduce_bytes: int = 4
    joined: bool = False

    def __post_init__(self) -> None:
        check_least(
            self,
            "",
            "replicate",
            "shard",
            "tensor",
            "context",
            "expert",
            "pipeline",
            "virtual",
            "microbatches",
        )
        check_choice("gather", self.gather, GATHERS)
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"virtual={self.virtual} parts per stage need a pipeline of at least 2 stages"
            )

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.tensor * self.context * self.pipeline

    @property
    def data(self) -> int:
        """The parts that the sequences of a batch are shared out in."""
        return self.replicate * self.shard

    @property
    def token_ranks(self) -> int:
        """Ranks that have tokens of their own: other sequences, or other chunks of them."""
        return self.data * self.context

    @property
    def weight_ranks(self) -> int:
        """Ranks that share the weights, gradients and moments of one replica (FSDP)."""
        return self.shard if self.joined else self.shard * self.context

    def holders(self, experts: int) -> int:
        """Ranks that share the weights of a layer of one replica: of so many experts, or of none."""
        return self.weight_ranks // (self.expert if experts else 1)

    @property
    def expert_holders(self) -> int:
        """Ranks that share the weights of the same experts of one replica."""
        return self.holders(self.expert)

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits: (p−1) / (v·m + p−1) (arXiv:2104.04473)."""
        waits = self.pipeline - 1
        return waits / (self.virtual * self.microbatches + waits)

    def in_flight(self, stage: int) -> float:
        """Microbatches whose activations a stage holds at once, as a share of its part of the
        model.

        GPipe: all. 1F1B: p − stage; interleaved: p · (1 + (p−1)/(p·v)) on the first stage
            (arXiv:2205.05198), taken for
        each one; at most all of them.
        """
        p = self.pipeline
        v = self.virtual
        most = p - stage if v == 1 else p * (1 + (p - 1) / (p * v))
        if self.forward_first:
            return self.microbatches
        return min(self.microbatches, most)

    def __str__(self) -> str:
        names = {"replicate": "replicas", "shard": "shards", "pipeline": "stages"}
        order = ("replicate", "shard", "tensor", "context", "pipeline")
        axes = [
            f"{getattr(self, key)} {names.get(key, key)}" for key in order if getattr(self, key) > 1
        ]
        experts = f", {self.expert} of which share experts" if self.expert > 1 else ""
        return (" × ".join(axes) or "1 rank") + experts


ONE = Mesh()
"""A rank alone."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The sizes of the mesh, and what ranks send each other. A resume may change all of it.

    Args:
        dp_replicate: groups of ranks that each hold the whole model; gradients are summed over them
            (HSDP).
        dp_shard: ranks that share the weights, gradients and moments of one model (FSDP); -1: all
            ranks that dp_replicate leaves.
        pp: ranks that each hold some of the blocks (pipeline); microbatches pass from one to the
            next. The bits are those of one stage; but a model's own random numbers (dropout)
            differ.
        pp_schedule: order of forward and backward passes. "1f1b": a backward pass as soon as there
            is one, so that a rank holds the activations of at most pp microbatches
            (arXiv:1806.03377). "gpipe": all forward passes, then all backward ones
            (arXiv:1811.06965). "interleaved": 1f1b with `pp_chunks` stages per rank, which divides
            the idle time by as much (arXiv:2104.04473).
        pp_chunks: stages per rank under "interleaved".
        tp: ranks that share every block's matrices (tensor parallelism, arXiv:1909.08053); best
            within one machine.
        sp: with tp, whether tokens between the matrices are shared as well (sequence parallelism,
            arXiv:2205.05198).
        cp: ranks that each have a chunk of every sequence (context parallelism, arXiv:2407.21783,
            section 3.3.2): attention gathers the keys and values of the chunks before. They share
            the weights as ranks of dp_shard do.
        ep: ranks of dp_shard, which it divides, that share the experts of every layer (expert
            parallelism, arXiv:2006.16668): tokens are sent to the rank that has their experts, and
            back. Each rank's are a group of their own there, so the bits are those of microbatches.
            Not with tp and cp.
        gather: form in which ranks of dp_shard send each other the weights of the blocks' layers.
            "recipe": codes and scales where the layer's recipe quantises the weight, else values in
            the recipe's dtype, in every bit as on one rank; BF16, which changes digits, where a
            weight has no such codes, as with Transformer Engine: the plan of a mesh says where, and
            why. "bf16": values in BF16, rounded before they are quantised. "fp32": the masters.
        reduce: dtype in which ranks of dp_shard send each other gradients, which are summed in
            float32 in any case. "bf16": each rank's is rounded to BF16, for half the bytes and
            other digits; replicas send float32. "ordered": float32, summed in a fixed order, that
            of one rank that passes the same microbatches and chunks.
        tp_reduce: dtype in which ranks of tp send each other their terms of y and dx, which are
            summed in float32 in any case. "bf16" rounds each rank's term tᵣ, for half the bytes: a
            sum is off by at most 2⁻⁸·Σ|tᵣ|. It needs sp; experts send float32.
        timeout: seconds that a rank waits for the others in a collective; then the run ends.
    """

    dp_replicate: int = 1
    dp_shard: int = REST
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_chunks: int = 2
    tp: int = 1
    sp: bool = True
    cp: int = 1
    ep: int = 1
    gather: str = "recipe"
    reduce: str = "float32"
    tp_reduce: str = "float32"
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        check_least(self, "parallel.", "dp_replicate", "pp", "tp", "cp", "ep")
        if self.dp_shard < 1 and self.dp_shard != REST:
            raise ValueError(
                f"parallel.dp_shard={self.dp_shard} must be at least 1, or -1 for all ranks "
                "that are left"
            )
        for name in ("dp_replicate", "dp_shard", "pp", "pp_chunks", "tp", "cp", "ep"):
            if getattr(self, name) > MOST_RANKS:
                raise ValueError(f"parallel.{name}={getattr(self, name)} is more than {MOST_RANKS}")
        if self.pp_schedule in _SPLIT:
            raise ValueError(
                f"parallel.pp_schedule={self.pp_schedule} runs the gradients of inputs and "
                "weights at different times, "
                "which would run the GEMMs of every backward pass twice (a layer's backward "
                "makes both); allowed are "
                f"{', '.join(SCHEDULES)}"
            )
        if self.pp_schedule not in SCHEDULES:
            raise ValueError(
                f"parallel.pp_schedule={self.pp_schedule!r} must be one of {', '.join(SCHEDULES)}"
            )
        if self.pp_chunks < 2:
            raise ValueError(
                f"parallel.pp_chunks={self.pp_chunks} must be at least 2; "
                "parallel.pp_schedule=1f1b has 1"
            )
        check_choice("parallel.gather", self.gather, GATHERS)
        check_choice("parallel.reduce", self.reduce, REDUCES)
        check_choice("parallel.tp_reduce", self.tp_reduce, ("float32", "bf16"))
        if self.tp_reduce == "bf16" and not self.sp:
            raise ValueError(
                "parallel.tp_reduce=bf16 needs parallel.sp=true, in which ranks send each other "
                "their terms of a sum; without it use parallel.tp_reduce=float32"
            )
        if self.ep > 1 and self.tp * self.cp > 1:
            raise ValueError(
                f"parallel.ep={self.ep} with parallel.tp={self.tp} and parallel.cp={self.cp}: experts "
                "are shared by ranks with whole layers and sequences: use parallel.tp=1 and "
                "parallel.cp=1, or parallel.ep=1"
            )
        if not 1 <= self.timeout <= 1e6:
            raise ValueError(
                f"parallel.timeout={self.timeout} must lie between 1 and 1000000 seconds"
            )

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        if self.pp > 1 and self.pp_schedule == "interleaved":
            return self.pp_chunks
        return 1

    @property
    def others(self) -> int:
        """Ranks per data shard."""
        return self.dp_replicate * self.pp * self.tp * self.cp

    def mesh(self, ranks: int) -> Mesh:
        """The mesh of so many ranks.

        Raises:
            ValueError: the sizes do not go into each other.
        """
        shards = self.dp_shard
        other_ranks = self.others
        if shards == REST:
            shards, remainder = divmod(ranks, other_ranks)
            if remainder or not shards:
                names = ("dp_replicate", "pp", "tp", "cp")
                sizes = [(name, getattr(self, name)) for name in names]
                sizes = [(f"parallel.{name}", size) for name, size in sizes if size > 1]
                last, size = sizes[-1]
                left, remainder = divmod(ranks, other_ranks // size)
                fits = "" if remainder else next_fitting(size, left, lambda n: left % n == 0)
                near = f"; use {last}={fits}" if fits else ""
                product = " × ".join(f"{name}={size}" for name, size in sizes)
                raise ValueError(
                    f"{product} does not divide the {_count(ranks)} of this run"
                    + (_START if ranks == 1 else near)
                )
        if other_ranks * shards != ranks:
            stages = "".join(
                f"parallel.{name}={getattr(self, name)} × "
                for name in ("pp", "tp", "cp")
                if getattr(self, name) > 1
            )
            raise ValueError(
                f"{stages}parallel.dp_replicate={self.dp_replicate} × "
                f"parallel.dp_shard={self.dp_shard} is "
                f"{_count(other_ranks * shards)}, and this run has {ranks}"
                + (_START if ranks == 1 else ": parallel.dp_shard=-1 takes all that are left")
            )
        if shards % self.ep:
            fits = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
            raise ValueError(
                f"parallel.ep={self.ep} does not divide the {_count(shards)} of parallel.dp_shard, "
                f"which share the experts; parallel.ep allowed: {fits}"
                + (_START if ranks == 1 else "")
            )
        return Mesh(
            replicate=self.dp_replicate,
            shard=shards,
            tensor=self.tp,
            sequence=self.sp,
            context=self.cp,
            expert=self.ep,
            pipeline=self.pp,
            virtual=self.chunks,
            forward_first=self.pp > 1 and self.pp_schedule == "gpipe",
            gather=self.gather,
            sum_bytes=2 if self.tp_reduce == "bf16" else 4,
            reduce_bytes=2 if self.reduce == "bf16" else 4,
        )


_START = ": start it under torchrun"


def _count(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks != 1 else "")
