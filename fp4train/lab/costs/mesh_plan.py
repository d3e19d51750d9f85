"""A configuration planned on a mesh of GPUs: the mesh that it asks for, or those of a search, the
fastest that fits first.

A search tries tensor parallelism inside of an NVLink domain, pipelines of at most 16 stages, all
ways to divide the data ranks into shards and replicas, microbatches of 1, 2, 4 and 8 sequences, and
recomputation on and off. What a run refuses is refused here in its words, and left out of a search.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

from torch import nn

from fp4train.config.schema import Config
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.workload import Workload, workload
from fp4train.models.common.cut import tensor_cut
from fp4train.parallel.config import Mesh
from fp4train.parallel.stages import cut_of, tied_weights
from fp4train.parallel.tensor import check_division, tensor_cut_of
from fp4train.precision.gather import gather_mode
from fp4train.precision.layers import find_layers
from fp4train.precision.phases import Timeline
from fp4train.precision.plan import Plan
from fp4train.precision.report import gathers
from fp4train.run.build import build_plan
from fp4train.run.checks import check_cut, check_oscillation, divided_blocks
from fp4train.run.fuse import kernels_of
from fp4train.run.states import bytes_per_parameter

MOST_STAGES: Final = 16
MICROBATCHES: Final = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class MeshPlan:
    """A configuration on the mesh of its section `parallel`.

    Args:
        gpus: number of GPUs; None: the product of the sizes in that section.
    """

    config: Config
    model: nn.Module
    timeline: Timeline
    gpu: Gpu
    gpus: int | None = None

    @property
    def kernels(self) -> tuple[bool, str]:
        """Whether Liger's kernels run what lies between the products, and a sentence that says
        so.
        """
        return kernels_of(self.config.train, "cuda", elsewhere=True)

    @property
    def mesh(self) -> Mesh:
        """The mesh that was asked for; weights are gathered as the run would gather them.

        Raises:
            UserError: its size is not the number of GPUs.
        """
        parallel = self.config.parallel
        gpus = self.gpus or parallel.others * max(1, parallel.dp_shard)
        with user_errors(ValueError, before=f"gpus={gpus}: ", after="; parallel=auto finds a mesh"):
            mesh = parallel.mesh(gpus)
        takes_float32 = self.config.train.whole_weights is not None
        gather = gather_mode(parallel.gather, fully_gathered=takes_float32)
        rows = max(1, self.config.train.rows(mesh.data)) * mesh.data
        microbatches = max(1, self.config.train.batch_size // rows)
        return replace(mesh, microbatches=microbatches, gather=gather)

    def plan(self, sequences: int, mesh: Mesh) -> Plan:
        """The plan of a rank with microbatches of so many sequences."""
        train = replace(self.config.train, batch_size=sequences, microbatch=sequences)
        parallel = replace(self.config.parallel, tp=mesh.tensor)
        config = replace(self.config, train=train, parallel=parallel)
        cut = tensor_cut(self.model)
        parts = {
            name: layer.part(
                "in" if name in cut.in_ else "out", mesh.tensor, cut.segments.get(name, ())
            )
            for name, layer in find_layers(self.model).items()
        }
        device = Device.elsewhere(self.gpu)
        return build_plan(config, parts, self.timeline, device, mesh.data, stages=mesh.pipeline)

    def workloads(self, plan: Plan, sequences: int) -> list[tuple[str, int, Workload]]:
        """(Title, steps, workload) of every stretch of the run."""
        uncut = find_layers(self.model)
        loads = []
        for stretch in plan.stretches:
            plans = {
                name: replace(layer_plan, layer=uncut[name])
                for name, layer_plan in stretch.layers.items()
            }
            load = workload(
                self.model,
                plans,
                stretch.recipe,
                sequences=sequences,
                seq_len=self.config.train.seq_len,
                compiled=self.config.train.compile,
                liger=self.kernels[0],
            )
            load = replace(
                load,
                recomputed=float(getattr(self.config.model, "recompute", False)),
                states=bytes_per_parameter(self.config, self.model),
            )
            loads.append((stretch.title, stretch.stop - stretch.start, load))
        return loads

    def costs(self) -> tuple[Plan, list[tuple[str, int, ClusterCost]]]:
        """The plan, and (title, steps, cost) of every stretch on the mesh that was asked for.

        Raises:
            UserError: the mesh cannot be; the message says what to do.
        """
        mesh = self.mesh
        self._check(mesh, self.config.train.microbatch)
        sequences = self.config.train.rows(mesh.data)
        plan = self.plan(sequences, mesh)
        check_oscillation(self.config, plan)
        loads = self.workloads(plan, sequences)
        return plan, [
            (title, steps, ClusterCost(load, self.gpu, mesh)) for title, steps, load in loads
        ]

    def notes(self, plan: Plan) -> list[str]:
        """How weights are gathered, and which kernels run between the products."""
        mesh = self.mesh
        liger, sentence = self.kernels
        if mesh.tensor > 1 and liger:
            sentence += " The loss is torch's where ranks share the vocabulary."
        notes = [divided_blocks(plan), sentence]
        if mesh.shard > 1:
            layers = [layer for stretch in plan.stretches for layer in stretch.layers.values()]
            reader = self.config.train.whole_weights
            gather = self.config.parallel.gather
            notes.insert(0, gathers(layers, mesh.shard, gather, fully_gathered=reader))
        return list(filter(None, notes))

    def _check(self, mesh: Mesh, sequences: int | None) -> None:
        """Check that a run with microbatches of so many sequences begins on `mesh`.

        Raises:
            UserError: it does not.
        """
        train = replace(self.config.train, microbatch=sequences)
        parallel = replace(self.config.parallel, tp=mesh.tensor, pp=mesh.pipeline)
        with user_errors(TypeError, ValueError):
            if mesh.tensor > 1:
                check_division(self.model, tensor_cut_of(self.model, mesh.tensor), mesh.tensor)
            if mesh.pipeline > 1:
                tied_weights(self.model, cut_of(self.model, parallel))
            check_cut(replace(self.config, train=train, parallel=parallel), mesh)

    def search(self) -> list[ClusterCost]:
        """The meshes of a search that a run begins on, the fastest first, those that fit before
        others.

        Raises:
            UserError: there is none; the message says what to do.
        """
        self.plan(1, Mesh(pipeline=2))  # refuses what no mesh can run
        measured = lru_cache(self._measured)
        choices = (0.0, 1.0) if hasattr(self.config.model, "recompute") else (0.0,)
        costs = []
        for mesh, sequences in self._meshes():
            load = measured(sequences, mesh.tensor, min(mesh.data, 2))
            if load is None:
                continue
            for recomputed in choices:
                costs.append(ClusterCost(replace(load, recomputed=recomputed), self.gpu, mesh))
        if not costs:
            raise UserError(
                f"no mesh of gpus={self.mesh.gpus} divides the model's heads and blocks and "
                f"train.batch_size={self.config.train.batch_size}: take a batch that is a multiple "
                "of the number of GPUs"
            )
        return sorted(costs, key=lambda cost: (not cost.fits, cost.seconds, cost.memory.total))

    def _meshes(self) -> Iterator[tuple[Mesh, int]]:
        """The meshes that a run begins on, each with the sequences of a microbatch: their data
        ranks divide the forward passes, in pipelines that fill.
        """
        like = self.mesh
        sizes = product(
            MICROBATCHES,
            _divisors(like.gpus, self.gpu.domain),
            _divisors(like.gpus, MOST_STAGES),
            _divisors(like.gpus, like.gpus),
        )
        for sequences, tensor, pipeline, shard in sizes:
            passes = self.config.train.batch_size / sequences
            replicas = like.gpus / (tensor * pipeline * shard)
            microbatches = passes / (replicas * shard)
            if replicas % 1 or microbatches % 1 or 1 < pipeline > microbatches:
                continue
            mesh = replace(
                like,
                tensor=tensor,
                pipeline=pipeline,
                replicate=int(replicas),
                shard=shard,
                microbatches=int(microbatches),
            )
            try:
                self._check(mesh, sequences)
            except UserError:
                continue
            yield mesh, sequences

    def _measured(self, sequences: int, tensor: int, data: int) -> Workload | None:
        """The workload of the first stretch; None: the named backend runs no parts of layers."""
        try:
            plan = self.plan(sequences, Mesh(tensor=tensor, replicate=data))
        except UserError:
            if tensor == 1:
                raise
            return None
        return self.workloads(plan, sequences)[0][2]


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def distinct(ranked: Iterable[ClusterCost], number: int) -> list[ClusterCost]:
    """The first costs of distinct meshes, microbatches apart."""
    best: dict[object, ClusterCost] = {}
    for cost in ranked:
        recomputed = cost.workload.recomputed
        best.setdefault((cost.mesh.tensor, cost.mesh.pipeline, cost.mesh.shard, recomputed), cost)
    return list(best.values())[:number]
