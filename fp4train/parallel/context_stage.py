"""torch's stage of a pipeline, which runs each microbatch in its context."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

# No public function runs the backward pass of a stage and nothing else.
from torch.distributed.pipelining._backward import stage_backward

from fp4train.parallel.fsdp import synchronise

_FULL = ("stage_output", "output_grads", "input_values")


class ContextStage(PipelineStage):
    """A stage that runs each microbatch in its context.

    Args:
        args, named: arguments of torch's stage.
        context: number of a microbatch → the context of its forward pass.
        take_loss: takes the loss of each microbatch, on the last stage.
        seq_len: tokens of a sequence.
    """

    def __init__(
        self,
        *args: Any,
        context: Callable[[int], AbstractContextManager[object]],
        take_loss: Callable[[Tensor], None],
        seq_len: int,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self._context = context
        self._take_loss = take_loss
        self._seq_len = seq_len

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Any,
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        named = {}
        if self.is_last:  # targets are for the last of a rank's stages only
            named = dict(kwargs)
        if not self.is_first:
            named["time"] = self._seq_len
        try:
            with self._context(fwd_chunk_id):
                output = super().forward_one_chunk(fwd_chunk_id, args, named, save_forward_output)
        except RuntimeError as error:  # torch wraps what was raised
            raise error.__cause__ or error from None
        if self.is_last:
            self._take_loss(output.detach().clone())
        return output

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        if not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # torch's keeps all weights of the stage gathered from the first backward pass to the last.
        # Gradients are summed over the ranks when all passes have run.
        synchronise(self.submod, last=False)
        return stage_backward(**{key: bwd_kwargs[key] for key in _FULL}), None
