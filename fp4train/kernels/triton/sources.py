"""Loads of the kernels of both forms: of x itself, or of the tensors that it is computed from in
registers, so that x in BF16 is neither written nor read.

S names the source; `read` gives float32 numbers on the BF16 grid, rounded where torch's operators
round:

"none"       x
"norm"       (h, weight, rstd): h * rstd * weight, rounded once, as F.rms_norm of a weight in BF16; what lies behind
             them is for who fills h and rstd (both.py)
"root"       the same of a weight that is not rounded before
"gate"       (gate, up): silu(gate), rounded, times up
"gradients"  (dh, gate, up), where dh is the gradient of silu(gate) * up: of gate dh * up, rounded, times silu'(gate),
             and of up dh times silu(gate), which is rounded; `which_gradient` says which of the two

silu(a) = a / (1 + exp(-a)). The exponential is 2^k * p(f) with -a * log2(e) = k + f, |f| <= 1/2,
and p a polynomial of degree 5 (relative error 2e-7, a ten-thousandth of a BF16 ulp), in additions
and multiplications of float32, so that it has the same bits on every GPU and in torch
(`quantize/produced.py`); that of a GPU's instruction is not specified.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from fp4train.kernels.triton import rounding


@triton.jit
def exponential(x):
    """exp(x) of float32: 0 from 2^-126 on, infinity from 2^128 on."""
    t = x * 1.4426950216293335
    t = tl.where(t < -126.0, -126.0, t)
    t = tl.where(t >= 128.0, float("inf"), t)
    k = (t + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
    f = t - k
    p = f * 0.0013400432653725147 + 0.009676037356257439
    p = p * f + 0.05550327152013779
    p = p * f + 0.2402210682630539
    p = p * f + 0.6931471824645996
    p = p * f + 1.0000001192092896
    k = tl.where(tl.abs(k) <= 128.0, k, 0.0).to(tl.int32)
    half = p * ((k + 126) << 23).to(tl.float32, bitcast=True)
    return tl.where(t == float("inf"), t, half * 2.0)


@triton.jit
def bf16_grid(x, HARDWARE: tl.constexpr):
    """float32 -> float32, rounded to BF16."""
    return rounding.as_float(rounding.as_bf16(x, HARDWARE))


@triton.jit
def which_gradient():
    """0 in programs that make the gradient of gate, 1 in those of up: neighbours, which share what
    they read.
    """
    return tl.program_id(0) % 2


@triton.jit
def read(
    x_ptr,
    offset,
    token,
    inside_tokens,
    feature,
    inside_features,
    S: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """float32 numbers of x at `offset`, which are those of `token` and `feature`; 0 outside.

    x_ptr: the pointer of x, or a tuple of those of the source, whose tensors have the strides of x.
    """
    mask = inside_tokens & inside_features
    if S == "none":
        return rounding.as_float(tl.load(x_ptr + offset, mask=mask, other=0.0))
    else:
        value_0 = rounding.as_float(tl.load(x_ptr[0] + offset, mask=mask, other=0.0))
        if S == "norm" or S == "root":
            weight = rounding.as_float(tl.load(x_ptr[1] + feature, mask=inside_features, other=0.0))
            if S == "norm":
                weight = bf16_grid(weight, HARDWARE)
            rstd = tl.load(x_ptr[2] + token, mask=inside_tokens, other=0.0)
            y = bf16_grid(value_0 * rstd * weight, HARDWARE)
            return tl.where(inside_tokens, y, 0.0)  # not the negative zero of a negative weight
        else:
            value_1 = rounding.as_float(tl.load(x_ptr[1] + offset, mask=mask, other=0.0))
            if S == "gate":
                silu = tl.div_rn(value_0, exponential(-value_0) + 1.0)
                return bf16_grid(bf16_grid(silu, HARDWARE) * value_1, HARDWARE)
            else:
                of_up = which_gradient()
                third_mask = mask & (token >= of_up * 2147483647)  # by no program of up's gradient
                third = rounding.as_float(tl.load(x_ptr[2] + offset, mask=third_mask, other=0.0))
                # silu(gate) of the one, sigmoid(gate) of the other, from one division
                part = tl.div_rn(tl.where(of_up == 0, 1.0, value_1), exponential(-value_1) + 1.0)
                dup = bf16_grid(part, HARDWARE) * value_0
                dgate = bf16_grid(value_0 * third, HARDWARE) * part * (value_1 * (1.0 - part) + 1.0)
                return bf16_grid(tl.where(of_up == 0, dgate, dup), HARDWARE)
