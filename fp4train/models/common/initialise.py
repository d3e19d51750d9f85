"""The initial weights of a model that several ranks hold, each its part: no rank ever has more of
them.

A model whose initialisation can be deferred says what its weights and buffers begin as
(`ParameterSpec.initial`), and is built on the meta device, converted and sharded before it has any
memory. `materialise` then gives it memory and values: each rank computes its part from the seed, the
parameter's name and the global position. Every number of ranks, cut in any way, has the same model
in every bit.

A model with `draw` = "torch" has the values that torch's generator gives on a CPU in the order of the
constructor; each rank draws all of it (`run.build.built_or_deferred`).

A normal value of `counter` is a pure function of the run's seed, the parameter's name and the
element:

    z = Φ⁻¹((b + ½) / 2³²),   b = word c mod 4 of Philox4x32-10(counter = (c // 4, r, name), key = seed)

for the element in column c (of the last dimension) and row r (of all others, flattened). |z| < 6.4,
steps of the probability are 2⁻³².

Φ⁻¹ is Wichura's PPND16 (Algorithm AS 241, Applied Statistics 37, 1988; relative error 1e-16) in
float64. It needs only
+ − × ÷ √ and a logarithm, which is summed here from its series. Each of these is an operation of
  its own that IEEE 754
rounds once, so that a value has the same bits on every device, which a library's logarithm or
cosine need not have.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp4train.parameters import Computed, Filled, Initial, Normal, Spread, Uniform, declared
from fp4train.quantize.random import INITIAL, MASK, RandomKey, philox4x32
from fp4train.shards import TensorShard, row_orders, shard_of

_WORDS = 4
_CHUNK = 1 << 17
"""Elements drawn at a time: their float64 intermediates stay in a CPU's caches."""
_CHUNK_ON_A_GPU = 1 << 24
_CENTRE = 0.425
_SQRT_HALF = math.sqrt(0.5)
_LN2 = math.log(2.0)

# Coefficients of PPND16, highest power first: the centre, r ≤ 5, r > 5; numerator and denominator.
_A = (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
      1971.5909503065514427, 133.14166789178437745, 3.387132872796366608)  # fmt: skip
_B = (5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867, 5394.1960214247511077,
      687.1870074920579083, 42.313330701600911252, 1.0)  # fmt: skip
_C = (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
      3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734)  # fmt: skip
_D = (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
      0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0)  # fmt: skip


def initial_values(model: nn.Module) -> dict[str, Initial]:
    """Name → initial values, as `model` says, of parameters in the order in which they are drawn,
    tied ones once, then of buffers.
    """
    specs = declared(model)
    values: dict[str, Initial] = {}
    for name in (*dict(model.named_parameters()), *dict(model.named_buffers())):
        initial = specs[name].initial if name in specs else None
        if isinstance(initial, Spread):
            raise TypeError(f"the model does not say how {name} is scaled")
        if initial is not None:
            values[name] = initial
    return values


def why_not_deferred(model: nn.Module) -> str | None:
    """Why a model must be built on the CPU, whole, before it is sharded; None: `materialise` can
    make its weights.
    """
    values = initial_values(model)
    for what, names in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        if lost := [name for name, _ in names if name not in values]:
            more = f"; {len(lost)} have none" if len(lost) > 1 else ""
            return (
                f"the {what} {lost[0]} of {type(model).__name__} has no initial values{more} "
                "(fp4train_parameters)"
            )
    return None


@torch.no_grad()
def materialise(
    model: nn.Module,
    device: torch.device,
    *,
    seed: int | None,
) -> None:
    """Give a model on the meta device memory on `device`, and its initial weights and buffers, in
    place.

    Tied parameters stay tied. An optimizer of the model is made afterwards: the parameters are
    other objects.

    Args:
        model: one whose parameters all have initial values, converted or not, of any sharding.
        seed: that of the run; None: the caller gives it all of its weights, which hold anything
            until then.

    Raises:
        ValueError: a parameter or buffer has no initial values.
    """
    if reason := why_not_deferred(model):
        raise ValueError(f"{reason}: build it on the CPU")
    values = initial_values(model)
    with _swapped():
        model.to_empty(device=device)
    orders = row_orders(model)
    if seed is not None:
        for name, parameter in model.named_parameters():
            _fill(shard_of(parameter, orders.get(name)), values[name], seed, name)
    for name, buffer in model.named_buffers():
        _fill(shard_of(buffer), values[name], seed or 0, name)


