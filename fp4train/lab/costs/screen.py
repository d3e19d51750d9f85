"""Costs as text or JSON: memory, traffic and seconds of a mesh as one screen, a training step on one GPU as a table.

The rows of a step are the parts of `cluster.py` for a plan, beside the same model in BF16:

GEMMs, quantising          of the linear layers in the blocks
attention                  its products
elementwise                what runs between products: RoPE, SwiGLU, norms, residuals; the embedding
casts, gradient sums       passes over weights and their gradients beside the products (`casts.py`)
GEMMs of the head, loss    the layers outside the blocks, and the cross-entropy of their logits
optimizer                  AdamW, and the norm of the gradients
waiting for the host       how much longer the host takes to queue the kernels than the GPU to run them
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from fp4train.hardware import Device
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.estimate import time_text
from fp4train.lab.costs.links import NETWORK_SHARE, NVLINK_SHARE
from fp4train.lab.costs.memory import USABLE
from fp4train.lab.costs.search import MeshCandidate, MeshPlan
from fp4train.lab.costs.workload import aligned_shard
from fp4train.parallel.config import Mesh
from fp4train.precision import BF16, Timeline
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import Plan
from fp4train.run.build import build_plan
from fp4train.run.produced import ProducedNorms
from fp4train.text import screen, tabulate

_GIB = 2**30


def render_cluster(costs: Sequence[tuple[str, int, ClusterCost]]) -> str:
    """The first stretch in full, then a line for each.

    Args:
        costs: (title, steps, cost) of every stretch of the run.
    """
    title, _, cost = costs[0]
    header = ("", "step", "tokens/s per GPU", "tokens/s", "TFLOP/s per GPU", "MFU (of BF16)")
    misaligned = any(weight.misaligned(cost.mesh) for weight in cost.workload.distinct)
    return screen(
        __package__,
        "cluster.txt",
        {"gib": _gib},
        title=title,
        cost=cost,
        reached=f"{NVLINK_SHARE:.0%} and {NETWORK_SHARE:.0%}",
        stages=", ".join(" and ".join(map(_blocks, held)) for held in cost.workload.shares(cost.mesh)),
        beside=_beside(_memory(cost), _step(cost)),
        collectives=_collectives(cost) if cost.collectives else [],
        aligned=aligned_shard(cost.workload.distinct, cost.mesh) if misaligned else None,
        usable=USABLE * cost.gpu.capacity,
        speeds=tabulate([header, *(_speed(title, each) for title, _, each in costs)]),
        steps=sum(steps for _, steps, _ in costs),
        run=time_text(sum(steps * each.seconds for _, steps, each in costs)),
    )


def _blocks(part: range) -> str:
    return f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0])


def _speed(title: str, cost: ClusterCost) -> tuple[str, ...]:
    tokens = [f"{cost.tokens_per_gpu * gpus:,.0f}" for gpus in (1, cost.mesh.gpus)]
    return title, time_text(cost.seconds), *tokens, f"{cost.flops_per_gpu / 1e12:.0f}", f"{cost.mfu:.0%}"


def _gib(number: float) -> str:
    return f"{number / _GIB:.1f}"


def _memory(cost: ClusterCost) -> list[str]:
    stage = f" (stage {cost.memory.stage})" if cost.mesh.pipeline > 1 else ""
    rows = [(name, _gib(value)) for name, value in cost.memory.parts.items() if value >= 0.05 * _GIB]
    total = ("together", f"{_gib(cost.memory.total)} of {_gib(cost.gpu.capacity)}")
    return tabulate([(f"memory of a rank{stage}", "GiB"), *rows, total])


def _step(cost: ClusterCost) -> list[str]:
    ranked = sorted(cost.parts.items(), key=lambda item: -item[1])
    rows = [(name, time_text(value), f"{value / cost.seconds:.0%}") for name, value in ranked]
    shown, rest = rows[:9], ranked[9:]
    if rest:
        left = sum(value for _, value in rest)
        shown.append(("the rest", time_text(left), f"{left / cost.seconds:.0%}"))
    return tabulate([("a step", "time", "share"), *shown, ("together", time_text(cost.seconds), "")])


def _collectives(cost: ClusterCost) -> list[str]:
    rows = [
        (each.name, each.link, f"{each.sent / 1e9:.3g}", time_text(each.seconds), time_text(each.exposed))
        for each in cost.collectives
    ]
    return tabulate([("collectives of a step, per rank", "link", "GB sent", "time alone", "not hidden"), *rows])


def _beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    width = max(map(len, left)) + 4
    return [f"{a.ljust(width)}{b}".rstrip() for a, b in zip_longest(left, right, fillvalue="")]


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
        "collectives": [dict(vars(each)) for each in cost.collectives],
        "not_coded": {why: dict(names) for why, names in cost.not_coded.items()},
    }


def render_candidates(found: Sequence[MeshCandidate], best: Sequence[MeshCandidate], command: str) -> str:
    """The best meshes of a search, the fastest that do not fit, and the command that asks for the best."""
    gpu = found[0].cost.gpu
    fitting = sum(each.cost.fits for each in found)
    usable = _gib(USABLE * gpu.capacity)
    head = f"{fitting} of {len(found)} meshes fit {found[0].cost.mesh.gpus} {gpu} ({usable} GiB of each usable)"
    rows = [
        (
            " ".join(each.overrides()),
            f"{each.cost.tokens_per_gpu:,.0f}",
            _gib(each.cost.memory.total),
            "" if each.cost.fits else f"does not fit: {_largest(each.cost)}",
        )
        for each in best
    ]
    table = tabulate([("mesh", "tokens/s per GPU", "GiB", ""), *rows])
    if not fitting:
        return "\n".join([head, *table, *_missing(best[0])])
    return "\n".join([head, *table, f"the cheapest: {command}"])


def _missing(least: MeshCandidate) -> list[str]:
    """How much memory the mesh that needs least lacks, and what makes its largest parts smaller."""
    memory = least.cost.memory
    lacks = memory.total - USABLE * least.cost.gpu.capacity
    ranked = sorted(memory.parts.items(), key=lambda item: -item[1])
    halved = memory.parts["moments"] / 2 if least.cost.workload.moment_bytes > 4 else 0.0
    smaller = [f"{name} ({_gib(value)} GiB): {_SMALLER[name]}" for name, value in ranked if name in _SMALLER][:2]
    if halved:
        enough = "which is enough" if halved >= lacks else "which is not enough"
        smaller.append(f"optim.moments=bfloat16 saves {_gib(halved)} GiB, {enough}")
    return [
        f"the mesh that needs least lacks {_gib(lacks)} GiB of each GPU; what takes most, and what helps:",
        *smaller,
    ]


_SMALLER = {
    "weights, float32": "more GPUs, as parallel.dp_shard or parallel.pp",
    "moments": "more GPUs, as parallel.dp_shard or parallel.pp",
    "gradients": "one microbatch, whose gradients are reduced block by block: a smaller train.batch_size; or more "
    "parallel.pp",
    "activations": "model.recompute=true, a smaller train.seq_len or train.microbatch",
    "weights in BF16": "parallel.dp_shard above 1, which frees them after use",
    "unsharded weights": "two blocks and the gradients of one, whatever parallel.dp_shard is: parallel.tp cuts them "
    "where the model allows it; a GPU with more memory",
    "logits and head": "a smaller vocabulary, or parallel.tp",
}
"""Part of a rank's memory → what makes it smaller."""


