"""torch's own data parallelism around a converted model in a loop of one's own: two ranks train the
bits of one process.
"""

import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import forked_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp4train as f4
from fp4train.nn import Experts
from fp4train.precision import (
    NVFP4,
    FP8Current,
    FP8Delayed,
    Recipe,
    autocast,
    recompute_contexts,
)

WIDTH = 64
ROWS = 16
STEPS = 3
MICROBATCHES = 2


class Mixture(nn.Module):
    """A residual MLP, and a residual mixture of four experts of which `first` and the next have
    tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.up = Experts(4, WIDTH, 48)
        self.down = Experts(4, 48, WIDTH)

    def forward(self, x: Tensor, first: int) -> Tensor:
        options: Any = {"use_reentrant": False, "context_fn": recompute_contexts}
        x = x + checkpoint(self.mlp, x, **options)
        key = first + (x[:, 0] > 0).long()
        order = key.argsort(stable=True)
        counts = torch.bincount(key, minlength=4)
        y = self.down(F.gelu(self.up(x[order], counts)), counts)
        return x + torch.empty_like(y).index_copy(0, order, y)


def backward(model: nn.Module, recipe: Recipe, step: int, microbatch: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    offset = (2 * microbatch + rank) * ROWS
    with autocast(recipe, seed=3, step=step, token_offset=offset):
        y = model(x, 2 * rank)  # a rank has no tokens for the experts of the other
    (y - x.flip(-1)).square().mean().backward()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def made() -> nn.Module:
    torch.manual_seed(0)
    return f4.convert(Mixture())


def of_one_process(recipe: Recipe) -> dict[str, Tensor]:
    """The weights after training on the microbatches of both ranks."""
    model = made()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        sums = []
        for rank in range(2):
            model.zero_grad()
            for microbatch in range(MICROBATCHES):
                backward(model, recipe, step, microbatch, rank)
            sums.append([parameter.grad for parameter in model.parameters()])
        for parameter, *terms in zip(model.parameters(), *sums, strict=True):
            parameter.grad = (terms[0] + terms[1]) / 2
        optimizer.step()
    return model.state_dict()


def of_a_rank(recipe: Recipe, wrapper: str) -> dict[str, Tensor]:
    """The weights of all ranks after training in DDP or FSDP2."""
    model: Any = made()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.mlp, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            last = microbatch == MICROBATCHES - 1
            unsynced: Any = contextlib.nullcontext()
            if wrapper == "fsdp":
                model.set_requires_gradient_sync(last)
            elif not last:
                unsynced = model.no_sync()
            with unsynced:
                backward(model, recipe, step, microbatch, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
    whole = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value  # noqa: E731
    return {
        name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()
    }


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDP1, flat": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "FSDP2": lambda model: fully_shard(fully_shard_each(model)),
    "FSDP2, whole after forward": lambda model: fully_shard(
        fully_shard_each(model, reshard_after_forward=False), reshard_after_forward=False
    ),
}


def fully_shard_each(model: nn.Sequential, **options: bool) -> nn.Module:
    for part in model:
        fully_shard(part, **options)
    return model


def halved(model: nn.Module) -> None:
    """An average or an optimizer that writes the parameters as they lie on this rank."""
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def loaded(model: nn.Module) -> None:
    """Weights of a checkpoint."""
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=whole)
    set_model_state_dict(model, {name: w * 0.5 for name, w in weights.items()}, options=whole)


def stepped(kind: Callable[..., torch.optim.Optimizer], **options: bool) -> Any:
    """The step of an optimizer."""
    return lambda model: kind(model.parameters(), lr=0.05, **options).step()


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "an average": halved,
    "a checkpoint": loaded,
    "SGD": stepped(torch.optim.SGD),
    "AdamW, foreach": stepped(torch.optim.AdamW, foreach=True),
    "AdamW, fused": stepped(torch.optim.AdamW, fused=True),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", [NVFP4(), FP8Current()], ids=lambda recipe: recipe.name)
def test_weights_that_were_written_within_a_step_are_those_of_the_next_pass(
    recipe: Recipe,
) -> None:
    """Whole weights in a model that has quantised nothing yet are the oracle."""

    def plain() -> nn.Sequential:
        torch.manual_seed(0)
        pairs = (nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)) for _ in range(2))
        model = f4.convert(nn.Sequential(*pairs))
        assert isinstance(model, nn.Sequential)
        return model

    def output(model: nn.Module) -> Tensor:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        with autocast(recipe, step=0):
            y: Tensor = model(x)
        return y

    def on_rank() -> None:
        dist.init_process_group("gloo")
        for (wrapper, wrap), (name, write) in product(WRAPPERS.items(), WRITES.items()):
            model = wrap(plain())
            before = output(model).detach()
            for _ in range(2):
                output(model).square().mean().backward()
                write(model)
                with torch.no_grad():
                    found = output(model)
                fresh = plain()
                options = StateDictOptions(full_state_dict=True)
                fresh.load_state_dict(get_model_state_dict(model, options=options))
                assert torch.equal(found, output(fresh)), (wrapper, name)
                assert not torch.equal(found, before), (wrapper, name)
        dist.destroy_process_group()

    assert forked_ranks(2, on_rank) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("recipe", [NVFP4(), FP8Delayed()], ids=lambda recipe: recipe.name)
def test_two_ranks_in_torchs_wrappers_train_the_bits_of_one_process(
    recipe: Recipe,
) -> None:
    expected = of_one_process(recipe)

    def on_rank() -> None:
        dist.init_process_group("gloo")
        for wrapper in ("ddp", "fsdp"):
            weights = of_a_rank(recipe, wrapper)
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in weights), wrapper
        dist.destroy_process_group()

    assert forked_ranks(2, on_rank) == [0, 0]
