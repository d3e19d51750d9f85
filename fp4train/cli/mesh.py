"""The mesh that `fp4train plan` is asked for, and what it will hold, send and cost: keys `gpus` and `parallel`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from fp4train.errors import UserError
from fp4train.lab.costs.mesh import GATHERS, Mesh
from fp4train.parallel.config import REDUCES, SCHEDULES, Parallel, why_absent
from fp4train.text import check_choice, near_miss

if TYPE_CHECKING:
    from torch import nn

    from fp4train.config.schema import Config
    from fp4train.hardware import Gpu
    from fp4train.lab.costs.cluster import ClusterCost
    from fp4train.lab.costs.search import Candidate
    from fp4train.lab.costs.workload import Workload
    from fp4train.precision.phases import Timeline
    from fp4train.precision.plan import Plan

AUTO = "parallel=auto"
MOST_RANKS = 1 << 20
"""A number of ranks beyond this is a slip of the hand."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command says about the mesh; the names are those of section `parallel`.

    Args:
        gpus: number of GPUs; None: the product of the sizes.
        dp_shard: -1: all GPUs that the others leave.
        reduce: what shards send each other of gradients.
        auto: propose a mesh.
        given: the keys of the command line.
    """

    gpus: int | None = None
    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    sp: bool = True
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_chunks: int = 2
    gather: str = "recipe"
    reduce: str = "float32"
    auto: bool = False
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "tp", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name}={getattr(self, name)} must be at least 1")
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ValueError(f"parallel.dp_shard={self.dp_shard} must be at least 1, or -1 for all that are left")
        if self.gpus is not None and self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        check_choice("parallel.pp_schedule", self.pp_schedule, SCHEDULES)
        if self.pp_chunks < 2:
            raise ValueError(f"parallel.pp_chunks={self.pp_chunks} must be at least 2")
        check_choice("parallel.gather", self.gather, GATHERS)
        check_choice("parallel.reduce", self.reduce, REDUCES)
        if self.auto and self.gpus is None:
            raise ValueError(f"{AUTO} needs the number of GPUs: gpus=N")
        if self.auto and (sizes := [key for key in self.given if key.startswith("parallel.")]):
            raise ValueError(f"{AUTO} chooses the mesh itself: leave {', '.join(sizes)} out")

    def mesh(self, microbatches: int = 1) -> Mesh:
        """The sizes, with what is left filled in.

        Raises:
            ValueError: their product is not the number of GPUs.
        """
        others = self.dp_replicate * self.tp * self.pp
        shard = self.dp_shard
        if shard == -1:
            shard = 1 if self.gpus is None else max(1, self.gpus // others)
        if self.gpus is not None and others * shard != self.gpus:
            factors = f"dp_replicate {self.dp_replicate} × dp_shard {shard} × tp {self.tp} × pp {self.pp}"
            raise ValueError(f"gpus={self.gpus} is not {factors} = {others * shard}: {self._instead(others)}")
        return Mesh(
            replicate=self.dp_replicate,
            shard=shard,
            tensor=self.tp,
            sequence=self.sp,
            pipeline=self.pp,
            virtual=self.pp_chunks if self.pp > 1 and self.pp_schedule == "interleaved" else 1,
            forward_first=self.pp > 1 and self.pp_schedule == "gpipe",
            microbatches=microbatches,
            gather=self.gather,
            codes=True,
            reduce_bytes=4 if self.reduce == "float32" else 2,
        )

    def _instead(self, others: int) -> str:
        assert self.gpus is not None
        if self.gpus % others == 0:
            return f"parallel.dp_shard={self.gpus // others} fills it, or gpus={others * max(1, self.dp_shard)}"
        return f"dp_replicate × tp × pp must divide it, {AUTO} finds a mesh"


_OTHERS = tuple(f.name for f in fields(Parallel))
"""Keys of section `parallel` that a plan leaves to the configuration."""

_MESH_KEYS = {f.name: f.type for f in fields(Asked) if f.name not in ("gpus", "auto", "given")}


def parse(arguments: list[str]) -> tuple[Asked | None, list[str]]:
    """(what the command asks for, None for one GPU; the arguments that are left).

    Raises:
        UserError: a value that does not fit its key.
    """
    found: dict[str, object] = {}
    given, rest = [], []
    for argument in arguments:
        key, _, value = argument.partition("=")
        name = key.removeprefix("parallel.")
        if argument.lower() == AUTO:
            found["auto"] = True
        elif key == "parallel":
            raise UserError(f"{argument}: parallel takes auto, or sizes by key: {_listed()}")
        elif key == "gpus":
            found["gpus"] = _number(key, value)
        elif key.startswith("parallel.") and name in _MESH_KEYS:
            found[name] = _value(key, _MESH_KEYS[name], value)
            given.append(key)
        elif key.startswith("parallel.") and name not in _OTHERS:
            reason = why_absent(name)
            said = f": {reason}" if reason else f"{near_miss(name, _MESH_KEYS)}; allowed: {_listed()}"
            raise UserError(f"unknown key {key!r}{said}")
        else:
            rest.append(argument)
    if not found:
        return None, rest
    try:
        return Asked(**found, given=tuple(given)), rest  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(str(error)) from error


def as_configured(asked: Asked | None, parallel: Parallel) -> Asked | None:
    """What the command asks for, over what the configuration says; None if neither asks for several ranks.

    Raises:
        UserError: a value of the configuration that a plan does not know.
    """
    here = asked or Asked()
    if here.auto:
        return here
    values = {
        name: getattr(parallel, name) for name in _MESH_KEYS if name in _OTHERS and f"parallel.{name}" not in here.given
    }
    try:
        found = replace(here, **values)
    except ValueError as error:
        raise UserError(str(error)) from error
    return None if asked is None and found == here else found


def _listed() -> str:
    return ", ".join(f"parallel.{name}" for name in _MESH_KEYS)


def _value(key: str, kind: object, value: str) -> object:
    if kind == "int":
        return _number(key, value)
    if kind == "bool":
        if value.lower() not in ("true", "false"):
            raise UserError(f"{key}={value} must be true or false")
        return value.lower() == "true"
    return value


def _number(key: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise UserError(f"{key}={value} must be a whole number") from None
    if abs(number) > MOST_RANKS:
        raise UserError(f"{key}={value} is more than {MOST_RANKS}")
    return number


class MeshPlan:
    """A configuration planned on a mesh.

    Args:
        given: configuration keys that the command line sets; the batch and its length have defaults for a laptop.
    """

    def __init__(
        self, config: Config, asked: Asked, model: nn.Module, timeline: Timeline, gpu: Gpu, given: list[str]
    ) -> None:
        from fp4train.lab.costs.links import interconnect

        self.config, self.asked, self.model, self.timeline, self.gpu = config, asked, model, timeline, gpu
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
            ValueError: its size is not the number of GPUs.
        """
        return replace(self.asked.mesh(microbatches), gather=self._gather(self.asked.gather))

    def _gather(self, gather: str) -> str:
        from fp4train.precision.gather import effective

        return effective(gather, compiled=self.config.train.compile)

    def plan(self, sequences: int, tensors: int) -> Plan:
        """The plan of a rank of the run with microbatches of so many sequences, on so many tensor-parallel ranks."""
        from fp4train.hardware import Device
        from fp4train.lab.costs.shards import row_wise
        from fp4train.precision.layers import find_layers
        from fp4train.run.build import build_plan

        config = replace(self.config, train=replace(self.config.train, batch_size=sequences, microbatch=sequences))
        layers, rows = find_layers(self.model), row_wise(self.model)
        parts = {name: layer.part("in" if name in rows else "out", tensors) for name, layer in layers.items()}
        return build_plan(config, parts, self.timeline, Device.elsewhere(self.gpu))

    def gathers(self, plan: Plan, mesh: Mesh) -> list[str]:
        """What the ranks send each other of the weights, in words; empty where no rank shares them."""
        from fp4train.precision.report import gathers

        layers = (layer for stretch in plan.stretches for layer in stretch.layers.values())
        compiled = self.config.train.compile
        return [gathers(layers, mesh.shard, self.asked.gather, compiled=compiled)] if mesh.shard > 1 else []

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
        from fp4train.lab.costs.fit import batch_problem, problems
        from fp4train.lab.costs.shards import find_weights
        from fp4train.run.checks import check_oscillation, divided_blocks
        from fp4train.run.outliers import check_outliers

        try:
            mesh = self.mesh()
        except ValueError as error:
            raise UserError(str(error)) from error
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
        plan = self.plan(sequences, mesh.tensor)
        check_outliers(plan, stages=mesh.pipeline, tensors=mesh.tensor)
        check_oscillation(self.config, plan)
        self.notes += [*self.gathers(plan, mesh), *filter(None, [divided_blocks(plan)])]
        loads = self.workloads(plan, sequences)
        return plan, [(title, n, cluster_cost(load, self.gpu, self.links, mesh)) for title, n, load in loads]

    def check(self, mesh: Mesh, batch: int, sequences: int) -> None:
        """Raises UserError where a run with microbatches of so many sequences does not begin on `mesh`."""
        from fp4train.parallel.stages import cut_of, tied_weights
        from fp4train.parallel.tensor import tensor_cut_of
        from fp4train.run.checks import Sizes, check_cut

        order = replace(self.config.parallel, pp_schedule=self.asked.pp_schedule, pp_chunks=self.asked.pp_chunks)
        parallel = replace(order, sp=mesh.sequence, tp=mesh.tensor, pp=mesh.pipeline)
        train = replace(self.config.train, batch_size=batch, microbatch=sequences)
        sizes = Sizes(data=mesh.data, shards=mesh.shard, tensors=mesh.tensor, stages=mesh.pipeline)
        check_cut(replace(self.config, train=train, parallel=parallel), sizes)
        try:
            if mesh.tensor > 1:
                tensor_cut_of(self.model, mesh.tensor)
            if mesh.pipeline > 1:
                tied_weights(self.model, cut_of(self.model, parallel))
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error

    def search(self) -> tuple[list[Candidate], int]:
        """Every mesh, the best first, and the batch they are compared with."""
        from fp4train.lab.costs.search import candidates
        from fp4train.run.outliers import check_outliers

        assert self.asked.gpus is not None
        # It also tries meshes with tensor parallelism and pipelines.
        check_outliers(self.plan(1, 1), stages=2, tensors=2)
        batch = self.config.train.batch_size
        if not self._batch_given:
            batch = self.asked.gpus
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

        gather = self._gather(Asked().gather)
        if gather != Asked().gather:
            self.notes.append("train.compile takes float32 weights: they are not gathered as codes")
        choices = (False, True) if hasattr(self.config.model, "recompute") else (False,)
        found = candidates(
            self.model,
            measure,
            self.gpu,
            self.links,
            gpus=self.asked.gpus,
            batch=batch,
            like=replace(Asked().mesh(), gather=gather),
            recompute=choices,
        )
        if not found:
            raise UserError(
                f"no mesh of gpus={self.asked.gpus} divides the model's heads and blocks and train.batch_size={batch}: "
                "take a batch that is a multiple of the number of GPUs"
            )
        return found, batch


def as_json(value: object) -> str:
    """JSON of plain values."""
    return json.dumps(value, indent=2, ensure_ascii=False)