def _largest(cost: ClusterCost) -> str:
    name, value = max(cost.memory.parts.items(), key=lambda item: item[1])
    return f"{name} {_gib(value)} GiB"


def step_costs(wanted: MeshPlan, plan: Plan, produced: Sequence[ProducedNorms]) -> list[tuple[str, ClusterCost]]:
    """(title, cost of a step) on one GPU: of the model in BF16, then of every stretch of `plan`, whose norms and gates
    quantise what `produced` says."""
    train, layers = wanted.config.train, find_layers(wanted.model)
    sequences = train.batch_size // train.microbatches
    high = build_plan(wanted.config, layers, Timeline(recipe=BF16(), steps=1), Device.elsewhere(wanted.gpu))
    loads = wanted.workloads(high, sequences, wanted.produced(high))
    loads += wanted.workloads(plan, sequences, produced)
    titles = ["all in BF16", *(title for title, _, _ in loads[1:])]
    mesh = Mesh(microbatches=train.microbatches)
    costs = (ClusterCost(load, wanted.gpu, wanted.links, mesh) for _, _, load in loads)
    return list(zip(titles, costs, strict=True))


def render_step(found: Sequence[tuple[str, ClusterCost]], width: int | None = None) -> str:
    """One column per stretch; a stretch that costs what one before it does is left out. `width`: of a line."""
    distinct: dict[tuple[tuple[str, float], ...], tuple[str, ClusterCost]] = {}
    for title, cost in found:
        distinct.setdefault(tuple(cost.parts.items()), (title, cost))
    columns = list(distinct.values())
    names = dict.fromkeys(name for _, cost in reversed(columns) for name in cost.parts)
    rows = [(name, *(_cell(cost, name) for _, cost in columns)) for name in names]
    head = ("where a step goes", *(title.partition(" (")[0] for title, _ in columns))
    ends = [
        ("together", *(time_text(cost.seconds) for _, cost in columns)),
        ("tokens/s", *(f"{cost.tokens_per_gpu:,.0f}" for _, cost in columns)),
        ("queued by the host in", *(time_text(cost.host) for _, cost in columns)),
    ]
    return "\n".join(tabulate([head, *rows, *ends], width=width))


def _cell(cost: ClusterCost, name: str) -> str:
    seconds = cost.parts.get(name, 0.0)
    return f"{time_text(seconds)} ({seconds / cost.seconds:.0%})" if seconds else "-"
