"""Context parallelism of a model: its sequences are cut over ranks (`models/common/chunks.py`)."""

from torch import nn

from fp4train.errors import UserError
from fp4train.models.common.chunks import SequenceRanks
from fp4train.parallel.world import World


def share_sequences(model: nn.Module, world: World) -> None:
    """Let a model, or a stage of one, have this rank's chunk of every sequence.

    Raises:
        UserError: it does not say that all that mixes tokens takes chunks of a sequence.
    """
    if world.context is None:
        return
    check_sequences(model, world.mesh.context)
    sequence = SequenceRanks(world.context, recomputes=getattr(model, "recomputes", False))
    for module in model.modules():
        if hasattr(module, "sequence"):
            module.sequence = sequence  # type: ignore[assignment]


def check_sequences(model: nn.Module, ranks: int) -> None:
    """Raises UserError where ranks cannot have chunks of the sequences of a model."""
    if ranks > 1 and not getattr(model, "takes_chunks", False):
        raise UserError(
            f"parallel.cp={ranks}: {type(model).__name__} does not say that what mixes the tokens "
            "of a sequence takes chunks of it (`takes_chunks`); use parallel.cp=1, with parallel.tp "
            "or model.recompute=true for long sequences"
        )
