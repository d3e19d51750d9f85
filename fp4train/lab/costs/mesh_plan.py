"""A configuration planned on a mesh: the mesh that it asks for, or the cheapest that fits."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache

from torch import nn

from fp4train.config.schema import Config
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import interconnect
from fp4train.lab.costs.search import MeshCandidate, candidates
from fp4train.lab.costs.workload import Execution, Workload, workload
from fp4train.models.common.cut import tensor_cut
from fp4train.parallel.config import REST, Mesh, Parallel
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

SMALL_SEQ_LEN = 512
"""Tokens of a sequence up to which the default, which no large model trains at, is pointed out."""


class MeshPlan:
    """A configuration planned on the mesh of its section `parallel`, or with `auto` on the
    cheapest.

    Args:
        gpus: number of GPUs; None: the product of the sizes in that section.
        named: configuration keys that the command line sets; the batch and its length have defaults
            for a laptop.
    """

    def __init__(
        self,
        config: Config,
        gpus: int | None,
        auto: bool | None,
        model: nn.Module,
        timeline: Timeline,
        gpu: Gpu,
        named: Collection[str],
    ) -> None:
        if auto:
            self.config = replace(config, parallel=Parallel())
        else:
            self.config = config
        self.gpus = gpus
        self.model = model
        self.timeline = timeline
        self.gpu = gpu
        self.links = interconnect(gpu)
        self.kernels = kernels_of(config.train, "cuda", elsewhere=True)
        """Whether Liger's kernels run what lies between the products, and a sentence that says
        so.
        """
        self.notes: list[str] = []
        self._batch_named = "train.batch_size" in named
        if "train.seq_len" not in named and config.train.seq_len <= SMALL_SEQ_LEN:
            self.notes.append(
                f"train.seq_len={config.train.seq_len} is the default; large models train at "
                "4096 and more"
            )

    def mesh(self, microbatches: int = 1) -> Mesh:
        """The mesh that was asked for; weights are gathered as the run would gather them.

        Raises:
            UserError: its size is not the number of GPUs.
        """
        parallel = self.config.parallel
        other_ranks = parallel.others
        gpus = self.gpus or other_ranks * max(1, parallel.dp_shard)
        if parallel.dp_shard == REST:
            shard = max(1, gpus // other_ranks)
        else:
            shard = parallel.dp_shard
        if other_ranks * shard != gpus:
            factors = (
                f"dp_replicate {parallel.dp_replicate} × dp_shard {shard} × tp {parallel.tp} × "
                f"pp {parallel.pp}"
            )
            instead = "dp_replicate × tp × pp must divide it, parallel=auto finds a mesh"
            if gpus % other_ranks == 0:
                fitting = other_ranks * max(1, parallel.dp_shard)
                instead = f"parallel.dp_shard={gpus // other_ranks} fills it, or gpus={fitting}"
            raise UserError(f"gpus={gpus} is not {factors} = {other_ranks * shard}: {instead}")
        takes_float32 = self.config.train.whole_weights is not None
        gather = gather_mode(parallel.gather, fully_gathered=takes_float32)
        return replace(parallel.mesh(gpus), microbatches=microbatches, gather=gather)

    def plan(self, sequences: int, tensors: int, stages: int = 1, data_ranks: int = 1) -> Plan:
        """The plan of a rank with microbatches of so many sequences, on so many tensor-parallel
        ranks.
        """
        train = replace(self.config.train, batch_size=sequences, microbatch=sequences)
        parallel = replace(self.config.parallel, tp=tensors)
        config = replace(self.config, train=train, parallel=parallel)
        cut = tensor_cut(self.model)
        parts = {
            name: layer.part(
                "in" if name in cut.in_ else "out", tensors, cut.segments.get(name, ())
            )
            for name, layer in find_layers(self.model).items()
        }
        device = Device.elsewhere(self.gpu)
        return build_plan(config, parts, self.timeline, device, data_ranks, stages=stages)

    @property
    def execution(self) -> Execution:
        """How the run executes the model."""
        train = self.config.train
        return Execution(
            compiled=train.compile,
            recorded=train.cuda_graph,
            recomputed=float(getattr(self.config.model, "recompute", False)),
            states=bytes_per_parameter(self.config),
            liger=self.kernels[0],
        )

    def workloads(self, plan: Plan, sequences: int) -> list[tuple[str, int, Workload]]:
        """(Title, steps, workload) of every stretch of the run."""
        uncut = find_layers(self.model)
        loads = []
        for stretch in plan.stretches:
            load = workload(
                self.model,
                {name: replace(plan, layer=uncut[name]) for name, plan in stretch.layers.items()},
                stretch.recipe,
                sequences=sequences,
                seq_len=self.config.train.seq_len,
                execution=self.execution,
            )
            loads.append((stretch.title, stretch.stop - stretch.start, load))
        return loads

    def costs(self) -> tuple[Plan, list[tuple[str, int, ClusterCost]]]:
        """The plan, and the cost of every stretch on the mesh that was asked for.

        Raises:
            UserError: the mesh cannot be; the message says what to do.
        """
        mesh = self.mesh()
        batch, sequences = self._batch(mesh)
        self.check(mesh, batch, sequences)
        mesh = self.mesh(batch // mesh.data // sequences)
        plan = self.plan(sequences, mesh.tensor, stages=mesh.pipeline, data_ranks=mesh.data)
        check_oscillation(self.config, plan)
        self._note(plan, mesh)
        return plan, [
            (title, steps, ClusterCost(load, self.gpu, self.links, mesh))
            for title, steps, load in self.workloads(plan, sequences)
        ]

    def _batch(self, mesh: Mesh) -> tuple[int, int]:
        """(Sequences of a step, sequences of a microbatch) on a mesh, which may not divide them."""
        train = self.config.train
        batch = train.batch_size
        if not self._batch_named and batch % (mesh.data * mesh.pipeline):
            batch = mesh.data * mesh.pipeline
            self.notes.append(
                f"train.batch_size={train.batch_size}, the default, does not divide over "
                f"{mesh.data} data ranks: planned with train.batch_size={batch}"
            )
        if train.microbatch is not None:
            return batch, train.microbatch
        local = max(1, batch // mesh.data)
        if mesh.pipeline == 1:
            return batch, local
        sequences = max(1, local // (4 * mesh.pipeline))
        while local % sequences:
            sequences -= 1
        self.notes.append(
            f"train.microbatch is not given: planned with train.microbatch={sequences}, because a "
            "pipeline needs several microbatches"
        )
        return batch, sequences

    def _note(self, plan: Plan, mesh: Mesh) -> None:
        """Note how weights are gathered, and which kernels run between the products."""
        if mesh.shard > 1:
            layers = [layer for stretch in plan.stretches for layer in stretch.layers.values()]
            reader = self.config.train.whole_weights
            gather = self.config.parallel.gather
            self.notes.append(gathers(layers, mesh.shard, gather, fully_gathered=reader))
        liger, sentence = self.kernels
        if mesh.tensor > 1 and liger:
            sentence += " The loss is torch's where ranks share the vocabulary."
        self.notes += filter(None, [divided_blocks(plan), sentence])

    def check(self, mesh: Mesh, batch: int, sequences: int) -> None:
        """Check that a run with microbatches of so many sequences begins on `mesh`.

        Raises:
            UserError: it does not.
        """
        parallel = replace(self.config.parallel, tp=mesh.tensor, pp=mesh.pipeline)
        with user_errors(TypeError, ValueError):
            if mesh.tensor > 1:
                check_division(self.model, tensor_cut_of(self.model, mesh.tensor), mesh.tensor)
            train = replace(self.config.train, batch_size=batch, microbatch=sequences)
            check_cut(replace(self.config, train=train, parallel=parallel), mesh)
            if mesh.pipeline > 1:
                tied_weights(self.model, cut_of(self.model, parallel))

    def search(self) -> tuple[list[MeshCandidate], int]:
        """Every mesh, the best first, and the batch they are compared with.

        Raises:
            UserError: there is none; the message says what to do.
        """
        assert self.gpus is not None
        self.plan(1, 1, stages=2)  # refuses what no mesh can run
        batch = self.config.train.batch_size
        if not self._batch_named:
            batch = self.gpus
            self.notes.append(
                f"train.batch_size is not given: meshes are compared with {batch} sequences, "
                "one per GPU"
            )
        like = self.mesh()
        if like.gather != self.config.parallel.gather:
            why = self.config.train.whole_weights
            self.notes.append(f"{why} takes float32 weights: they are not gathered as codes")
        ranked = candidates(
            self._measure(batch),
            self.gpu,
            self.links,
            gpus=self.gpus,
            batch=batch,
            like=like,
            recompute=(False, True) if hasattr(self.config.model, "recompute") else (False,),
        )
        if not ranked:
            raise UserError(
                f"no mesh of gpus={self.gpus} divides the model's heads and blocks and "
                f"train.batch_size={batch}: take a batch that is a multiple of the number of GPUs"
            )
        return ranked, batch

    def _measure(self, batch: int) -> Callable[[int, Mesh], Workload | None]:
        """The workload of so many sequences on a mesh; None where the run does not begin."""

        @lru_cache
        def load(sequences: int, tensors: int, data_ranks: int) -> Workload | None:
            try:
                plan = self.plan(sequences, tensors, data_ranks=data_ranks)
            except UserError:
                if tensors == 1:
                    raise
                return None  # the named backend runs no parts of layers
            return self.workloads(plan, sequences)[0][2]

        def measure(sequences: int, mesh: Mesh) -> Workload | None:
            try:
                self.check(mesh, batch, sequences)
            except UserError:
                return None
            return load(sequences, mesh.tensor, min(mesh.data, 2))

        return measure
