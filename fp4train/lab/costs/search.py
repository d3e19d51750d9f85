"""Every mesh of a number of GPUs, ranked by tokens per second.

Tried are tensor parallelism inside of an NVLink domain, pipelines, all ways to divide the data
ranks into shards and replicas, microbatches of 1, 2, 4 and 8 sequences, and recomputation on and
off.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fp4train.hardware import Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import Interconnect
from fp4train.lab.costs.workload import Workload
from fp4train.parallel.config import Mesh

MOST_STAGES: Final = 16
MICROBATCHES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class MeshCandidate:
    """One mesh with its microbatch.

    Args:
        sequences: number of sequences of a microbatch.
        recompute: whether blocks are recomputed in backward.
    """

    cost: ClusterCost
    sequences: int
    recompute: bool

    def overrides(self) -> list[str]:
        """The keys that ask for it."""
        keys = [*self.cost.mesh.overrides(), f"train.microbatch={self.sequences}"]
        if self.recompute:
            return [*keys, "model.recompute=true"]
        return keys


def candidates(
    measure: Callable[[int, Mesh], Workload | None],
    gpu: Gpu,
    links: Interconnect,
    *,
    gpus: int,
    batch: int,
    like: Mesh,
    recompute: Sequence[bool] = (False, True),
) -> list[MeshCandidate]:
    """Every mesh of `gpus` GPUs that divides a batch of `batch` sequences, fastest first, those
    that fit before others.

    Args:
        measure: gives the workload of a microbatch of so many sequences on a mesh; None: the run
            cannot begin there.
        like: a mesh that communicates as those that are tried; its sizes do not matter.
        recompute: the choices to try.
    """
    tried = []
    for sequences in MICROBATCHES:
        if batch % sequences:
            continue
        for mesh in _meshes(links, gpus, batch // sequences, like):
            load = measure(sequences, mesh)
            if load is None:
                continue
            for again in recompute:
                execution = replace(load.execution, recomputed=float(again))
                cost = ClusterCost(replace(load, execution=execution), gpu, links, mesh)
                tried.append(MeshCandidate(cost=cost, sequences=sequences, recompute=again))
    return sorted(tried, key=_rank)


def _rank(candidate: MeshCandidate) -> tuple[bool, float, float]:
    cost = candidate.cost
    return not cost.fits, cost.seconds, cost.memory.total


def _meshes(links: Interconnect, gpus: int, passes: int, like: Mesh) -> Iterator[Mesh]:
    """Meshes whose data ranks divide so many forward passes."""
    for tensor in _divisors(gpus, links.domain):
        for pipeline in _divisors(gpus // tensor, MOST_STAGES):
            data = gpus // tensor // pipeline
            microbatches, remainder = divmod(passes, data)
            if remainder or 1 < pipeline > microbatches:
                continue  # a batch that does not divide, or a pipeline that never fills
            for shard in _divisors(data, data):
                yield replace(
                    like,
                    tensor=tensor,
                    pipeline=pipeline,
                    replicate=data // shard,
                    shard=shard,
                    microbatches=microbatches,
                )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def distinct(ranked: Iterable[MeshCandidate], number: int) -> list[MeshCandidate]:
    """The first candidates of distinct meshes, microbatches apart."""
    best: dict[object, MeshCandidate] = {}
    for candidate in ranked:
        mesh = candidate.cost.mesh
        key = (mesh.tensor, mesh.pipeline, mesh.shard, candidate.recompute)
        best.setdefault(key, candidate)
    return list(best.values())[:number]