@torch.no_grad()
def initialise(model: nn.Module, draw: str) -> None:
    """Draw the weights of a model that a constructor has just made, with torch's default generator
    or its seed.
    """
    values = initial_values(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta or name not in values:
            continue
        initial = values[name]
        if draw == "counter" or not isinstance(initial, Normal):
            _fill(shard_of(parameter), initial, torch.initial_seed() % (1 << 64), name)
        else:
            nn.init.normal_(parameter, std=initial.std)


@contextmanager
def _swapped() -> Iterator[None]:
    """Parameters stay the objects that they are when their memory changes, which keeps tied ones
    tied.
    """
    earlier = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(earlier)


def _fill(shard: TensorShard, initial: Initial, seed: int, name: str) -> None:
    for box in shard.boxes():
        _fill_box(box, initial, seed, name)


def _fill_box(part: TensorShard, initial: Initial, seed: int, name: str) -> None:
    if isinstance(initial, Filled):
        part.tensor.fill_(initial.value)
    elif isinstance(initial, Computed):
        part.tensor.copy_(initial.values())
    elif isinstance(initial, Normal):
        fill_normal(part.tensor, part.shape, part.offsets, initial.std, key_of(seed, name))
    else:  # on the CPU: other devices may round a logarithm in another way
        values = torch.empty(part.tensor.shape, dtype=torch.float64, device="cpu")
        if isinstance(initial, Uniform):
            _fill_drawn(values, part.shape, part.offsets, lambda p: p, key_of(seed, name))
            values = initial.through(initial.low + (initial.high - initial.low) * values)
        else:
            numbers = torch.arange(len(values), dtype=torch.float64, device="cpu") + part.offsets[0]
            values = initial.of(numbers).view(-1, *[1] * (values.dim() - 1)).expand(values.shape)
        part.tensor.copy_(values)


# Normal values by counter


def key_of(seed: int, name: str) -> RandomKey:
    """Selects the values of the parameter `name`: 61 bits of its SHA-256, and bits that nothing
    else in a run uses.
    """
    digest = hashlib.sha256(name.encode()).digest()
    layer = int.from_bytes(digest[:4], "little")
    step = int.from_bytes(digest[4:8], "little") >> 3
    return RandomKey(seed=seed, step=step, layer=layer, operand=INITIAL)


def fill_normal(
    into: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], std: float, key: RandomKey
) -> None:
    """Fill `into` with the slice at `offsets` of a normal tensor of `shape` with mean 0 and
    standard deviation `std`.

    Args:
        into: any floating dtype and device; the values are rounded to its dtype once.
    """
    _fill_drawn(into, shape, offsets, lambda p: _inverse_normal(p) * std, key)


def _fill_drawn(
    into: Tensor,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    of: Callable[[Tensor], Tensor],
    key: RandomKey,
) -> None:
    """Fill `into` with `of` the probabilities at its place, which are float64 and even between 0
    and 1.
    """
    if not into.numel():
        return
    if not shape:
        into = into.view(1)
        shape = (1,)
        offsets = (0,)
    columns = into.shape[-1]
    first_column = offsets[-1]
    if into.device.type == "cpu":
        chunk = _CHUNK
    else:
        chunk = _CHUNK_ON_A_GPU
    wide = min(columns, chunk)
    for rows, index in _rows(
        tuple(into.shape[:-1]), shape[:-1], offsets[:-1], max(1, chunk // wide), into.device
    ):
        for start in range(0, columns, wide):
            end = min(start + wide, columns)
            values = of(_draw(key, rows, first_column + start, end - start))
            into.view(-1, columns)[index, start:end] = values.to(into.dtype)


def _rows(
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    step: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, slice]]:
    """Global numbers of the rows of a box, `step` at a time, and where they lie in the box."""
    count = math.prod(sizes)
    for start in range(0, count, step):
        local = torch.arange(start, min(start + step, count), dtype=torch.int64, device=device)
        global_rows = torch.zeros_like(local)
        stride = 1
        for size, full, offset in reversed(list(zip(sizes, shape, offsets, strict=True))):
            global_rows += (local % size + offset) * stride
            local = local // size
            stride = stride * full
        yield global_rows, slice(start, min(start + step, count))


def _draw(key: RandomKey, rows_R: Tensor, first: int, columns: int) -> Tensor:
    """Probabilities [R, columns] of the given rows, from column `first` on; float64."""
    group = first // _WORDS
    count = -(-(first + columns) // _WORDS) - group
    column = torch.arange(group, group + count, dtype=torch.int64, device=rows_R.device)[None, :]
    row = rows_R[:, None]
    third = torch.full_like(column, (key.step * 8 + key.operand) & MASK)
    fourth = torch.full_like(column, key.layer)
    words = philox4x32((column, row & MASK, third, fourth), (key.seed & MASK, key.seed >> 32))
    bits = torch.stack(words, dim=-1).reshape(len(rows_R), count * _WORDS)
    skip = first - group * _WORDS
    return (bits[:, skip : skip + columns].double() + 0.5) * 2.0**-32


def _inverse_normal(p: Tensor) -> Tensor:
    """Φ⁻¹ of float64 probabilities between 2⁻³³ and 1 − 2⁻³³, where r below is at most 4.8."""
    q = p - 0.5
    r = _CENTRE * _CENTRE - q * q
    z = q * _polynomial(_A, r) / _polynomial(_B, r)
    outside = q.abs() > _CENTRE
    tail = q[outside]
    r = (-_log(0.5 - tail.abs())).sqrt() - 1.6
    z[outside] = tail.sign() * (_polynomial(_C, r) / _polynomial(_D, r))
    return z


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    y = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y.mul_(x).add_(coefficient)  # two operations: a fused one would round once
    return y


def _log(x: Tensor) -> Tensor:
    """ln of positive float64: x = m·2ᵉ with m in [√½, √2), ln m = 2·artanh((m − 1)/(m + 1))."""
    m, e = torch.frexp(x)
    low = m < _SQRT_HALF
    m = torch.where(low, m * 2.0, m)
    e = e.double() - low.double()
    s = (m - 1.0) / (m + 1.0)
    odd = tuple(1.0 / n for n in range(21, 0, -2))  # s < 0.172: the next term is below 2e-18
    return e * _LN2 + 2.0 * (s * _polynomial(odd, s * s))
