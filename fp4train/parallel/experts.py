"""Expert parallelism of a model: ranks share its experts (`models/common/expert_ranks.py`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fp4train.errors import UserError
from fp4train.models.common.expert_ranks import ExpertRanks
from fp4train.models.common.experts import ExpertLayer
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.ranks import Ranks
from fp4train.parallel.tensor import cut_parameters
from fp4train.parallel.world import World


def share_experts(model: nn.Module, world: World) -> None:
    """Let a converted model have this rank's experts of every layer, and send rows to the others'.

    Raises:
        UserError: it has no layers of experts, or their number is not divisible.
    """
    if world.experts is None:
        return
    ranks = Ranks.of(world.experts)
    check_experts(model, ranks.size)
    exchange = ExpertRanks(ranks)
    for layer in _expert_layers(model):
        layer.exchange = exchange
        for group in (layer.gate_up, layer.down):
            start = ranks.rank * (group.experts // ranks.size)
            cut_parameters(group, world.experts)
            group.shard(LayerShard(tensor=ranks, cut="experts", first=start, sources=ranks.size))


def check_experts(model: nn.Module, ranks: int) -> None:
    """Raises UserError where ranks cannot share the experts of a model."""
    if ranks == 1:
        return
    counts = {layer.router.experts.count for layer in _expert_layers(model)}
    key = f"parallel.ep={ranks}"
    if not counts:
        raise UserError(
            f"{key}: {type(model).__name__} has no layers of experts; use parallel.ep=1"
        )
    for count in counts:
        if count % ranks:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise UserError(
                f"{key}: the ranks do not divide the {count} experts of a layer; parallel.ep "
                f"allowed: {fits}"
            )


def _expert_layers(model: nn.Module) -> list[ExpertLayer]:
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def placement_of(model: nn.Module, world: World) -> Callable[[nn.Parameter], Any] | None:
    """Where FSDP2 shards the parameters of a model: those of experts over the ranks that have the
    same ones; None: all lie on the data ranks.

    Raises:
        UserError: this torch cannot do that.
    """
    if world.expert_data is None:
        return None
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError:
        raise UserError(
            f"parallel.ep needs torch 2.13 or newer, and this is {torch.__version__}: its FSDP2 has "
            "one mesh for all parameters of a block"
        ) from None
    place = ShardPlacementResult(None, HSDPMeshInfo(world.expert_data, 1, 0))
    experts = {
        parameter
        for layer in _expert_layers(model)
        for group in (layer.gate_up, layer.down)
        for parameter in group.parameters()
    }
    return lambda parameter: place if parameter in experts else None
