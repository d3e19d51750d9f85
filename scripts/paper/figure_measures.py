"""Measures of formats, roundings and recipes on drawn values, for scripts/paper/published_figures.py.

Most take what they measure, and give a function of the seed of a draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4train as f4
from fp4train.config.binding import bind
from fp4train.config.composition import named
from fp4train.formats import ElementFormat, e8m0_decode, e8m0_encode, get_format, get_scale_format
from fp4train.precision import Custom, LayerPolicy, Operands, Recipe
from fp4train.quantize import Quantized, QuantSpec, RandomKey, quantize
from fp4train.quantize.rounding import round_to_values

PARTS = 4
"""Draws of a figure."""
SHAPE = (1024, 1024)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=generator(seed))


def mx(element: str, columns: int, rounding: str) -> QuantSpec:
    return QuantSpec(
        element=element,
        block=(1, columns),
        scale="e8m0",
        scale_rounding=rounding,
        global_scale=None,
    )


def values(x: Tensor, spec: QuantSpec, seed: int = 0) -> Tensor:
    key = RandomKey(seed=seed, step=0, layer=0, operand=0) if spec.random else None
    return quantize(x, spec, key=key).dequantize()


def squared_error(spec: QuantSpec) -> Callable[[int], float]:
    """Mean squared error of N(0, 1), in thousandths."""

    def measure(seed: int) -> float:
        x = normal(seed)
        return 1e3 * (values(x, spec, seed) - x).square().mean().item()

    return measure


def bias(element: str, bits: int, dtype: torch.dtype) -> Callable[[int], float]:
    """Mean of rounded minus exact values of a dtype from 1 to 2, in units of the last place.

    A column of the element format's largest value makes the scale 1.
    """
    spec = QuantSpec(
        element=element,
        block=(None, None),
        scale="pow2",
        global_scale=None,
        rounding=f"stochastic_{bits}",
    )
    fmt = spec.format

    def measure(seed: int) -> float:
        x = torch.randint(0, round(1 / torch.finfo(dtype).eps), SHAPE, generator=generator(seed))
        x = 1 + x * torch.finfo(dtype).eps
        x[:, 0] = fmt.max
        error = (values(x, spec, seed) - x)[:, 1:].double() * 2.0**fmt.mantissa_bits
        return error.mean().item()

    return measure


def normal_of_numpy(seed: int) -> Tensor:
    """N(0, 10⁻⁶), 4096 × 512, as cotcodec's crest_prediction.py draws it."""
    draw = np.random.default_rng(seed).standard_normal((4096, 512)) * 1e-3
    return torch.from_numpy(draw).float()


def crest(columns: int) -> Callable[[int], float]:
    """Median over blocks of `normal_of_numpy` of the largest magnitude over the root mean square."""

    def measure(seed: int) -> float:
        return crest_factors(normal_of_numpy(seed), columns).median().item()

    return measure


def crest_factors(x: Tensor, columns: int) -> Tensor:
    blocks = x.reshape(-1, columns)
    return blocks.abs().amax(1) / blocks.square().mean(1).sqrt()


def qsnr_gap(rounding: Callable[[Tensor], Tensor], columns: int) -> Callable[[int], float]:
    """QSNR of E2M1 minus that of INT4 on `normal_of_numpy`, in dB, each under block scales of
    amax / max that `rounding` rounds.
    """

    def measure(seed: int) -> float:
        x = normal_of_numpy(seed).reshape(-1, columns)
        amax = x.abs().amax(1, keepdim=True)
        errors = []
        for fmt in (get_format("e2m1"), get_format("int4")):
            scale = rounding(amax / fmt.max)
            errors.append((round_to_values(x / scale, fmt) * scale - x).square().mean().item())
        return 10 * math.log10(errors[1] / errors[0])

    return measure


def power_of_two_above(scale: Tensor) -> Tensor:
    """The smallest E8M0 scale that is not below each scale."""
    return e8m0_decode(e8m0_encode(scale))


def bf16_above(scale: Tensor) -> Tensor:
    """The smallest BF16 number that is not below each scale, positive float32."""
    bits = scale.contiguous().view(torch.int32)
    return (bits + 0xFFFF & ~0xFFFF).view(torch.float32)


def e4m3_above(scale: Tensor) -> Tensor:
    """The smallest E4M3 scale that is not below each scale, under a float32 scale that makes the
    largest 448.
    """
    fmt = get_scale_format("e4m3")
    outer = scale.max() / fmt.max
    scale = (scale / outer).clamp(max=fmt.max)
    codes = fmt.encode(scale)
    codes = torch.where(fmt.decode(codes) < scale, codes + 1, codes)
    return fmt.decode(codes) * outer


