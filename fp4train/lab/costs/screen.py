"""Costs as text or JSON: memory, traffic and seconds of a mesh as one screen, a training step on
one GPU as a table.

The rows of a step are the parts of `cluster.py` for a plan, beside the same model in BF16:

GEMMs, quantising          of the linear layers in the blocks
attention                  its products
elementwise                what runs between products: RoPE, SwiGLU, norms, residuals; the embedding
casts, copies of weights   passes over weights and their gradients beside the products
GEMMs of the head, loss    the layers outside the blocks, and the cross-entropy of their logits
optimizer                  AdamW, and the norm of the gradients
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, Final

from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.estimate import time_text
from fp4train.lab.costs.links import NETWORK_SHARE, NVLINK_SHARE
from fp4train.lab.costs.mesh_plan import MeshPlan
from fp4train.precision import BF16, Timeline
from fp4train.precision.plan import Plan
from fp4train.text import screen, short, tabulate, with_unit


def show(template: str, width: int | None = None, **values: object) -> str:
    """A screen of this folder, in lines of `width`: cluster.txt of (title, steps, cost) of the
    `costs` of every stretch of a run; search.txt of all `costs` of a search, those that are
    `shown`, and the `command` that asks for the best.
    """
    values["reached"] = f"{NVLINK_SHARE:.0%} and {NETWORK_SHARE:.0%}"
    values["beside"] = partial(_beside, width=width)
    values["step_table"] = _step_table
    return screen(__package__, template, _FILTERS, width=width, **values)


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
        "interconnect": cost.gpu.machine,
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
        "collectives": [
            {key: getattr(flow, key) for key in ("name", "link", "sent", "seconds", "exposed")}
            for flow in cost.collectives
        ],
    }


def _largest(cost: ClusterCost, number: int) -> str:
    ranked = sorted(cost.memory.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_gib(size)} GiB" for name, size in ranked[:number])


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f}"


_FILTERS: Final[Mapping[str, Callable[..., str]]] = {
    "gib": _gib,
    "largest": _largest,
    "short": short,
    "time": time_text,
    "unit": with_unit,
}


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
    speeds = ("tokens/s", *(f"{cost.tokens_per_gpu:,.0f}" for _, cost in columns))
    return "\n".join(_step_table(columns, speeds, width=width))


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
