"""The cheapest mesh that fits: every mesh of a number of GPUs, ranked by tokens per second.

Tried are tensor parallelism inside of an NVLink domain, pipelines whose stages have equal numbers of blocks, all ways
to divide the data ranks into shards and replicas, microbatches of 1, 2, 4 and 8 sequences, and recomputation on and
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from fp4train.hardware import Gpu
from fp4train.lab.costs.cluster import ClusterCost, cluster_cost
from fp4train.lab.costs.fit import problems
from fp4train.lab.costs.links import Interconnect
from fp4train.lab.costs.shards import Weight, find_weights
from fp4train.lab.costs.workload import Workload
from fp4train.parallel.config import Mesh

MOST_STAGES = 16
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One mesh with its microbatch.

    Args:
        sequences: of a microbatch.
        recompute: whether blocks are recomputed in backward.
    """

    cost: ClusterCost
    sequences: int
    recompute: bool

    def overrides(self) -> list[str]:
        """The keys that ask for it."""
        found = [*self.cost.mesh.overrides(), f"train.microbatch={self.sequences}"]
        return [*found, "model.recompute=true"] if self.recompute else found


def candidates(
    model: nn.Module,
    measure: Callable[[int, Mesh], Workload | None],
    gpu: Gpu,
    links: Interconnect,
    *,
    gpus: int,
    batch: int,
    like: Mesh,
    recompute: Sequence[bool] = (False, True),
) -> list[Candidate]:
    """Every mesh of `gpus` GPUs that divides a batch of `batch` sequences, fastest first, those that fit before others.

    Args:
        measure: the workload of a microbatch of so many sequences on a mesh; None: the run cannot begin there.
        like: a mesh that communicates as those that are tried; its sizes do not matter.
        recompute: the choices to try.
    """
    found = []
    for sequences in MICROBATCHES:
        if batch % sequences:
            continue
        for mesh in _meshes(model, find_weights(model, {}), links, gpus, batch // sequences, like):
            if (load := measure(sequences, mesh)) is None:
                continue
            for again in recompute:
                run = replace(load, recomputed=1.0 if again else 0.0)
                cost = cluster_cost(run, gpu, links, mesh)
                found.append(Candidate(cost=cost, sequences=sequences, recompute=again))
    return sorted(found, key=lambda each: (not each.cost.fits, each.cost.seconds, each.cost.memory.total))


def _meshes(
    model: nn.Module, weights: list[Weight], links: Interconnect, gpus: int, passes: int, like: Mesh
) -> Iterator[Mesh]:
    for tensor in _divisors(gpus, links.domain):
        for pipeline in _divisors(gpus // tensor, MOST_STAGES):
            data = gpus // tensor // pipeline
            if passes % data or any(problems(model, weights, Mesh(tensor=tensor, pipeline=pipeline))):
                continue
            if pipeline > 1 and passes // data < pipeline:
                continue  # a pipeline that never fills
            for shard in _divisors(data, data):
                yield replace(
                    like,
                    replicate=data // shard,
                    shard=shard,
                    tensor=tensor,
                    pipeline=pipeline,
                    microbatches=passes // data,
                )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def distinct(found: Iterable[Candidate], number: int) -> list[Candidate]:
    """The first candidates of distinct meshes, microbatches apart."""
    seen: dict[object, Candidate] = {}
    for each in found:
        key = (each.cost.mesh.tensor, each.cost.mesh.pipeline, each.cost.mesh.shard, each.recompute)
        seen.setdefault(key, each)
    return list(seen.values())[:number]
