"""`AcceleratePrecision`: recipe, policy and phases in a loop with Accelerate."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from fp4train.errors import UserError
from fp4train.integrations.loop import Precision


class AcceleratePrecision(Precision):
    """Runs a model in a recipe; made behind `accelerator.prepare`, it needs no call of its own in
    the loop.

        model, optimizer, loader = accelerator.prepare(fp4train.convert(model), optimizer, loader)
        precision = AcceleratePrecision(accelerator, model, optimizer, "nvfp4", steps=1000)

    `accelerator.save_state` and `load_state` save and restore it.

    Args:
        accelerator: accelerator of the loop.
        model: model that `prepare` returned.
        optimizer: optimizer that `prepare` returned, or several; each step of one counts.
        steps: number of optimizer steps of the run.
        arguments, options: those of `Precision`.

    Raises:
        UserError: the model is not converted, or the optimizer is not prepared.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *arguments: Any,
        steps: int,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        if isinstance(optimizer, Sequence):
            optimizers = list(optimizer)
        else:
            optimizers = [optimizer]
        for prepared in optimizers:
            if not isinstance(prepared, AcceleratedOptimizer):
                raise UserError(
                    f"{type(prepared).__name__} is not prepared, so its steps cannot be told from "
                    "those that gradient "
                    "accumulation leaves out: pass what accelerator.prepare(model, "
                    "optimizer, …) returned"
                )
        sums = accelerator.gradient_accumulation_steps * accelerator.num_processes > 1
        self.attach(accelerator.unwrap_model(model), steps=steps, sums=sums)
        for prepared in optimizers:
            vars(prepared)["step"] = self._counting(prepared, prepared.step)
        accelerator.register_for_checkpointing(self)

    def _counting(
        self, optimizer: AcceleratedOptimizer, step: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`step`, which counts where gradients are complete; a step that a loss scale skips counts
        too.
        """

        @functools.wraps(step)
        def counted(*arguments: Any, **options: Any) -> Any:
            result = step(*arguments, **options)
            if optimizer.gradient_state.sync_gradients:
                self.stepped()
            return result

        return counted
