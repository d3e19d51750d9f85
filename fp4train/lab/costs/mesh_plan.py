"""A configuration planned on a mesh of GPUs: the mesh that it asks for, or those of a search, the
fastest that fits first.

A search tries tensor parallelism inside of an NVLink domain, pipelines of at most 16 stages, all
ways to divide the data ranks into shards and replicas, microbatches of 1, 2, 4 and 8 sequences, and
recomputation on and off. What a run refuses is refused here in its words, and left out of a search.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Self

from torch import nn

from fp4train.config.schema import Config
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import divisors
from fp4train.lab.costs.workload import Workload
from fp4train.models.common.cut import tensor_cut
from fp4train.parallel.config import Mesh, Parallel
from fp4train.parallel.stages import cut_of, tied_weights
from fp4train.parallel.tensor import check_division, tensor_cut_of
from fp4train.precision.gather import gather_mode
from fp4train.precision.layers import find_layers
from fp4train.precision.phases import Timeline
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.run.build import build_plan
from fp4train.run.checks import check_cut
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
        train = self.config.train
        gpus = self.gpus or parallel.others * max(1, parallel.dp_shard)
        with user_errors(ValueError, before=f"gpus={gpus}: ", after="; parallel=auto finds a mesh"):
            mesh = parallel.mesh(gpus)
        gather = gather_mode(parallel.gather, fully_gathered=train.whole_weights is not None)
        rows = max(1, train.rows(mesh.data)) * mesh.data
        return replace(mesh, microbatches=max(1, train.batch_size // rows), gather=gather)

    def check(self) -> None:
        """Check that a run begins on the mesh.

        Raises:
            UserError: it does not; the message says what to do.
        """
        mesh = self.mesh
        with user_errors(TypeError, ValueError):
            if mesh.tensor > 1:
                check_division(self.model, tensor_cut_of(self.model, mesh.tensor), mesh.tensor)
            if mesh.pipeline > 1:
                tied_weights(self.model, cut_of(self.model, self.config.parallel))
            check_cut(self.config, mesh)

    def plan(self) -> Plan:
        """The plan of a rank, which has a part of each layer."""
        mesh = self.mesh
        cut = tensor_cut(self.model)
        layers = find_layers(self.model).items()
        parts = {name: cut.part(layer, mesh.tensor) for name, layer in layers}
        device = Device.elsewhere(self.gpu)
        return build_plan(
            self.config, parts, self.timeline, device, mesh.data, stages=mesh.pipeline
        )

    def workload(self, stretch: PlannedStretch) -> Workload:
        """A microbatch of a rank in one stretch of a plan."""
        train = self.config.train
        return Workload(
            model=self.model,
            stretch=stretch,
            sequences=train.rows(self.mesh.data),
            seq_len=train.seq_len,
            compiled=train.compile,
            liger=self.kernels[0],
            states=bytes_per_parameter(self.config, self.model),
        )

    def costs(self, plan: Plan) -> list[ClusterCost]:
        """The cost of every stretch of a plan."""
        recomputed = float(getattr(self.config.model, "recompute", False))
        loads = map(self.workload, plan.stretches)
        return [ClusterCost(load, self.gpu, self.mesh, recomputed) for load in loads]

    def search(self) -> list[ClusterCost]:
        """The meshes of a search that a run begins on, the fastest first, those that fit before
        others.

        Raises:
            UserError: there is none; the message says what to do.
        """
        self._sized(1, Parallel(pp=2)).plan()  # refuses what no mesh can run
        choices = (0.0, 1.0) if hasattr(self.config.model, "recompute") else (0.0,)
        candidates: dict[tuple[int, int], list[MeshPlan]] = {}
        costs: list[ClusterCost] = []
        refused: list[UserError] = []
        for sequences, parallel in self._meshes():
            candidate = self._sized(sequences, parallel)
            with suppress(UserError):
                candidate.check()
                candidates.setdefault((sequences, parallel.tp), []).append(candidate)
        for alike in candidates.values():
            try:
                load = alike[0].workload(alike[0].plan().stretches[0])
            except UserError as error:  # the backend runs no parts of layers
                refused.append(error)
                continue
            for candidate, share in product(alike, choices):
                costs.append(ClusterCost(load, self.gpu, candidate.mesh, share))
        if not costs and refused:
            raise refused[0]
        if not costs:
            raise UserError(
                f"no mesh of gpus={self.mesh.gpus} divides the model's heads and blocks and "
                f"train.batch_size={self.config.train.batch_size}: take a batch that is a multiple "
                "of the number of GPUs"
            )
        return sorted(costs, key=lambda cost: (not cost.fits, cost.seconds, cost.memory.total))

    def _meshes(self) -> Iterator[tuple[int, Parallel]]:
        """(Sequences of a microbatch, sizes of a mesh) of all GPUs that divide the batch."""
        gpus = self.mesh.gpus
        most = (self.gpu.domain, MOST_STAGES, gpus)
        for sequences, tp, pp, shard in product(MICROBATCHES, *(divisors(gpus, m) for m in most)):
            replicas, remainder = divmod(gpus, tp * pp * shard)
            if not remainder and not self.config.train.batch_size % (sequences * replicas * shard):
                yield sequences, Parallel(dp_replicate=replicas, dp_shard=shard, tp=tp, pp=pp)

    def _sized(self, sequences: int, parallel: Parallel) -> Self:
        """This configuration on another mesh, with so many sequences in a microbatch."""
        train = replace(self.config.train, microbatch=sequences)
        return replace(self, gpus=None, config=replace(self.config, train=train, parallel=parallel))