def crossover(
    columns: int | None, ratio: float, floating: ElementFormat, bits: int
) -> Callable[[int], float]:
    """Crest factor κ at which the error model of 2510.25602 gives integers of some bits and a
    floating-point format the same error, as its authors' script has it.

    A block of N(0, σ²) has the amax κσ, and its scale is ρ κσ / max. Errors are uniform between the
    codes of integers and of subnormal numbers, and relative to the size of normal ones:

        integers        (ρκ)² / (12 · 4^(bits − 1))
        floating point  w_norm / (24 · 4^M) + (ρκ)² step² / (12 max²) p_sub + w_zero

    with the shares of energy of normal numbers and of what becomes zero, w, and of subnormal
    numbers, p. Of a block of `columns` the largest value has no error: 1 / columns of the integers'
    error and κ² / columns of w_norm are taken off; None: they are not.

    Args:
        ratio: ρ; the paper takes 1.5 for powers of two and 1.05 for E4M3.
    """
    step = floating.smallest_subnormal
    exact = 0.0 if columns is None else 1.0 / columns

    def integers(kappa: float) -> float:
        return (ratio * kappa) ** 2 / (12 * 4.0 ** (bits - 1)) * (1 - exact)

    def floats(kappa: float) -> float:
        unit = ratio * kappa / floating.max
        zero = unit * step / 2
        normal_from = unit * floating.smallest_normal
        within = 2 * (cumulative(normal_from) - cumulative(zero))
        lost = 2 * cumulative(zero) - 1 - 2 * zero * density(zero)
        energy = 2 * (normal_from * density(normal_from) + 1 - cumulative(normal_from))
        relative = max(0.0, energy - kappa**2 * exact) / (24 * 4.0**floating.mantissa_bits)
        return relative + (unit * step) ** 2 / 12 * within + lost

    def measure(seed: int) -> float:
        """The same for every seed: nothing is drawn."""
        low, high = 1.0, 12.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            if integers(middle) < floats(middle):
                low = middle
            else:
                high = middle
        return low

    return measure


def density(z: float) -> float:
    """Of N(0, 1)."""
    return math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def cumulative(z: float) -> float:
    """Of N(0, 1)."""
    return (1 + math.erf(z / math.sqrt(2))) / 2


def lossless_blocks(seed: int) -> float:
    """Share of the MXFP4 blocks of a matrix that are NVFP4 with the same codes, in percent.

    The scale of a block of 32, 2^k, becomes two E4M3 scales 2^(k − m) under a tensor scale of 2^m,
    with m eight below the largest k: exact while k lies at most 17 below it.
    """
    spread = torch.randn(SHAPE[0], 1, generator=generator(seed + 1000))
    source = quantize(0.02 * normal(seed) * 2**spread, mx("e2m1", 32, "even"))
    exponents = source.scales.int() - 127
    tensor_exponent = int(exponents.max()) - 8
    block_scales = torch.exp2((exponents - tensor_exponent).float()).repeat_interleave(2, dim=1)
    spec = QuantSpec()
    cast = Quantized(
        spec,
        source.shape,
        source.codes,
        get_scale_format(spec.scale).encode(block_scales),
        torch.tensor(448.0 * 6.0 * 2.0**tensor_exponent),
    )
    same = (cast.dequantize() == source.dequantize()).reshape(-1, 32).all(1)
    return 100 * same.float().mean().item()


def with_outliers(shape: Sequence[int], seed: int) -> Tensor:
    """N(0, 1), and N(0, 100²) added to .5 % of the elements, as ALTO's tests draw it.

    Tensors of one seed begin with the same normal numbers. Their outliers differ: the generator
    goes on where the tensor ends.
    """
    draw = generator(seed)
    x = torch.randn(*shape, generator=draw)
    chosen = torch.rand(*shape, generator=draw) < 0.005
    return (x + 100 * torch.randn(*shape, generator=draw) * chosen).bfloat16()


def of_layer(recipe: Recipe | None, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a linear layer of ALTO's test, 4096 tokens, 2048 → 1024, under its MSE loss.

    The test seeds w, x and the target alike.
    """
    tokens, outputs, inputs = 4096, 1024, 2048
    layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(with_outliers((outputs, inputs), seed))
    x = with_outliers((tokens, inputs), seed).requires_grad_()
    target = with_outliers((tokens, outputs), seed)
    if recipe is None:
        y = layer(x)
    else:
        converted = f4.convert(nn.Sequential(layer))  # it shares the weight
        with f4.autocast(recipe, policy=LayerPolicy(last=0), step=0, token_offset=0):
            y = converted(x)
    torch.autograd.backward(F.mse_loss(y, target))
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad


def alto(transformed: bool, stochastic: bool) -> Custom:
    """Rows of ALTO's Table 1, from its recipe: without the transform, with nearest rounding."""
    recipe = bind(named("recipe", "alto_mxfp4"), Recipe, "recipe")
    assert isinstance(recipe, Custom)
    products = {}
    for gemm in ("fprop", "dgrad", "wgrad"):
        operands = recipe.table()[gemm]
        specs = []
        for spec in operands.both:
            assert spec is not None
            rounding = spec.rounding if stochastic else "nearest"
            hadamard = spec.hadamard if transformed else None
            specs.append(replace(spec, rounding=rounding, hadamard=hadamard))
        products[gemm] = Operands(first=specs[0], second=specs[1])
    return Custom(
        label="ALTO",
        fprop=products["fprop"],
        dgrad=products["dgrad"],
        wgrad=products["wgrad"],
    )


class AltoTable:
    """SNR of y, dx and dw of a row of ALTO's Table 1, in dB; a row and a draw are made once."""

    def __init__(self) -> None:
        self._rows: dict[tuple[bool, bool, int], list[float]] = {}

    def cell(self, column: int, transformed: bool, stochastic: bool) -> Callable[[int], float]:
        def measure(seed: int) -> float:
            key = (transformed, stochastic, seed)
            if key not in self._rows:
                pairs = zip(
                    of_layer(alto(transformed, stochastic), seed), of_layer(None, seed), strict=True
                )
                self._rows[key] = [decibels(here, high) for here, high in pairs]
            return self._rows[key][column]

        return measure


def decibels(here: Tensor, high: Tensor) -> float:
    """SNR of `here` as ALTO's `calc_snr` has it: the signal is the energy of what was quantised,
    which is smaller than that of `high`.
    """
    noise = (here.float() - high.float()).square().sum()
    return 10 * math.log10(here.float().square().sum() / noise)
