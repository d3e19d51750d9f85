"""The cheapest mesh that fits: every mesh of a number of GPUs, ranked by tokens per second.

Tried are tensor parallelism inside of an NVLink domain, pipelines whose stages have equal numbers of blocks, all ways
to divide the data ranks into shards and replicas, microbatches of 1, 2, 4 and 8 sequences, and recomputation on and
off. Where a model or a batch cannot be cut as a mesh asks, the problem says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from fp4train.hardware import Gpu
from fp4train.lab.costs.cluster import ClusterCost, cluster_cost
from fp4train.lab.costs.links import Interconnect
from fp4train.lab.costs.workload import ModelWeight, Workload, find_weights
from fp4train.parallel.config import Mesh
from fp4train.precision.layers import find_blocks

MOST_STAGES = 16
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class MeshCandidate:
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
) -> list[MeshCandidate]:
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
                found.append(MeshCandidate(cost=cost, sequences=sequences, recompute=again))
    return sorted(found, key=lambda each: (not each.cost.fits, each.cost.seconds, each.cost.memory.total))


def _meshes(
    model: nn.Module, weights: list[ModelWeight], links: Interconnect, gpus: int, passes: int, like: Mesh
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


def distinct(found: Iterable[MeshCandidate], number: int) -> list[MeshCandidate]:
    """The first candidates of distinct meshes, microbatches apart."""
    seen: dict[object, MeshCandidate] = {}
    for each in found:
        key = (each.cost.mesh.tensor, each.cost.mesh.pipeline, each.cost.mesh.shard, each.recompute)
        seen.setdefault(key, each)
    return list(seen.values())[:number]


def problems(model: nn.Module, weights: list[ModelWeight], mesh: Mesh) -> Iterator[str]:
    """Why `model` cannot be cut over `mesh`: heads and widths by tensor parallelism, blocks by the pipeline."""
    counts = {
        (name, number)
        for module in model.modules()
        for name in ("heads", "kv_heads")
        if isinstance(number := getattr(module, name, None), int)
    }
    for name, number in sorted(counts):
        if number % mesh.tensor:
            yield f"parallel.tp={mesh.tensor} does not divide model.{name}={number}: {_choices('parallel.tp', number)}"
    for weight in weights:
        if weight.split is not None and weight.shape[weight.split] % mesh.tensor:
            size = weight.shape[weight.split]
            yield f"parallel.tp={mesh.tensor} does not divide {size}, the split dimension of {weight.name}"
            break
    blocks = len(find_blocks(model))
    parts = mesh.pipeline * mesh.virtual
    if blocks % parts:
        each = f" × parallel.pp_chunks={mesh.virtual}" if mesh.virtual > 1 else ""
        fits = _choices("parallel.pp", blocks // mesh.virtual) if blocks % mesh.virtual == 0 else "no parallel.pp does"
        yield f"parallel.pp={mesh.pipeline}{each} does not divide the {blocks} blocks: {fits}"


def batch_problem(sequences: int, microbatch: int | None, mesh: Mesh) -> str | None:
    """Why a batch of `sequences` cannot be divided over the data ranks and their microbatches; None if it can."""
    if sequences % mesh.data:
        low = sequences // mesh.data * mesh.data
        near = [str(n) for n in (low, low + mesh.data) if n]
        return (
            f"train.batch_size={sequences} does not divide over {mesh.data} data ranks "
            f"(dp_replicate {mesh.replicate} × dp_shard {mesh.shard}): train.batch_size={' or '.join(near)} does"
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
    shown = divisors if len(divisors) <= 12 else [*divisors[:11], divisors[-1]]
    return f"{key} may be {', '.join(map(str, shown))}"
