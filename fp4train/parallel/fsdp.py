"""Cut a converted model over the data ranks: FSDP2, or HSDP where several groups of ranks hold a
model each.

Every block, and what is outside of the blocks, is one unit. Its float32 masters lie in parts on the
ranks of `dp_shard`, are gathered for its forward and again for its backward pass, and freed after
each. Gradients are summed, not averaged: the loss of a rank counts by its share of the whole batch,
as that of a microbatch does, so that two ranks give the bits of two microbatches.

Weights of the blocks' layers are gathered as `precision.gather` says: as codes, scales and amax
where their recipe and backend allow, all others as values. What lies outside of the blocks is
gathered in float32.

Gradients may be reduced in BF16, rounded once and summed in float32, or in a fixed order. A
reduce-scatter would round each partial sum, in an order of its own. Instead each rank sends each
other one that rank's part of its own gradient, as many bytes as a reduce-scatter, and adds what it
got in float32, in the order in which one rank would pass the same tokens: the chunks of a sequence
from the last one, where the backward pass begins, and then the parts of the batch. Microbatches are
summed in float32 before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp4train.errors import user_errors
from fp4train.nn.executors import join_states
from fp4train.nn.planned import PlannedLayer
from fp4train.parallel.config import Parallel
from fp4train.parallel.experts import placement_of
from fp4train.parallel.gather import gather_weights, parameter_groups
from fp4train.parallel.tensor import cut_tensors
from fp4train.parallel.world import World
from fp4train.precision.layers import find_blocks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def share_tensors(model: nn.Module, world: World, parallel: Parallel) -> None:
    """Cut the matrices of a converted model over the tensor-parallel ranks.

    Raises:
        UserError: the model's class does not say how it is cut, or a size is not divisible.
    """
    if world.tensor is None:
        return
    with user_errors(TypeError, ValueError):
        rounds_sums = parallel.tp_reduce == "bf16"
        cut_tensors(model, world.tensor, sequence=parallel.sp, rounds_sums=rounds_sums)


def distribute(
    model: nn.Module, world: World, gather: str = "fp32", reduce: str = "float32"
) -> None:
    """Cut `model`, which has fp4train's layers and whole weights, the same on each of several
    ranks. In place.

    Args:
        gather: form in which ranks send each other weights, one of `precision.gather.GATHERS`.
        reduce: how shards send each other gradients, one of `config.REDUCES`.
    """
    for layer in _layers(model):
        layer.joined = True
    if world.data_mesh is None or world.mesh.token_ranks == 1:
        return
    from torch.distributed.fsdp import fully_shard

    # A mesh without shards is one of replicas: nothing is freed between forward and backward.
    several = world.mesh.weight_ranks > 1
    blocks = find_blocks(model)
    place = placement_of(model, world)
    for block in blocks:
        fully_shard(
            block, mesh=world.data_mesh, reshard_after_forward=several, shard_placement_fn=place
        )
        for layer in _layers(block):
            layer.keeps_forms = world.mesh.holders(layer.layer.experts) == 1
    fully_shard(model, mesh=world.data_mesh, reshard_after_forward=False, shard_placement_fn=place)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if several and reduce != "float32":
            scatter = OrderedReduceScatter(world.mesh.context, rounds=reduce == "bf16")
            for group in parameter_groups(unit):
                group._reduce_scatter_comm = scatter
    if several and gather != "fp32":
        # A model without blocks is the root, which stays whole between forward and backward.
        inner = [block for block in blocks if block is not model]
        gather_weights(model, inner, world, gather)


def synchronise(model: nn.Module, last: bool) -> None:
    """Set, before a microbatch, whether its gradients are summed over the ranks, with those of the
    ones before it.
    """
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP has made it one of its modules
        unit = cast("FSDPModule", model)
        unit.set_requires_gradient_sync(last)
        unit.set_is_last_backward(last)


def join_scales(model: nn.Module, world: World) -> None:
    """Join the layers' states over the ranks after the last backward of a step: they become the
    whole batch's.
    """
    if world.data_mesh is not None:
        join_states(_layers(model), world)


def _layers(module: nn.Module) -> Iterator[PlannedLayer]:
    return (submodule for submodule in module.modules() if isinstance(submodule, PlannedLayer))


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


class OrderedReduceScatter:
    """FSDP's `ReduceScatter` with sums in a fixed order.

    Args:
        chunks: ranks that share each sequence.
        rounds: whether ranks send BF16.
    """

    def __init__(self, chunks: int, *, rounds: bool) -> None:
        self._chunks = chunks
        self._rounds = rounds

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum the parts of `input_tensor` that are this rank's into `output_tensor`."""
        assert op == dist.ReduceOp.SUM
        sent = input_tensor.to(torch.bfloat16) if self._rounds else input_tensor
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.zero_()
        for chunks in received.view(-1, self._chunks, output_tensor.numel()):
            *earlier, total = chunks.to(output_tensor.dtype)
            for chunk in reversed(earlier):
                total = total + chunk
            output_tensor += total
