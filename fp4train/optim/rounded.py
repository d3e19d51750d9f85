"""AdamW with moments in BF16: 4 bytes per parameter instead of 8. A step rounds them
stochastically.

    g ← g / d                                d: what clipping divides all gradients by, 1 for none
    m ← β₁m + (1−β₁)g       v ← β₂v + (1−β₂)g²
    w ← w·(1−lr·decay) − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + eps)
    m, v ← BF16

all in float32 and in one pass over the weights: 20 bytes per parameter are moved (w, m and v read
and written, g read), of 20 that must be. The step of w uses the moments before they are rounded.

Rounded to nearest, a moment that changes by less than 2⁻⁹ of itself would stand still. BF16 is the
upper half of float32: with 16 random bits r,

    BF16(x) = upper half of (bits of x + r)

rounds x up with the probability that its lower half has of 2¹⁶. The mean over r is x itself,
exactly.

The bits are those of `quantize.random`, keyed by the parameter's name, its count of steps and the
element: a step repeats after a resume, and however the weights are cut over ranks, but for those
that tensor parallelism cuts in segments, whose rows count as their DTensor holds them. Runs with
different seeds share the bits. The C kernel (`kernels/cpu/csrc/adamw.c`) and the Triton kernel
(`kernels/triton/adamw.py`) equal `update` here in every bit.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp4train.kernels import cpu
from fp4train.quantize import triton_launch
from fp4train.quantize.random import INITIAL, LANES, MASK, RandomKey, random_bits, random_words
from fp4train.quantize.triton import why_not_here as why_no_triton
from fp4train.shards import TensorShard, is_sharded, local, shard_of

_log = logging.getLogger(__name__)

TILE = 64
"""Eights of columns of a program of the Triton kernel: one per thread of two warps. Of four warps
Triton 3.6 spills registers.
"""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the two moments in the state, which are those of torch's AdamW."""


@dataclass(frozen=True, kw_only=True)
class Decays:
    """Constants of all steps: β₁, 1−β₁, β₂, 1−β₂ and eps; they enter the arithmetic as float32."""

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    eps: float


class Slab(NamedTuple):
    """Rows of this rank's box of a parameter that follow each other in the whole one, seen as a
    matrix.
    """

    rows: slice
    """Rows of the box, seen as [elements / last dimension, last dimension]."""
    row: int
    column: int
    """Place of its first element in the whole parameter."""


class StepNumbers(NamedTuple):
    """Numbers of one step, for each of N parameters."""

    values: Tensor
    """float32 [N, 4]: 1−lr·decay, lr/(1−β₁ᵗ), √(1−β₂ᵗ), d."""
    counters: Tensor
    """int32 [N, 8]: t·8 + 0…7, as `RandomKey.counters` has it."""
    failed: Tensor
    """float32 []: not 0 where weights and moments are to stay as they are."""


