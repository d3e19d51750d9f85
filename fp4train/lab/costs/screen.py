"""Costs as text or JSON: memory, traffic and seconds of a mesh as one screen, a training step on
one GPU as a table.

The rows of a step are the parts of `cluster.py` for a plan, beside the same model in BF16:

GEMMs, quantising          of the linear layers in the blocks
attention                  its products
elementwise                what runs between products: RoPE, SwiGLU, norms, residuals; the embedding
casts, gradient sums       passes over weights and their gradients beside the products
GEMMs of the head, loss    the layers outside the blocks, and the cross-entropy of their logits
optimizer                  AdamW, and the norm of the gradients
waiting for the host       how much longer the host takes to queue the kernels than the GPU to run
                           them
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.estimate import time_text
from fp4train.lab.costs.links import NETWORK_SHARE, NVLINK_SHARE
from fp4train.lab.costs.memory import USABLE
from fp4train.lab.costs.mesh_plan import MeshCandidate, MeshPlan
from fp4train.precision import BF16, Timeline
from fp4train.precision.plan import Plan
from fp4train.text import screen, short, tabulate, with_unit

_GIB: Final = 2**30


def render_cluster(costs: Sequence[tuple[str, int, ClusterCost]], width: int | None = None) -> str:
    """The first stretch in full, then a line for each.

    Args:
        costs: (title, steps, cost) of every stretch of the run.
        width: most characters of a line.
    """
    title, _, cost = costs[0]
    shares = cost.workload.shares(cost.mesh)
    return screen(
        __package__,
        "cluster.txt",
        {"gib": _gib, "short": short, "time": time_text, "unit": with_unit},
        costs=costs,
        width=width,
        reached=f"{NVLINK_SHARE:.0%} and {NETWORK_SHARE:.0%}",
        stages=", ".join(" and ".join(map(_blocks, parts)) for parts in shares),
        beside=_beside(_memory(cost), _step_table([(title, cost)], []), width),
        usable=USABLE * cost.gpu.capacity,
    )


def _blocks(part: range) -> str:
    if len(part) > 1:
        return f"{part[0]}–{part[-1]}"
    return str(part[0])


def _gib(number: float) -> str:
    return f"{number / _GIB:.1f}"


def _memory(cost: ClusterCost) -> list[str]:
    if cost.mesh.pipeline > 1:
        stage = f" (stage {cost.memory.stage})"
    else:
        stage = ""
    parts = cost.memory.parts.items()
    rows = [(name, _gib(value)) for name, value in parts if value >= 0.05 * _GIB]
    total = f"{_gib(cost.memory.total)} of {_gib(cost.gpu.capacity)}"
    return tabulate([(f"memory of a rank{stage}", "GiB"), *rows, ("together", total)])


def _beside(left: Sequence[str], right: Sequence[str], width: int | None) -> list[str]:
    """Two tables beside each other, or below each other where lines have no room for both."""
    column = max(map(len, left)) + 4
    if width is not None and column + max(map(len, right)) > width:
        return [*left, "", *right]
    return [f"{a.ljust(column)}{b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]


def cluster_json(title: str, steps: int, cost: ClusterCost) -> dict[str, Any]:
    """One stretch as plain values: seconds, bytes, tokens/s, FLOP/s."""
    return {
        "title": title,
        "steps": steps,
        "gpu": cost.gpu.name,
        "gpus": cost.mesh.gpus,
        "interconnect": cost.links.name,
        "mesh": dict(vars(cost.mesh)),
        "overrides": cost.mesh.overrides(),
        "parameters": cost.workload.parameters,
        "active_parameters": cost.workload.active_parameters,
        "vocabulary": cost.workload.vocabulary,
        "tokens_per_step": cost.tokens,
        "flops_per_token": cost.workload.flops_per_token,
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
        "collectives": [dict(vars(flow)) for flow in cost.collectives],
    }


def render_candidates(
    candidates: Sequence[MeshCandidate],
    shown: Sequence[MeshCandidate],
    command: str,
    width: int | None = None,
) -> str:
    """Meshes of a search, and the command that asks for the best.

    Args:
        candidates: all meshes of the search.
        shown: the best, and the fastest that do not fit.
        width: most characters of a line.
    """
    header = ("mesh", "tokens/s per GPU", "GiB", "")
    rows = [
        (
            " ".join(candidate.overrides()),
            f"{candidate.cost.tokens_per_gpu:,.0f}",
            _gib(candidate.cost.memory.total),
            "" if candidate.cost.fits else f"does not fit: {_largest(candidate.cost, 1)}",
        )
        for candidate in shown
    ]
    cost = shown[0].cost
    return screen(
        __package__,
        "search.txt",
        {"gib": _gib},
        cost=cost,
        fitting=sum(candidate.cost.fits for candidate in candidates),
        tried=len(candidates),
        usable=USABLE * cost.gpu.capacity,
        table=tabulate([header, *rows], right=(1, 2), width=width),
        largest=_largest(cost, 3),
        command=command,
    )


def _largest(cost: ClusterCost, number: int) -> str:
    ranked = sorted(cost.memory.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_gib(size)} GiB" for name, size in ranked[:number])


def step_costs(on_one_gpu: MeshPlan, plan: Plan) -> list[tuple[str, ClusterCost]]:
    """(Title, cost of a step): of the model in BF16, then of every stretch of `plan`."""
    rows = on_one_gpu.config.train.rows(1)
    mesh = on_one_gpu.mesh
    in_bf16 = replace(on_one_gpu, timeline=Timeline(recipe=BF16(), steps=1))
    [(_, steps, load)] = in_bf16.workloads(in_bf16.plan(rows, mesh), rows)
    loads = [("all in BF16", steps, load), *on_one_gpu.workloads(plan, rows)]
    return [(title, ClusterCost(load, on_one_gpu.gpu, mesh)) for title, _, load in loads]


def render_step(costs: Sequence[tuple[str, ClusterCost]], width: int | None = None) -> str:
    """One column per stretch; a stretch that costs what one before it does is left out.

    Args:
        costs: (title, cost) of every stretch.
        width: width of a line.
    """
    distinct: dict[tuple[tuple[str, float], ...], tuple[str, ClusterCost]] = {}
    for title, cost in costs:
        distinct.setdefault(tuple(cost.parts.items()), (title, cost))
    columns = list(distinct.values())
    ends = [
        ("tokens/s", *(f"{cost.tokens_per_gpu:,.0f}" for _, cost in columns)),
        ("queued by the host in", *(time_text(cost.host) for _, cost in columns)),
    ]
    return "\n".join(_step_table(columns, ends, width))


def _step_table(
    columns: Sequence[tuple[str, ClusterCost]],
    ends: Sequence[tuple[str, ...]],
    width: int | None = None,
) -> list[str]:
    """Seconds of a step by what they are spent on, and lines at the end."""
    names = dict.fromkeys(name for _, cost in reversed(columns) for name in cost.parts)
    head = ("where a step goes", *(title.partition(" (")[0] for title, _ in columns))
    rows = [(name, *(_share(cost, name) for _, cost in columns)) for name in names]
    total = ("together", *(time_text(cost.seconds) for _, cost in columns))
    return tabulate([head, *rows, total, *ends], right=range(1, len(head)), width=width)


def _share(cost: ClusterCost, name: str) -> str:
    seconds = cost.parts.get(name, 0.0)
    if seconds:
        return f"{time_text(seconds)} ({seconds / cost.seconds:.0%})"
    return "-"
