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
        self.precision.attach(
            pl_module, steps=_steps_of(trainer), sums=sums, entrances=entrances_of(pl_module)
        )
        self.precision.step = trainer.global_step
        # of several, the first one may step before the layers of another have been called
        alone = len(trainer.optimizers) == 1
        for optimizer in trainer.optimizers:
            self.precision.count(optimizer, check=alone)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # a loss scale may have skipped a step, which Lightning counts
        self.precision.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if len(trainer.optimizers) > 1:
            self.precision.check_called()

    def state_dict(self) -> dict[str, Any]:
        return self.precision.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.precision.load_state_dict(state_dict)


def _steps_of(trainer: Trainer) -> int | None:
    """Number of optimizer steps of the run, as `global_step` counts them; None: not known.

    Lightning's estimate counts batches. A batch has a step of each of several optimizers, or as many
    as the training step makes.
    """
    estimated = trainer.estimated_stepping_batches
    if len(trainer.optimizers) > 1 and estimated != trainer.max_steps:
        return None
    return int(estimated) if 0 < estimated < math.inf else None
