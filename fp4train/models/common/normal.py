"""Normal values as a pure function of the run's seed, the parameter's name and the element: any slice of any tensor.

    z = Φ⁻¹((b + ½) / 2³²),   b = word c mod 4 of Philox4x32-10(counter = (c // 4, r, name), key = seed)

for the element in column c (of the last dimension) and row r (of all others, flattened). |z| < 6.4, steps of the
probability are 2⁻³².

Φ⁻¹ is Wichura's PPND16 (Algorithm AS 241, Applied Statistics 37, 1988; relative error 1e-16) in float64. It needs only
+ − × ÷ √ and a logarithm, which is summed here from its series. Each of these is an operation of its own that IEEE 754
rounds once, so that a value has the same bits on every device, which a library's logarithm or cosine need not have.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fp4train.quantize.random import INITIAL, MASK, RandomKey, philox4x32

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


def key_of(seed: int, name: str) -> RandomKey:
    """Selects the values of the parameter `name`: 61 bits of its SHA-256, and bits that nothing else in a run uses."""
    digest = hashlib.sha256(name.encode()).digest()
    layer, step = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little") >> 3
    return RandomKey(seed=seed, step=step, layer=layer, operand=INITIAL)


def fill_normal(into: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], std: float, key: RandomKey) -> None:
    """Fill `into` with the slice at `offsets` of a normal tensor of `shape` with mean 0 and standard deviation `std`.

    Args:
        into: any floating dtype and device; the values are rounded to its dtype once.
    """
    if not into.numel():
        return
    if not shape:
        into.copy_(_draw(key, torch.zeros(1, dtype=torch.int64, device=into.device), 0, 1)[0, 0] * std)
        return
    columns, first = into.shape[-1], offsets[-1]
    chunk = _CHUNK if into.device.type == "cpu" else _CHUNK_ON_A_GPU
    wide = min(columns, chunk)
    for rows, index in _rows(tuple(into.shape[:-1]), shape[:-1], offsets[:-1], max(1, chunk // wide), into.device):
        for start in range(0, columns, wide):
            end = min(start + wide, columns)
            values = _draw(key, rows, first + start, end - start) * std
            into.view(-1, columns)[index, start:end] = values.to(into.dtype)


def _rows(
    sizes: tuple[int, ...], shape: tuple[int, ...], offsets: tuple[int, ...], step: int, device: torch.device
) -> Iterator[tuple[Tensor, slice]]:
    """Global numbers of the rows of a box, `step` at a time, and where they lie in the box."""
    count = math.prod(sizes)
    for start in range(0, count, step):
        local = torch.arange(start, min(start + step, count), dtype=torch.int64, device=device)
        found, stride = torch.zeros_like(local), 1
        for size, full, offset in reversed(list(zip(sizes, shape, offsets, strict=True))):
            found += (local % size + offset) * stride
            local, stride = local // size, stride * full
        yield found, slice(start, min(start + step, count))


def _draw(key: RandomKey, rows_R: Tensor, first: int, columns: int) -> Tensor:
    """Standard normal values [R, columns] of the given rows, from column `first` on; float64."""
    group = first // _WORDS
    count = -(-(first + columns) // _WORDS) - group
    column = torch.arange(group, group + count, dtype=torch.int64, device=rows_R.device)[None, :]
    row = rows_R[:, None]
    third = torch.full_like(column, (key.step * 8 + key.operand) & MASK)
    fourth = torch.full_like(column, key.layer)
    words = philox4x32((column, row & MASK, third, fourth), (key.seed & MASK, key.seed >> 32))
    bits = torch.stack(words, dim=-1).reshape(len(rows_R), count * _WORDS)
    skip = first - group * _WORDS
    return _inverse_normal((bits[:, skip : skip + columns].double() + 0.5) * 2.0**-32)


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
    for each in coefficients[1:]:
        y.mul_(x).add_(each)  # two operations: a fused one would round once
    return y


def _log(x: Tensor) -> Tensor:
    """ln of positive float64: x = m·2ᵉ with m in [√½, √2), ln m = 2·artanh((m − 1)/(m + 1))."""
    m, e = torch.frexp(x)
    low = m < _SQRT_HALF
    m, e = torch.where(low, m * 2.0, m), e.double() - low.double()
    s = (m - 1.0) / (m + 1.0)
    odd = tuple(1.0 / n for n in range(21, 0, -2))  # s < 0.172: the next term is below 2e-18
    return e * _LN2 + 2.0 * (s * _polynomial(odd, s * s))
