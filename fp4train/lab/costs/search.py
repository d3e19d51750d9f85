"""A configuration planned on a mesh: the one that it asks for, or the cheapest that fits.

The cheapest is found among every mesh of a number of GPUs, ranked by tokens per second. Tried are tensor parallelism
inside of an NVLink domain, pipelines, all ways to divide the data ranks into shards and replicas, microbatches of 1, 2,
4 and 8 sequences, and recomputation on and off. Where a model or a batch cannot be cut as a mesh asks, the problem says
what to do.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import nn

from fp4train.config.schema import Config
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import Interconnect, interconnect
from fp4train.lab.costs.workload import ModelWeight, Workload, find_weights, tensor_cut, workload
from fp4train.nn.executors.cut import LayerShard
from fp4train.nn.ranks import Ranks
from fp4train.optim.adamw import moment_bytes
from fp4train.parallel.config import REST, Mesh, Parallel
from fp4train.parallel.stages import cut_of, tied_weights
from fp4train.parallel.tensor import tensor_cut_of
from fp4train.precision.gather import effective
from fp4train.precision.layers import find_layers
from fp4train.precision.phases import Timeline
from fp4train.precision.plan import Plan
from fp4train.precision.report import gathers
from fp4train.run.build import build_plan
from fp4train.run.checks import check_cut, check_oscillation, divided_blocks
from fp4train.run.fuse import kernels_of
from fp4train.run.produced import ProducedNorms, produced_by, produced_in

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
                cost = ClusterCost(run, gpu, links, mesh)
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
            cut = replace(like, tensor=tensor, pipeline=pipeline, microbatches=passes // data)
            for shard in _divisors(data, data):
                yield replace(cut, replicate=data // shard, shard=shard)


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
    """Why tensor parallelism cannot cut the heads and widths of `model` over `mesh`."""
    tensors = mesh.tensor
    counts = {(key, getattr(model.get_submodule(path), name)) for path, name, key in tensor_cut(model).counts}
    sizes = {w.name: w.segments or (w.shape[w.split],) for w in weights if w.split is not None}
    common = math.gcd(*(number for _, number in counts), *(size for each in sizes.values() for size in each))
    fits = _choices("parallel.tp", common)
    for key, number in sorted(counts):
        if number % tensors:
            yield f"parallel.tp={tensors} does not divide {key}={number}: {fits}"
    for weight in weights:
        if size := next((each for each in sizes.get(weight.name, ()) if each % tensors), 0):
            what = "a segment" if weight.segments else "the split dimension"
            yield f"parallel.tp={tensors} does not divide {size}, {what} of {weight.name}: {fits}"
            break


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


class MeshPlan:
    """A configuration planned on a mesh: that of its section `parallel`, or with `auto` the cheapest.

    Args:
        gpus: their number; None: the product of the sizes in that section.
        given: configuration keys that the command line sets; the batch and its length have defaults for a laptop.
    """

    def __init__(
        self,
        config: Config,
        gpus: int | None,
        auto: bool | None,
        model: nn.Module,
        timeline: Timeline,
        gpu: Gpu,
        given: Collection[str],
    ) -> None:
        self.config = replace(config, parallel=Parallel()) if auto else config
        self.gpus, self.model, self.timeline, self.gpu = gpus, model, timeline, gpu
        self.links = interconnect(gpu)
        self.kernels = kernels_of(config.train, "cuda", elsewhere=True)
        """Whether Liger's kernels run what lies between the products, and a sentence that says so."""
        self.notes: list[str] = []
        self._batch_given = "train.batch_size" in given
        if "train.seq_len" not in given:
            self.notes.append(
                f"train.seq_len={config.train.seq_len} is the default; large models train at 4096 and more"
            )

    def mesh(self, microbatches: int = 1) -> Mesh:
        """The mesh that was asked for; weights are gathered as the run would gather them.

        Raises:
            UserError: its size is not the number of GPUs.
        """
        parallel, others = self.config.parallel, self.config.parallel.others
        gpus = self.gpus or others * max(1, parallel.dp_shard)
        shard = max(1, gpus // others) if parallel.dp_shard == REST else parallel.dp_shard
        if others * shard != gpus:
            factors = f"dp_replicate {parallel.dp_replicate} × dp_shard {shard} × tp {parallel.tp} × pp {parallel.pp}"
            instead = "dp_replicate × tp × pp must divide it, parallel=auto finds a mesh"
            if gpus % others == 0:
                instead = f"parallel.dp_shard={gpus // others} fills it, or gpus={others * max(1, parallel.dp_shard)}"
            raise UserError(f"gpus={gpus} is not {factors} = {others * shard}: {instead}")
        gather = effective(parallel.gather, whole=self.config.train.whole_weights is not None)
        return replace(parallel.mesh(gpus), microbatches=microbatches, gather=gather)

    def plan(self, sequences: int, tensors: int, stages: int = 1, data_ranks: int = 1) -> Plan:
        """The plan of a rank of the run with microbatches of so many sequences, on so many tensor-parallel ranks."""
        train = replace(self.config.train, batch_size=sequences, microbatch=sequences)
        parallel = replace(self.config.parallel, tp=tensors)
        config = replace(self.config, train=train, parallel=parallel)
        layers, cut = find_layers(self.model), tensor_cut(self.model)
        parts = {
            name: layer.part("in" if name in cut.in_ else "out", tensors, cut.segments.get(name, ()))
            for name, layer in layers.items()
        }
        return build_plan(config, parts, self.timeline, Device.elsewhere(self.gpu), data_ranks, stages=stages)

    def produced(self, plan: Plan, data_ranks: int = 1) -> list[ProducedNorms]:
        """Norms and gates that quantise their results in every stretch, on so many ranks with tokens of their own."""
        amax = None
        if self.config.parallel.amax == "data" and data_ranks > 1:
            amax = LayerShard(amax="data", data=Ranks(group=None, rank=0, size=data_ranks))
        given: Any = (self.config.train, "cuda", plan.tokens)
        return [produced_in(self.model, each, *given, elsewhere=True, amax=amax) for each in plan.stretches]

    def workloads(
        self, plan: Plan, sequences: int, produced: Sequence[ProducedNorms]
    ) -> list[tuple[str, int, Workload]]:
        """(title, steps, workload) of every stretch of the run, whose norms and gates quantise what `produced` says."""
        whole = find_layers(self.model)
        train = self.config.train
        recomputed = 1.0 if getattr(self.config.model, "recompute", False) else 0.0
        return [
            (
                stretch.title,
                stretch.stop - stretch.start,
                workload(
                    self.model,
                    {name: replace(layer, layer=whole[name]) for name, layer in stretch.layers.items()},
                    stretch.recipe,
                    sequences=sequences,
                    seq_len=train.seq_len,
                    compiled=train.compile,
                    recorded=train.cuda_graph,
                    recomputed=recomputed,
                    moment_bytes=moment_bytes(self.config.optim),
                    liger=self.kernels[0],
                    fused=train.kernels != "torch",
                    producers=norms.producers,
                    between=norms.between,
                ),
            )
            for stretch, norms in zip(plan.stretches, produced, strict=True)
        ]

    def costs(self) -> tuple[Plan, list[tuple[str, int, ClusterCost]]]:
        """The plan, and the cost of every stretch on the mesh that was asked for.

        Raises:
            UserError: the mesh cannot be; the message says what to do.
        """
        mesh = self.mesh()
        for problem in problems(self.model, find_weights(self.model, {}), mesh):
            raise UserError(problem)
        train = self.config.train
        batch = train.batch_size
        if not self._batch_given and batch % (mesh.data * mesh.pipeline):
            batch = mesh.data * mesh.pipeline
            self.notes.append(
                f"train.batch_size={train.batch_size}, the default, does not divide over "
                f"{mesh.data} data ranks: planned with train.batch_size={batch}"
            )
        if refused := batch_problem(batch, train.microbatch, mesh):
            raise UserError(refused)
        local = batch // mesh.data
        sequences = train.microbatch or (local if mesh.pipeline == 1 else max(1, local // (4 * mesh.pipeline)))
        while local % sequences:
            sequences -= 1
        if mesh.pipeline > 1 and train.microbatch is None:
            self.notes.append(
                f"train.microbatch is not given: planned with train.microbatch={sequences}, because a pipeline needs "
                "several microbatches"
            )
        mesh = self.mesh(local // sequences)
        self.check(mesh, batch, sequences)
        plan = self.plan(sequences, mesh.tensor, stages=mesh.pipeline, data_ranks=mesh.data)
        check_oscillation(self.config, plan)
        if mesh.shard > 1:
            layers = (layer for stretch in plan.stretches for layer in stretch.layers.values())
            self.notes.append(gathers(layers, mesh.shard, self.config.parallel.gather, whole=train.whole_weights))
        shared = " The loss is torch's where ranks share the vocabulary." if mesh.tensor > 1 and self.kernels[0] else ""
        self.notes += filter(None, [divided_blocks(plan), self.kernels[1] + shared])
        produced = self.produced(plan, mesh.data)
        self.notes += produced_by(self.model, plan.stretches, produced, "cuda")
        loads = self.workloads(plan, sequences, produced)
        return plan, [(title, n, ClusterCost(load, self.gpu, self.links, mesh)) for title, n, load in loads]

    def check(self, mesh: Mesh, batch: int, sequences: int) -> None:
        """Raises UserError where a run with microbatches of so many sequences does not begin on `mesh`."""
        parallel = replace(self.config.parallel, tp=mesh.tensor, pp=mesh.pipeline)
        train = replace(self.config.train, batch_size=batch, microbatch=sequences)
        check_cut(replace(self.config, train=train, parallel=parallel), mesh)
        with user_errors(TypeError, ValueError):
            if mesh.tensor > 1:
                tensor_cut_of(self.model, mesh.tensor)
            if mesh.pipeline > 1:
                tied_weights(self.model, cut_of(self.model, parallel))

    def search(self) -> tuple[list[MeshCandidate], int]:
        """Every mesh, the best first, and the batch they are compared with."""
        assert self.gpus is not None
        # It also tries meshes with tensor parallelism and pipelines.
        self.plan(1, 1, stages=2)
        batch = self.config.train.batch_size
        if not self._batch_given:
            batch = self.gpus
            self.notes.append(f"train.batch_size is not given: meshes are compared with {batch} sequences, one per GPU")

        @lru_cache
        def load(sequences: int, tensors: int, shared: bool) -> Workload | None:
            try:
                plan = self.plan(sequences, tensors, data_ranks=1 + shared)
            except UserError:
                if tensors == 1:
                    raise
                return None  # the named backend runs no parts of layers
            return self.workloads(plan, sequences, self.produced(plan, 1 + shared))[0][2]

        def measure(sequences: int, mesh: Mesh) -> Workload | None:
            try:
                self.check(mesh, batch, sequences)
            except UserError:
                return None
            return load(sequences, mesh.tensor, mesh.data > 1)

        like = self.mesh()
        if like.gather != self.config.parallel.gather:
            why = self.config.train.whole_weights
            self.notes.append(f"{why} takes float32 weights: they are not gathered as codes")
        choices = (False, True) if hasattr(self.config.model, "recompute") else (False,)
        found = candidates(
            self.model, measure, self.gpu, self.links, gpus=self.gpus, batch=batch, like=like, recompute=choices
        )
        if not found:
            raise UserError(
                f"no mesh of gpus={self.gpus} divides the model's heads and blocks and train.batch_size={batch}: "
                "take a batch that is a multiple of the number of GPUs"
            )
        return found, batch