class RoundedAdamW(torch.optim.AdamW):
    """AdamW with moments in BF16. Its state has the names of torch's; moments in float32 are
    rounded when loaded.

    As torch's fused optimizers it reads `found_inf` (a float32 [], where not 0 nothing changes) and
    `grad_scale` (a float32 [], by which it divides gradients).

    Args:
        groups: groups of parameters.
        names: names of the parameters, which key their random bits.
        lr, betas, eps, fused: arguments of `torch.optim.AdamW`.

    Raises:
        ValueError: a parameter is not float32.
    """

    scales_gradients = True
    """Whether it divides by `grad_scale` on every device."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: Mapping[nn.Parameter, str],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=fused)
        self._step_supports_amp_scaling = True
        for parameter, name in names.items():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"optim.moments=bfloat16 needs float32 weights, and {name} is {parameter.dtype}"
                )
        self._names = dict(names)
        self._slabs: dict[nn.Parameter, tuple[list[Slab], Callable[[Tensor], Tensor]]] = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # gives moments the dtype of their parameter
        for state in self.state.values():
            state.update({name: state[name].bfloat16() for name in MOMENTS if name in state})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer.step`; a closure is not called."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        divisor: Tensor | None = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            steps = [self._state(p)["step"] for p in parameters]
            if found_inf is None:
                failed = torch.zeros_like(steps[0])
            else:
                failed = found_inf
            numbers = numbers_of(torch.stack(steps) + 1, group, divisor, failed)
            beta1, beta2 = group["betas"]
            decays = Decays(
                beta1=beta1, rest1=1 - beta1, beta2=beta2, rest2=1 - beta2, eps=group["eps"]
            )
            kernel = kernel_for(failed.device.type, on_host=not isinstance(group["lr"], Tensor))
            for index, parameter in enumerate(parameters):
                for tensors, keys in self._parts(parameter, numbers.counters[index]):
                    kernel(tensors, keys, numbers, index, decays)
            torch._foreach_add_(steps, [1 - failed] * len(steps))

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update(
                {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in MOMENTS}
            )
        return state

    def _parts(
        self, parameter: nn.Parameter, counters: Tensor
    ) -> Iterator[tuple[SlabTensors, Keys]]:
        """Work of each call of the kernel: the tensors of a slab, and the keys of its random
        bits.
        """
        assert parameter.grad is not None
        state = self.state[parameter]
        name = self._names[parameter]
        if parameter not in self._slabs:
            self._slabs[parameter] = (
                slabs(shard_of(parameter)),
                local if is_sharded(parameter) else Tensor.detach,
            )
        parts, on_rank = self._slabs[parameter]
        matrices = [
            as_matrix(on_rank(tensor))
            for tensor in (parameter, parameter.grad, *(state[moment] for moment in MOMENTS))
        ]
        for slab in parts:
            first_key, second_key = (
                RandomKey(
                    seed=0,
                    step=0,
                    layer=zlib.crc32(f"{name}.{moment}".encode()),
                    operand=INITIAL,
                    row_offset=slab.row,
                    col_offset=slab.column // LANES * LANES,
                    counters=counters,
                )
                for moment in MOMENTS
            )
            tensors = SlabTensors(*(matrix[slab.rows] for matrix in matrices))
            yield tensors, Keys(first_key, second_key, slab.column % LANES)


class SlabTensors(NamedTuple):
    """Contiguous, [rows, columns]: weights and gradients in float32, moments in BF16."""

    weight: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor


class Keys(NamedTuple):
    """Keys of the random bits of both moments, with the step in `counters`; a slab begins `skip`
    columns after them.
    """

    first_moment: RandomKey
    second_moment: RandomKey
    skip: int


Kernel = Callable[[SlabTensors, Keys, StepNumbers, int, Decays], None]
"""Updates one slab in place; the number is the parameter's row in `StepNumbers`."""


