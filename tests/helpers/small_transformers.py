"""A small random Llama of transformers, its batches, and the same training in a loop without any
framework.
"""

import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fp4train as f4

# transformers' Trainer and peft import a Transformer Engine without kernels
import fp4train.integrations
from fp4train.precision import BF16, LayerPolicy, Phase, Recipe, Timeline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

STEPS = 6
COOLDOWN = 4
BATCH = 4
POLICY = LayerPolicy(last=1)
PHASES = [Phase(start="cooldown", recipe=BF16(), gemms=("fprop",))]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def framework(name: str) -> Any:
    """A module that takes a second to import, where a test needs it, without warnings: of names that
    it deprecates itself, and of the missing kernels of TE and torchao.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(name)


def llama(*, convert: bool = True) -> nn.Module:
    """A Llama of two blocks with the weights of seed 0."""
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return f4.convert(model) if convert else model


class Rows(Dataset[Any]):
    """Rows of 32 tokens that repeat a pattern, so that losses fall."""

    def __init__(self, count: int = 64) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        tokens = (torch.arange(32) * (1 + row % 3) + row) % 16
        return {"input_ids": tokens, "labels": tokens}


def loader() -> Any:
    """Batches in order."""
    return DataLoader(Rows(), batch_size=BATCH)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def reference(
    recipe: Recipe, *, accumulate: int = 1, within: str = ""
) -> tuple[nn.Module, list[float]]:
    """The model after `STEPS` steps of a plain loop under `autocast`, and its losses.

    Args:
        within: what a module that holds the model calls it: a part of the layers' names, and so of
            the random bits.
    """
    model = llama()
    if within:
        f4.convert(nn.ModuleDict({within: model}))
    optimizer = adamw(model)
    losses = []
    batches = iter(loader())
    timeline = Timeline(recipe=recipe, steps=STEPS, cooldown=COOLDOWN, phases=PHASES)
    for layer in layers(model):
        layer.sum_gradients(accumulate > 1)
    for step in range(STEPS):
        for _ in range(accumulate):
            with f4.autocast(timeline.recipe_at(step), policy=POLICY, seed=0, step=step):
                loss = model(**next(batches)).loss
            (loss / accumulate).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def layers(model: nn.Module) -> Iterator[f4.nn.Linear]:
    return (module for module in model.modules() if isinstance(module, f4.nn.Linear))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters are equal in every bit."""
    pairs: list[tuple[Tensor, Tensor]] = list(
        zip(one.parameters(), other.parameters(), strict=True)
    )
    return all(torch.equal(a, b) for a, b in pairs)
