"""The initial weights of a model that several ranks hold, each its part: no rank ever has more of them.

A model that can be born this way says what its weights and buffers begin as (`Born`), and is built on the meta device,
converted and sharded before it has any memory. `materialise` then gives it memory and values:

- `counter`: each rank computes its part from the seed, the parameter's name and the global position (`normal.py`);
- `torch`: the values that `build` draws on a CPU from torch's generator, in the order of the constructor. Each rank
  draws all of them, one parameter at a time, and keeps its part: as slow on many ranks as on one.

Both give every number of ranks, cut in any way, the same model in every bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from fp4train.models.common.normal import fill_normal, key_of
from fp4train.shards import TensorShard, shard_of

DRAWS = ("torch", "counter")


@dataclass(frozen=True)
class Normal:
    """Independent values with mean 0 and standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Filled:
    """The same value everywhere."""

    value: float


Initial: TypeAlias = Normal | Filled


@runtime_checkable
class Born(Protocol):
    """A model whose weights can be made after it was sharded."""

    def initial_values(self) -> Mapping[str, Initial]:
        """By name, what each parameter begins as, in the order in which they are drawn; tied ones once."""
        ...

    def initial_buffers(self) -> Mapping[str, Tensor]:
        """By name, the values of each buffer, on the CPU."""
        ...


def why_not_born(model: nn.Module) -> str | None:
    """Why a model must be built on the CPU, whole, before it is sharded; None: `materialise` can make its weights."""
    if not isinstance(model, Born):
        return f"{type(model).__name__} has no initial_values() and initial_buffers()"
    return None


@torch.no_grad()
def materialise(
    model: nn.Module, device: torch.device, *, seed: int, draw: str, whole: nn.Module | None = None
) -> None:
    """Give a model on the meta device memory on `device`, and its initial weights and buffers, in place.

    Tied parameters stay tied. An optimizer of the model is made afterwards: the parameters are other objects.

    Args:
        model: a `Born` one, converted or not, with parameters of any sharding.
        seed: that of the run.
        draw: `torch` or `counter`.
        whole: with `torch`, the model on the meta device that `model` is a stage of; None: `model` is whole.

    Raises:
        ValueError: a parameter or buffer has no initial values, or `draw` is neither of the two.
    """
    if draw not in DRAWS:
        raise ValueError(f"draw={draw!r} is not one of {', '.join(DRAWS)}")
    if reason := why_not_born(model):
        raise ValueError(f"{reason}: build it on the CPU")
    assert isinstance(model, Born)
    values, buffers = model.initial_values(), model.initial_buffers()
    _check_names("parameter", [name for name, _ in model.named_parameters()], values)
    _check_names("buffer", [name for name, _ in model.named_buffers()], buffers)
    with _swapped():
        model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    if draw == "counter":
        for name, parameter in parameters.items():
            _fill(shard_of(parameter), values[name], seed, name)
    else:
        _draw_in_order(parameters, whole if whole is not None else model, seed)
    own = dict(model.named_buffers())
    for name, tensor in buffers.items():
        own[name].copy_(tensor)


@torch.no_grad()
def initialise(model: nn.Module, draw: str) -> None:
    """Draw the weights of a model that a constructor has just made, with torch's default generator or its seed."""
    assert isinstance(model, Born)
    parameters = dict(model.named_parameters())
    for name, initial in model.initial_values().items():
        if parameters[name].is_meta:
            continue
        if draw == "counter" or isinstance(initial, Filled):
            _fill(shard_of(parameters[name]), initial, torch.initial_seed() % (1 << 64), name)
        else:
            nn.init.normal_(parameters[name], std=initial.std)


def _check_names(what: str, names: list[str], given: Mapping[str, object]) -> None:
    if lost := [name for name in names if name not in given]:
        raise ValueError(f"the {what} {lost[0]} has no initial values" + (f"; {len(lost)} have none" * (len(lost) > 1)))


@contextmanager
def _swapped() -> Iterator[None]:
    """Parameters stay the objects that they are when their memory changes, which keeps tied ones tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _fill(part: TensorShard, initial: Initial, seed: int, name: str) -> None:
    if isinstance(initial, Filled):
        part.tensor.fill_(initial.value)
    else:
        fill_normal(part.tensor, part.shape, part.offsets, initial.std, key_of(seed, name))


def _draw_in_order(parameters: Mapping[str, nn.Parameter], model: nn.Module, seed: int) -> None:
    """The draws of `build` after `torch.manual_seed(seed)`: those of the layers' constructors, then the model's own."""
    assert isinstance(model, Born)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        _pass_over(module, generator)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, initial in model.initial_values().items():
        part = shard_of(parameters[name]) if name in parameters else None
        if isinstance(initial, Filled):
            if part is not None:
                part.tensor.fill_(initial.value)
            continue
        drawn = torch.empty(shapes[name], dtype=torch.float32)
        nn.init.normal_(drawn, std=initial.std, generator=generator)
        if part is not None:
            box = zip(part.offsets, part.tensor.shape, strict=True)
            part.tensor.copy_(drawn[tuple(slice(first, first + size) for first, size in box)])


def _pass_over(module: nn.Module, generator: torch.Generator) -> None:
    """Take from the generator what the constructor of a layer takes."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(_scratch(module.weight), a=math.sqrt(5), generator=generator)
        if module.bias is not None:
            _scratch(module.bias).uniform_(-1, 1, generator=generator)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(_scratch(module.weight), generator=generator)
    elif (
        not isinstance(module, (nn.RMSNorm, nn.LayerNorm)) and next(module.parameters(recurse=False), None) is not None
    ):
        raise ValueError(f"what {type(module).__name__} draws is not known: use draw=counter")


def _scratch(tensor: Tensor) -> Tensor:
    return torch.empty(tuple(tensor.shape), dtype=torch.float32)
