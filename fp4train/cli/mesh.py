"""The mesh that `fp4train plan` is asked for, and what it will hold, send and cost: keys `gpus` and `parallel`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from fp4train.config.overrides import Option
from fp4train.errors import UserError
from fp4train.parallel.config import MOST_RANKS, REST, Mesh, Parallel

if TYPE_CHECKING:
    from torch import nn

    from fp4train.config.schema import Config
    from fp4train.hardware import Gpu
    from fp4train.lab.costs.cluster import ClusterCost
    from fp4train.lab.costs.search import MeshCandidate
    from fp4train.lab.costs.workload import Workload
    from fp4train.precision.phases import Timeline
    from fp4train.precision.plan import Plan

AUTO = "parallel=auto"
KEYS = tuple(f"parallel.{f.name}" for f in fields(Parallel) if f.name not in ("amax", "timeout"))
"""Keys of section `parallel` that a plan depends on."""


def _gpus(text: str) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    if number > MOST_RANKS:
        raise UserError(f"gpus={text} is more than {MOST_RANKS}")
    if number < 1:
        raise UserError(f"gpus={text} must be at least 1")
    return number


OPTIONS = {
    "gpus": Option(_gpus, "gpus={} must be a whole number"),
    "parallel": Option(
        lambda text: text.lower() == "auto" or None,
        "parallel={}: parallel takes auto, or sizes by key: " + ", ".join(KEYS),
    ),
}


def asks_for_mesh(parallel: Parallel, gpus: int | None, auto: bool | None, named: Collection[str]) -> bool:
    """Whether a command, which gives the keys `named`, or its configuration asks for a mesh.

    Raises:
        UserError: the mesh is to be proposed (auto), of no number of GPUs or with sizes that are given.
    """
    sizes = [key for key in KEYS if key in named]
    if auto and gpus is None:
        raise UserError(f"{AUTO} needs the number of GPUs: gpus=N")
    if auto and sizes:
        raise UserError(f"{AUTO} chooses the mesh itself: leave {', '.join(sizes)} out")
    names = [key.removeprefix("parallel.") for key in KEYS]
    return gpus is not None or bool(sizes) or any(getattr(parallel, n) != getattr(Parallel(), n) for n in names)


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
        from fp4train.lab.costs.links import interconnect

        self.config = replace(config, parallel=Parallel()) if auto else config
        self.gpus, self.model, self.timeline, self.gpu = gpus, model, timeline, gpu
        self.links = interconnect(gpu)
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
        from fp4train.precision.gather import effective

        parallel, others = self.config.parallel, self.config.parallel.others
        gpus = self.gpus or others * max(1, parallel.dp_shard)
        shard = max(1, gpus // others) if parallel.dp_shard == REST else parallel.dp_shard
        if others * shard != gpus:
            factors = f"dp_replicate {parallel.dp_replicate} × dp_shard {shard} × tp {parallel.tp} × pp {parallel.pp}"
            instead = f"dp_replicate × tp × pp must divide it, {AUTO} finds a mesh"
            if gpus % others == 0:
                instead = f"parallel.dp_shard={gpus // others} fills it, or gpus={others * max(1, parallel.dp_shard)}"
            raise UserError(f"gpus={gpus} is not {factors} = {others * shard}: {instead}")
        gather = effective(parallel.gather, compiled=self.config.train.compile)
        return replace(parallel.mesh(gpus), microbatches=microbatches, gather=gather)

    def plan(self, sequences: int, tensors: int, stages: int = 1) -> Plan:
        """The plan of a rank of the run with microbatches of so many sequences, on so many tensor-parallel ranks."""
        from fp4train.hardware import Device
        from fp4train.lab.costs.workload import row_wise
        from fp4train.precision.layers import find_layers
        from fp4train.run.build import build_plan

        config = replace(self.config, train=replace(self.config.train, batch_size=sequences, microbatch=sequences))
        layers, rows = find_layers(self.model), row_wise(self.model)
        parts = {name: layer.part("in" if name in rows else "out", tensors) for name, layer in layers.items()}
        return build_plan(config, parts, self.timeline, Device.elsewhere(self.gpu), stages=stages)

    def workloads(self, plan: Plan, sequences: int) -> list[tuple[str, int, Workload]]:
        """(title, steps, workload) of every stretch of the run."""
        from fp4train.lab.costs.workload import workload
        from fp4train.precision.layers import find_layers

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
                    recomputed=recomputed,
                ),
            )
            for stretch in plan.stretches
        ]

    def costs(self) -> tuple[Plan, list[tuple[str, int, ClusterCost]]]:
        """The plan, and the cost of every stretch on the mesh that was asked for.

        Raises:
            UserError: the mesh cannot be; the message says what to do.
        """
        from fp4train.lab.costs.cluster import cluster_cost
        from fp4train.lab.costs.search import batch_problem, problems
        from fp4train.lab.costs.workload import find_weights
        from fp4train.precision.report import gathers
        from fp4train.run.checks import check_oscillation, divided_blocks

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
        plan = self.plan(sequences, mesh.tensor, stages=mesh.pipeline)
        check_oscillation(self.config, plan)
        if mesh.shard > 1:
            layers = (layer for stretch in plan.stretches for layer in stretch.layers.values())
            self.notes.append(
                gathers(layers, mesh.shard, self.config.parallel.gather, compiled=self.config.train.compile)
            )
        self.notes += filter(None, [divided_blocks(plan)])
        loads = self.workloads(plan, sequences)
        return plan, [(title, n, cluster_cost(load, self.gpu, self.links, mesh)) for title, n, load in loads]

    def check(self, mesh: Mesh, batch: int, sequences: int) -> None:
        """Raises UserError where a run with microbatches of so many sequences does not begin on `mesh`."""
        from fp4train.parallel.stages import cut_of, tied_weights
        from fp4train.parallel.tensor import tensor_cut_of
        from fp4train.run.checks import check_cut

        parallel = replace(self.config.parallel, tp=mesh.tensor, pp=mesh.pipeline)
        train = replace(self.config.train, batch_size=batch, microbatch=sequences)
        check_cut(replace(self.config, train=train, parallel=parallel), mesh)
        try:
            if mesh.tensor > 1:
                tensor_cut_of(self.model, mesh.tensor)
            if mesh.pipeline > 1:
                tied_weights(self.model, cut_of(self.model, parallel))
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error

    def search(self) -> tuple[list[MeshCandidate], int]:
        """Every mesh, the best first, and the batch they are compared with."""
        from fp4train.lab.costs.search import candidates

        assert self.gpus is not None
        # It also tries meshes with tensor parallelism and pipelines.
        self.plan(1, 1, stages=2)
        batch = self.config.train.batch_size
        if not self._batch_given:
            batch = self.gpus
            self.notes.append(f"train.batch_size is not given: meshes are compared with {batch} sequences, one per GPU")

        @lru_cache
        def load(sequences: int, tensors: int) -> Workload | None:
            try:
                plan = self.plan(sequences, tensors)
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
            return load(sequences, mesh.tensor)

        like = self.mesh()
        if like.gather != self.config.parallel.gather:
            self.notes.append("train.compile takes float32 weights: they are not gathered as codes")
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
