"""Every mesh of a number of GPUs, ranked by tokens per second, and what a mesh must divide.

Tried are tensor parallelism inside of an NVLink domain, pipelines, all ways to divide the data
ranks into shards and replicas, microbatches of 1, 2, 4 and 8 sequences, and recomputation on and
off. Where a model or a batch cannot be cut as a mesh asks, the problem says what to do.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from fp4train.hardware import Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import Interconnect
from fp4train.lab.costs.weights import ModelWeight, find_weights
from fp4train.lab.costs.workload import Workload
from fp4train.models.common.cut import tensor_cut
from fp4train.parallel.config import Mesh

MOST_STAGES: Final = 16
MICROBATCHES: Final = (1, 2, 4, 8)
_LISTED: Final = 12


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
    model: nn.Module,
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
    weights = find_weights(model, {})
    tried = []
    for sequences in MICROBATCHES:
        if batch % sequences:
            continue
        for mesh in _meshes(model, weights, links, gpus, batch // sequences, like):
            load = measure(sequences, mesh)
            if load is None:
                continue
            for again in recompute:
                execution = replace(load.execution, recomputed=1.0 if again else 0.0)
                cost = ClusterCost(replace(load, execution=execution), gpu, links, mesh)
                tried.append(MeshCandidate(cost=cost, sequences=sequences, recompute=again))
    return sorted(tried, key=_rank)


def _rank(candidate: MeshCandidate) -> tuple[bool, float, float]:
    cost = candidate.cost
    return not cost.fits, cost.seconds, cost.memory.total


def _meshes(
    model: nn.Module,
    weights: list[ModelWeight],
    links: Interconnect,
    gpus: int,
    passes: int,
    like: Mesh,
) -> Iterator[Mesh]:
    """Meshes whose data ranks divide so many forward passes."""
    for tensor in _divisors(gpus, links.domain):
        for pipeline in _divisors(gpus // tensor, MOST_STAGES):
            data = gpus // tensor // pipeline
            cut = replace(like, tensor=tensor, pipeline=pipeline)
            if passes % data or any(problems(model, weights, cut)):
                continue
            if pipeline > 1 and passes // data < pipeline:
                continue  # a pipeline that never fills
            for shard in _divisors(data, data):
                microbatches = passes // data
                yield replace(cut, replicate=data // shard, shard=shard, microbatches=microbatches)


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


def problems(model: nn.Module, weights: list[ModelWeight], mesh: Mesh) -> Iterator[str]:
    """Why tensor parallelism cannot cut the heads and widths of `model` over `mesh`."""
    ranks = mesh.tensor
    counts = sorted(
        {
            (key, getattr(model.get_submodule(path), attribute))
            for path, attribute, key in tensor_cut(model).counts
        }
    )
    sizes = {
        weight.name: weight.segments or (weight.shape[weight.split],)
        for weight in weights
        if weight.split is not None
    }
    divided = [number for _, number in counts]
    divided += [size for parts in sizes.values() for size in parts]
    fits = _choices("parallel.tp", math.gcd(*divided))
    for key, number in counts:
        if number % ranks:
            yield f"parallel.tp={ranks} does not divide {key}={number}: {fits}"
    for weight in weights:
        odd = [size for size in sizes.get(weight.name, ()) if size % ranks]
        if odd:
            if weight.segments:
                what = "a segment"
            else:
                what = "the split dimension"
            yield f"parallel.tp={ranks} does not divide {odd[0]}, {what} of {weight.name}: {fits}"
            break


def batch_problem(sequences: int, microbatch: int | None, mesh: Mesh) -> str | None:
    """Why a batch of `sequences` cannot be divided over the data ranks and their microbatches; None
    if it can."""
    if sequences % mesh.data:
        low = sequences // mesh.data * mesh.data
        near = [str(size) for size in (low, low + mesh.data) if size]
        return (
            f"train.batch_size={sequences} does not divide over {mesh.data} data ranks "
            f"(dp_replicate {mesh.replicate} × dp_shard {mesh.shard}): "
            f"train.batch_size={' or '.join(near)} does"
        )
    local = sequences // mesh.data
    if microbatch is not None and local % microbatch:
        return (
            f"train.microbatch={microbatch} does not divide the {local} sequences of a data rank: "
            f"{_choices('train.microbatch', local)}"
        )
    return None


def _choices(key: str, number: int) -> str:
    divisors = _divisors(number, number)
    listed = divisors
    if len(divisors) > _LISTED:
        listed = [*divisors[: _LISTED - 1], divisors[-1]]
    return f"{key} may be {', '.join(map(str, listed))}"
