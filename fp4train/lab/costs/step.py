"""The time of a training step on one GPU: the parts of `cluster.py` for a plan, beside the same model in BF16.

GEMMs, quantising          of the linear layers in the blocks
casts of weights           float32 weights read and written in BF16, once per step, where no GEMM is quantised
attention                  its products
elementwise                what runs between products in a block: RoPE, SwiGLU, norms, residuals
GEMMs of the head, loss    the layers outside the blocks, and the cross-entropy of their logits
optimizer                  AdamW, and the norm of the gradients
waiting for the host       how much longer the host takes to queue the kernels than the GPU to run them
"""

from collections.abc import Sequence

from fp4train.hardware import Device
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.estimate import time_text
from fp4train.lab.costs.search import MeshPlan
from fp4train.parallel.config import Mesh
from fp4train.precision import BF16, Timeline
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import Plan
from fp4train.run.build import build_plan
from fp4train.text import tabulate


def step_costs(wanted: MeshPlan, plan: Plan) -> list[tuple[str, ClusterCost]]:
    """(title, cost of a step) on one GPU: of the model in BF16, then of every stretch of `plan`."""
    train, layers = wanted.config.train, find_layers(wanted.model)
    sequences = train.batch_size // train.microbatches
    high = build_plan(wanted.config, layers, Timeline(recipe=BF16(), steps=1), Device.elsewhere(wanted.gpu))
    loads = [*wanted.workloads(high, sequences), *wanted.workloads(plan, sequences)]
    titles = ["all in BF16", *(title for title, _, _ in loads[1:])]
    mesh = Mesh(microbatches=train.microbatches)
    costs = (ClusterCost(load, wanted.gpu, wanted.links, mesh) for _, _, load in loads)
    return list(zip(titles, costs, strict=True))


def render_step(found: Sequence[tuple[str, ClusterCost]]) -> str:
    """One column per stretch; a stretch that costs what one before it does is left out."""
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
    return "\n".join(tabulate([head, *rows, *ends]))


def _cell(cost: ClusterCost, name: str) -> str:
    seconds = cost.parts.get(name, 0.0)
    return f"{time_text(seconds)} ({seconds / cost.seconds:.0%})" if seconds else "-"
