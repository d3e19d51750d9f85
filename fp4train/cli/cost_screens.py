"""Estimated costs as text or JSON: memory, traffic and seconds of a mesh as one screen, and where a
training step goes, which is a column per stretch with these rows:

GEMMs, quantising          of the linear layers in the blocks
attention                  its products
elementwise                what runs between products: RoPE, SwiGLU, norms, residuals; the embedding
casts, copies of weights   passes over weights and their gradients beside the products
GEMMs of the head, loss    the layers outside the blocks, and the cross-entropy of their logits
optimizer                  AdamW, and the norm of the gradients
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.links import NETWORK_SHARE, NVLINK_SHARE
from fp4train.lab.costs.mesh_plan import MeshPlan
from fp4train.precision import BF16, Timeline
from fp4train.precision.plan import Plan
from fp4train.precision.report import gathers
from fp4train.run.checks import divided_blocks
from fp4train.text import counted, screen, tabulate, time_text

StretchOnMesh: TypeAlias = tuple[str, int, ClusterCost]
"""(Title, steps, cost) of a stretch of a run."""


def stretch_costs(mesh_plan: MeshPlan, plan: Plan) -> list[StretchOnMesh]:
    """The cost of every stretch of a plan on the mesh that was asked for."""
    return [
        (stretch.title, stretch.stop - stretch.start, cost)
        for stretch, cost in zip(plan.stretches, mesh_plan.costs(plan), strict=True)
    ]


def render_mesh(costs: Sequence[StretchOnMesh], width: int) -> str:
    """What a mesh holds, sends and takes, in lines of `width`."""
    title, _, cost = costs[0]
    memory = {name: _gib(size) for name, size in cost.memory.parts.items()}
    of_capacity = f"{_gib(cost.memory.total)} of {_gib(cost.gpu.capacity)}"
    stage = f" (stage {cost.memory.stage})" if cost.mesh.pipeline > 1 else ""
    left = tabulate(
        [
            (f"memory of a rank{stage}", "GiB"),
            *(part for part in memory.items() if part[1] != "0.0"),
            ("together", of_capacity),
        ]
    )
    right = _step_table([(title, cost)])
    column = max(map(len, left)) + 4
    if column + max(map(len, right)) > width:
        columns = [*left, "", *right]
    else:
        pairs = zip_longest(left, right, fillvalue="")
        columns = [f"{line.ljust(column)}{beside}".rstrip() for line, beside in pairs]
    return screen(
        __package__,
        "mesh.txt",
        gib=_gib,
        costs=costs,
        first_stretch=columns,
        misfit=_misfit(cost),
        reached=f"{NVLINK_SHARE:.0%} and {NETWORK_SHARE:.0%}",
        width=width,
    )


def notes(mesh_plan: MeshPlan, plan: Plan) -> list[str]:
    """How weights are gathered, and which kernels run between the products."""
    mesh = mesh_plan.mesh
    config = mesh_plan.config
    liger, kernels = mesh_plan.kernels
    if mesh.tensor > 1 and liger:
        kernels += " The loss is torch's where ranks share the vocabulary."
    sentences = [divided_blocks(plan), kernels]
    if mesh.weight_ranks > 1:
        layers = [layer for stretch in plan.stretches for layer in stretch.layers.values()]
        whole_weights = config.train.whole_weights
        sent = gathers(
            layers, mesh.weight_ranks, config.parallel.gather, fully_gathered=whole_weights
        )
        sentences.insert(0, sent)
    return list(filter(None, sentences))


def cluster_json(title: str, steps: int, cost: ClusterCost) -> dict[str, Any]:
    """One stretch as plain values: seconds, bytes, tokens/s, FLOP/s."""
    load = cost.workload
    return {
        "title": title,
        "steps": steps,
        "gpu": cost.gpu.name,
        "gpus": cost.mesh.gpus,
        "interconnect": cost.gpu.machine,
        "mesh": dict(vars(cost.mesh)),
        "parameters": load.parameters,
        "active_parameters": load.active_parameters,
        "vocabulary": load.vocabulary,
        "tokens_per_step": cost.tokens,
        "flops_per_token": load.flops_per_token,
        "step_seconds": cost.seconds,
        "tokens_per_second_per_gpu": cost.tokens_per_gpu,
        "flops_per_second_per_gpu": cost.flops_per_gpu,
        "mfu": cost.mfu,
        "bubble": cost.mesh.bubble,
        "fits": cost.fits,
        "memory_bytes": dict(cost.memory.parts),
        "memory_bytes_total": cost.memory.total,
        "host_bytes": cost.memory.host,
        "seconds": dict(cost.parts),
        "collectives": [
            {key: getattr(flow, key) for key in ("name", "link", "sent", "seconds", "exposed")}
            for flow in cost.collectives
        ],
    }


def render_step(on_one_gpu: MeshPlan, plan: Plan, width: int) -> str:
    """Where a step of the model goes in BF16, and in every stretch of `plan`; a stretch that costs
    what one before it does is left out. Below, the time of all steps.
    """
    in_bf16 = replace(on_one_gpu, timeline=Timeline(recipe=BF16(), steps=1))
    of_stretches = on_one_gpu.costs(plan)
    costs = in_bf16.costs(in_bf16.plan()) + of_stretches
    numbers = [stretch.stop - stretch.start for stretch in plan.stretches]
    steps = sum(numbers)
    seconds = sum(n * cost.seconds for n, cost in zip(numbers, of_stretches, strict=True))
    titles = ("all in BF16", *(stretch.title for stretch in plan.stretches))
    columns: dict[object, tuple[str, ClusterCost]] = {}
    for title, cost in zip(titles, costs, strict=True):
        columns.setdefault(tuple(cost.parts.items()), (title, cost))
    speeds = ("tokens/s", *(f"{cost.tokens_per_gpu:,.0f}" for _, cost in columns.values()))
    whole_run = (
        f"the whole run, {counted(steps, 'step')}: {time_text(seconds)}; "
        f"all in BF16 {time_text(steps * costs[0].seconds)}"
    )
    table = _step_table([*columns.values()], speeds, width=width)
    return "\n".join([*table, "", whole_run, _misfit(of_stretches[0])]).rstrip()


def _misfit(cost: ClusterCost) -> str:
    """Whether a rank needs more memory than its GPU has; empty: no."""
    if cost.fits:
        return ""
    return (
        f"does not fit: {_gib(cost.memory.total)} GiB of {_gib(cost.usable)} usable on {cost.gpu}: "
        "more GPUs or stages, model.recompute=true and optim.moments=bfloat16 take less"
    )


def _step_table(
    columns: Sequence[tuple[str, ClusterCost]],
    *last_lines: tuple[str, ...],
    width: int | None = None,
) -> list[str]:
    """Seconds of a step by what they are spent on."""
    names = dict.fromkeys(name for _, cost in reversed(columns) for name in cost.parts)
    head = ("where a step goes", *(title.partition(" (")[0] for title, _ in columns))
    rows = [(name, *(_share(cost, name) for _, cost in columns)) for name in names]
    total = ("together", *(time_text(cost.seconds) for _, cost in columns))
    return tabulate([head, *rows, total, *last_lines], right=range(1, len(head)), width=width)


def _share(cost: ClusterCost, name: str) -> str:
    if name not in cost.parts:
        return "-"
    seconds = cost.parts[name]
    return f"{time_text(seconds)} ({seconds / cost.seconds:.0%})"


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f}"
