"""A configuration planned on the mesh of GPUs that it asks for. What a run refuses is refused here
in its words.
"""

from dataclasses import dataclass, replace

from torch import nn

from fp4train.config.schema import Config
from fp4train.errors import user_errors
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.workload import Workload
from fp4train.models.common.cut import tensor_cut
from fp4train.parallel.config import Mesh
from fp4train.parallel.experts import check_experts
from fp4train.parallel.sequences import check_sequences
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
        gpus = self.gpus or parallel.others * max(parallel.ep, parallel.dp_shard)
        with user_errors(ValueError, before=f"gpus={gpus}: "):
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
            check_sequences(self.model, mesh.context)
            check_experts(self.model, mesh.expert)
            check_cut(self.config, mesh)

    def plan(self) -> Plan:
        """The plan of a rank, which has a part of each layer."""
        mesh = self.mesh
        cut = tensor_cut(self.model)
        layers = find_layers(self.model).items()
        parts = {name: cut.part(layer, mesh.tensor).shared(mesh.expert) for name, layer in layers}
        device = Device.elsewhere(self.gpu)
        return build_plan(self.config, parts, self.timeline, device, mesh)

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