def update(
    tensors: SlabTensors, keys: Keys, numbers: StepNumbers, index: int, decays: Decays
) -> None:
    """The readable reference of one slab: the formulas above, in torch."""
    keep, size, correction, divisor = numbers.values[index].unbind()
    weight, gradient, first_moment, second_moment = tensors
    g = gradient / divisor
    m = first_moment.float() * decays.beta1 + g * decays.rest1
    v = second_moment.float() * decays.beta2 + (g * g) * decays.rest2
    # rounded once, which the vector library behind torch's float32 root does not do
    root = v.double().sqrt().float()
    moved = weight * keep - size * (m / (root / correction + decays.eps))
    for old, new in (
        (weight, moved),
        (first_moment, rounded(m, _bits(keys.first_moment, keys.skip, m))),
        (second_moment, rounded(v, _bits(keys.second_moment, keys.skip, v))),
    ):
        old.copy_(torch.where(numbers.failed == 0, new, old))


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Finite float32 → BF16, up with the probability that `bits` (int32, 0…65535, of x's shape)
    give it.
    """
    upper = (x.view(torch.int32) + bits) & -65536
    return upper.view(torch.float32).bfloat16()


def slabs(box: TensorShard) -> list[Slab]:
    """`box` in parts whose rows follow each other in the whole tensor: one, unless a middle
    dimension is cut.
    """
    if len(box.shape) < 2:
        if box.tensor.numel():
            return [Slab(slice(0, 1), 0, *(box.offsets or (0,)))]
        return []
    sizes = tuple(box.tensor.shape)
    column = box.offsets[-1]
    cut = next((d for d in reversed(range(1, len(sizes) - 1)) if sizes[d] != box.shape[d]), 0)
    height = math.prod(sizes[cut:-1])
    parts = []
    for number, place in enumerate(product(*map(range, sizes[:cut]))):
        row = 0
        for dimension in range(len(sizes) - 1):
            at = place[dimension] if dimension < cut else 0
            row = row * box.shape[dimension] + box.offsets[dimension] + at
        parts.append(Slab(slice(number * height, (number + 1) * height), row, column))
    return parts if box.tensor.numel() else []


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as [elements / last dimension, last dimension]; a vector is one row."""
    if tensor.dim() > 1:
        columns = tensor.shape[-1]
    else:
        columns = max(tensor.numel(), 1)
    return tensor.contiguous().view(-1, columns)


def numbers_of(
    steps: Tensor, group: Mapping[str, Any], divisor: Tensor | None, failed: Tensor
) -> StepNumbers:
    """The numbers of the parameters of a group, which have done `steps` steps after this one."""
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    exact = steps.double()
    size = lr / (1 - beta1**exact)
    keep = torch.ones_like(exact) - torch.ones_like(exact) * lr * group["weight_decay"]
    if divisor is None:
        divided = torch.ones_like(steps)
    else:
        divided = divisor.expand_as(steps)
    values = torch.stack(
        (keep.float(), size.float(), (1 - beta2**exact).sqrt().float(), divided), dim=1
    )
    lanes = torch.arange(LANES, dtype=torch.int64, device=steps.device)
    return StepNumbers(
        values, (steps.to(torch.int64)[:, None] * LANES + lanes).to(torch.int32), failed
    )


def _bits(key: RandomKey, skip: int, like: Tensor) -> Tensor:
    return random_bits(key, like.shape[0], like.shape[1] + skip, like.device)[:, skip:]


def by_c(
    tensors: SlabTensors, keys: Keys, numbers: StepNumbers, index: int, decays: Decays
) -> None:
    """`update` by the C extension. Reads the numbers on the host, and does nothing where the step
    failed.
    """
    if numbers.failed.item():
        return
    key = keys.first_moment
    rows, cols = tensors.weight.shape
    place = (rows, cols, keys.skip, key.row_offset & MASK, key.col_offset // LANES & MASK)
    counter = int(numbers.counters[index, INITIAL]) & MASK
    words = (counter, key.layer, keys.second_moment.layer)
    cpu.step_adamw(tensors, (*place, *words), (*numbers.values[index].tolist(), *astuple(decays)))


@dataclass(frozen=True, kw_only=True)
class AdamWVariant(Decays):
    """Compile-time constants of the Triton kernel; `tile` counts eights of columns of a program."""

    tile: int
    hardware: bool


def by_triton(
    tensors: SlabTensors, keys: Keys, numbers: StepNumbers, index: int, decays: Decays
) -> None:
    """`update` by the Triton kernel: nothing waits for the GPU."""
    from fp4train.kernels.triton.adamw import adamw

    variant = AdamWVariant(**asdict(decays), tile=TILE, hardware=not triton_launch.interpreted())
    seed, _, _, layer, col_group, row_offset = random_words(keys.first_moment)
    second_layer = random_words(keys.second_moment)[3]
    rows, cols = tensors.weight.shape
    groups = -(-(cols + keys.skip) // LANES)
    sizes = (
        cols,
        groups,
        rows * groups,
        keys.skip,
        seed,
        layer,
        second_layer,
        col_group,
        row_offset,
    )
    launch = triton_launch.Launch(adamw, -(-rows * groups // TILE), sizes, {"V": variant}, 2)  # type: ignore[arg-type]
    launch(*tensors, numbers.values[index], numbers.counters[index, INITIAL:], numbers.failed)


@cache
def _has_triton() -> bool:
    """Whether the Triton kernel runs on this machine's GPUs; logs why not."""
    reason = why_no_triton("cuda")
    if reason is not None:
        _log.warning("optim.moments=bfloat16 is updated by torch, kernel by kernel: %s", reason)
    return reason is None


@cache
def _has_c() -> bool:
    """Whether the C kernel runs; logs why not."""
    reason = cpu.unavailable()
    if reason is not None:
        _log.warning("optim.moments=bfloat16 is updated by torch, many times slower: %s", reason)
    return reason is None


def kernel_for(device_type: str, *, on_host: bool) -> Kernel:
    """The fastest kernel there is for a device; `on_host`: one that reads numbers on the host may
    be taken.
    """
    if device_type == "cuda" and _has_triton():
        return by_triton
    if device_type == "cpu" and on_host and _has_c():
        return by_c
    return update
