"""Modules of Lightning's around a small Llama; imported by the tests that train them, not where tests
are collected.
"""

import copy
from typing import Any

import lightning.pytorch as L
import torch
from small_transformers import adamw
from torch import Tensor, nn


class Module(L.LightningModule):
    """Takes the loss of its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


class Validated(Module):
    """Notes its validation losses, and those of a copy that has quantised nothing yet."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.validated: list[tuple[float, float]] = []

    def validation_step(self, batch: Any, index: int) -> None:
        fresh = copy.deepcopy(self.model)
        self.validated.append((self.model(**batch).loss.item(), fresh(**batch).loss.item()))


class Parts(Module):
    """Calls parts of its model in its training step, and past the model's own forward pass."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        hidden = self.model.model(input_ids=batch["input_ids"])[0]
        return self.model.lm_head(hidden).square().mean()  # type: ignore[operator, no-any-return]


class Pair(L.LightningModule):
    """Two models with an optimizer each, which a training step moves one after the other."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.models = nn.ModuleList(models)

    def training_step(self, batch: Any, index: int) -> None:
        optimizers: Any = self.optimizers()
        for model, optimizer in zip(self.models, optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(model(**batch).loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [adamw(model) for model in self.models]
