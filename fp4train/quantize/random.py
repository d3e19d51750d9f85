"""Random bits for stochastic rounding: a pure function of the element, not of time or place.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011)
maps a 64-bit key and a 128-bit counter to 128 random bits. Key = run seed; counter = (column // 8,
row, step*8 + operand, layer), so eight neighbours in a row share one call and take 16 bits each.
The same element gets the same bits on every device, under activation recomputation, after a resume,
and for every sharding (the offsets give the position of a shard).
"""

from struct import Struct, error as StructError
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
LANES = 8  # elements served by one Philox call

FPROP_X, FPROP_W, DGRAD_DY, DGRAD_W, WGRAD_DY, WGRAD_X, MEASUREMENT, INITIAL = range(8)
"""Values of `RandomKey.operand`: the six operands of a table, and measurements and the initial
values of weights, which must not share their bits.
"""

_LIMITS = {
    "seed": 1 << 64,
    "step": 1 << 29,
    "layer": 1 << 32,
    "operand": 8,
    "row_offset": 1 << 32,
    "col_offset": 1 << 35,
}

_pack_words = Struct("=QIIII").pack
_words = Struct("=QIIII").unpack
_signed_words = Struct("=6i").unpack


class _Words(NamedTuple):
    words: bytes
    counters: Tensor | None


def _number(name: str) -> Any:
    """The property of one of the numbers that the words of a key hold."""
    return property(lambda key: key._numbers()[name])


class RandomKey(_Words):
    """Selects random bits: the run's seed, the step, the layer (crc32 of its name) and the operand
    (0..7) of its GEMMs.

    `row_offset` and `col_offset` (a multiple of 8) are the global position of element [0, 0] of the
    blocked 2-D tensor. `words` is the key and the constant part of the counter as kernels take
    them: seed, row_offset, col_offset / 8, step * 8 + operand, layer.

    `counters`: int32 [8] on the device, `step` * 8 + operand of each operand as
    `write_step_counters` writes it. A step that is recorded as a CUDA graph reads it instead of
    `step`, which a replay would repeat. None: the host's numbers. Keys compare by their words.

    Raises:
        ValueError: a number is out of range, or `counters` has another dtype; the message names it.
    """

    __slots__ = ()

    def __new__(
        cls,
        *,
        seed: int,
        step: int,
        layer: int,
        operand: int,
        row_offset: int = 0,
        col_offset: int = 0,
        counters: Tensor | None = None,
    ) -> Self:
        # Stochastic rounding makes one per operand and call: packing checks ranges.
        try:
            words = _pack_words(seed, row_offset, col_offset >> 3, step * LANES + operand, layer)
        except (StructError, TypeError):
            words = None
        if words is None or not 0 <= operand < LANES or col_offset % LANES:
            _refuse(seed, step, layer, operand, row_offset, col_offset)
        if counters is not None and counters.dtype != torch.int32:
            raise ValueError(f"counters: an int32 tensor is needed, not {counters.dtype}")
        # a named tuple's own __new__ is one more call of Python for each operand
        return tuple.__new__(cls, (words, counters))

    seed: int = _number("seed")
    step: int = _number("step")
    layer: int = _number("layer")
    operand: int = _number("operand")
    row_offset: int = _number("row_offset")
    col_offset: int = _number("col_offset")

    def _numbers(self) -> dict[str, int]:
        seed, row, group, step, layer = _words(self.words)
        numbers = (seed, step // LANES, layer, step % LANES, row, group * LANES)
        return dict(zip(_LIMITS, numbers, strict=True))

    def replace(self, **numbers: int) -> Self:
        """A key with other numbers.

        Raises:
            ValueError: one is out of range.
        """
        return type(self)(**self._numbers() | numbers, counters=self.counters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomKey) and self.words == other.words

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.words)

    def __repr__(self) -> str:
        return (
            f"RandomKey({', '.join(f'{name}={value}' for name, value in self._numbers().items())})"
        )

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {**self._numbers(), "counters": self.counters}


def _refuse(*numbers: int) -> NoReturn:
    """Raise ValueError that names the number out of range."""
    for (name, limit), value in zip(_LIMITS.items(), numbers, strict=True):
        if not isinstance(value, int) or not 0 <= value < limit:
            raise ValueError(f"{name}={value!r}: RandomKey allows integers 0 <= {name} < {limit}")
    raise ValueError(
        f"col_offset={numbers[-1]}: must be a multiple of {LANES}, the elements of one Philox call"
    )


