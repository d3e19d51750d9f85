"""`LightningPrecision`: recipe, policy and phases in Lightning's Trainer."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fp4train.integrations.loop import Precision, entrances_of


class LightningPrecision(Callback):
    """Runs a LightningModule in a recipe; the arguments are those of `Precision`.

        module.model = fp4train.convert(module.model)
        trainer = Trainer(…, callbacks=[LightningPrecision("nvfp4")])

    A training step is no forward pass of its module, so each part of it that holds converted layers
    enters the recipe. Lightning's checkpoints hold its state. The sanity check before training runs
    outside of the recipe.

    Attributes:
        precision: the core, with the plan once training has begun.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.precision = Precision(*arguments, **options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.precision.check(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sums = trainer.accumulate_grad_batches * trainer.world_size > 1
        estimated = trainer.estimated_stepping_batches
        steps = int(estimated) if 0 < estimated < math.inf else None
        self.precision.attach(pl_module, steps=steps, sums=sums, entrances=entrances_of(pl_module))
        self.precision.step = trainer.global_step
        for optimizer in trainer.optimizers:
            self.precision.count(optimizer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # a loss scale may have skipped a step, which Lightning counts
        self.precision.step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return self.precision.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.precision.load_state_dict(state_dict)
