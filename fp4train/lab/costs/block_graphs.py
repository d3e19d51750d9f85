"""Graphs of blocks (`train.cuda_graph=block`, `run/block_graph.py`) in an estimate.

For each part of a block that graphs have, and each microbatch, the host queues a graph forward and one backward, and
copies of what they read: of the inputs other than x (rotations), of x and dy where no graph left them. Of weights that
data ranks gather it queues two copies, and a sum of their gradients (`casts.COPIED`, `ADDED`). All else of a block, its
experts, is queued as without graphs, and so is what lies outside of the blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp4train.lab.costs.elementwise import BlockTraffic
from fp4train.precision.blocks import block_paths
from fp4train.run.block_pass import block_parts

PRICED: Final = (
    "Priced for train.cuda_graph=block: per block, pass and microbatch a launch and copies of what the graph reads; "
    "on data ranks also two copies of each weight, and sums of gradients. Experts are queued as without graphs."
)
"""A plan's sentence on what the estimate counts."""


def parts_in_graphs(blocks: Sequence[nn.Module]) -> list[Mapping[str, tuple[bool, bool]]]:
    """The methods of each block that graphs have, and whether x and dy of each come from elsewhere than another graph,
    as if no stage began or ended between two blocks."""
    parts = [block_parts(block) for block in blocks]
    whole = [False, *(len(each) == 1 and bool(each[0][1]) for each in parts), False]
    return [
        {method: (not before, not (here and after)) for method, names in each if names}
        for each, before, here, after in zip(parts, whole, whole[1:], whole[2:], strict=False)
    ]


def modules_in_graphs(model: nn.Module) -> Iterator[str]:
    """The modules whose passes graphs have, by name."""
    for path in block_paths(model):
        for part in (part for _, names in block_parts(model.get_submodule(path)) for part in names):
            where = f"{path}.{part}".removesuffix(".")
            yield from (name for name, _ in model.get_submodule(where).named_modules(prefix=where))


class InGraphs(torch.autograd.Function):
    """y of (traffic, a method of a block, whether x and dy are copied to where graphs read them, the method's
    arguments), whose forward and backward passes are a graph each."""

    @staticmethod
    def forward(
        ctx: Any, traffic: BlockTraffic, method: Callable[..., Tensor], copied: tuple[bool, bool], *inputs: Any
    ) -> Tensor:
        ctx.traffic, ctx.copied, ctx.others = traffic, copied[1], len(inputs) - 1
        given = [each for each in inputs[not copied[0] :] if isinstance(each, Tensor)]
        with traffic.in_graph(*given), torch.enable_grad():
            ctx.x = inputs[0].detach().requires_grad_()
            ctx.y = method(ctx.x, *inputs[1:])
        y: Tensor = ctx.y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.traffic.in_graph(*[dy] * ctx.copied):
            torch.autograd.backward(ctx.y, dy)
        dx, ctx.x.grad = ctx.x.grad, None
        return None, None, None, dx, *[None] * ctx.others