_NO_WORDS = (0,) * 9


def random_words(key: RandomKey | None) -> tuple[int | Tensor, ...]:
    """Key and counter words as int32 bit patterns, so that their size never changes a kernel's
    signature.

    The word of the step is a pointer where a CUDA graph is recorded: another signature.
    """
    if key is None:
        return _NO_WORDS[:6]
    words, counters = key
    seed, seed_high, row, col_group, counter2, layer = _signed_words(words)
    if counters is None:
        step = counter2
    else:
        step = counters[counter2 % LANES]
    return seed, seed_high, step, layer, col_group, row


def words_of_both(
    row: RandomKey | None, column: RandomKey | None
) -> tuple[int | Tensor, ...] | None:
    """Key and counter words of both forms of a tensor, as `quantize_both` takes them; None: their
    seeds or layers are not the same.
    """
    if (either := row or column) is None:
        return _NO_WORDS
    seed, high, step, layer, group, start = random_words(either)
    if row is None or column is None:
        return seed, high, layer, step, group, start, step, group, start
    other_seed, other_high, other_step, other_layer, other_group, other_start = random_words(column)
    if seed != other_seed or high != other_high or layer != other_layer:
        return None
    return seed, high, layer, step, group, start, other_step, other_group, other_start


def write_step_counters(counters: Tensor, step: int) -> None:
    """Write step * 8 + operand for the operands 0…7 into `counters`, int32 [8], as bit patterns."""
    operands = torch.arange(LANES, dtype=torch.int64, device=counters.device)
    # both in kernels: nothing is copied from the host
    counters.copy_((operands + step * LANES).to(torch.int32))


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32. Counter words are int64 tensors holding 0..2^32-1 that broadcast;
    so are the results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps modulo 2^64, so the low and the (masked) high word equal those of the unsigned
        # product.
        p0 = c0 * MULTIPLIER_0
        p1 = c2 * MULTIPLIER_1
        c0 = ((p1 >> 32) & MASK) ^ c1 ^ k0
        c1 = p1 & MASK
        c2 = ((p0 >> 32) & MASK) ^ c3 ^ k1
        c3 = p0 & MASK
        k0 = (k0 + WEYL_0) & MASK
        k1 = (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def random_bits(key: RandomKey, rows: int, cols: int, device: torch.device | str = "cpu") -> Tensor:
    """16 random bits per element: int32 [rows, cols] with values 0..65535.

    Element j = (c + col_offset) % 8 of a call takes half j % 2 (0 = low) of word j // 2.
    """
    groups = -(-cols // LANES)
    seed, first_row, first_group, step_operand, layer_key = _words(key.words)
    column = torch.arange(groups, dtype=torch.int64, device=device)[None, :] + first_group
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None] + first_row
    column = column & MASK
    row = row & MASK
    if key.counters is None:
        step = torch.full_like(column, step_operand)
    else:
        step = (key.counters[step_operand % LANES].to(torch.int64) & MASK).expand_as(column)
    layer = torch.full_like(column, layer_key)
    words = philox4x32((column, row, step, layer), (seed & MASK, seed >> 32))
    halves = [half.to(torch.int32) for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).reshape(rows, groups * LANES)[:, :cols]


class RunStep(NamedTuple):
    """A step of a run with this seed. Weights are constant within it."""

    seed: int
    number: int


class Position(NamedTuple):
    """The place of a call's tokens in a run.

    step: the step of the run.
    token: index of the first token in the global batch of the step.
    counters: the number of the step on the device, where a recorded step reads it from there
        (`RandomKey.counters`).
    """

    step: RunStep
    token: int = 0
    counters: Tensor | None = None

    def key(self, layer: int, operand: int, row: int = 0, column: int = 0) -> RandomKey:
        """The key of a tensor whose first element lies at (row, column) of the operand of a
        layer.
        """
        return RandomKey(
            seed=self.step.seed,
            step=self.step.number,
            layer=layer,
            operand=operand,
            row_offset=row,
            col_offset=column,
            counters=self.counters,
        )
