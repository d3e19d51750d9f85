"""Inputs that break quantisers: NaN, infinity, zeros, denormals, extremes, empty and oddly shaped
tensors.
"""

import re

import pytest
import torch

from fp4train.formats import ELEMENT_FORMATS, ElementFormat
from fp4train.quantize import Delayed, Hadamard, QuantSpec, RandomKey, quantize, quantize_dequantize

KEY = RandomKey(seed=1, step=2, layer=3, operand=4)
FP8 = {"element": "e4m3", "global_scale": None, "scale": "fp32"}
MX = {"block": (1, 32), "scale": "e8m0", "global_scale": None}
SPECS = {
    "nvfp4": QuantSpec(),
    "nvfp4 te2.13": QuantSpec(formula="te2.13"),
    "nvfp4 2d": QuantSpec(block=(16, 16)),
    "nvfp4 row": QuantSpec(global_scale="row"),
    "nvfp4 four over six": QuantSpec(four_over_six="mse"),
    "nvfp4 2d four over six": QuantSpec(block=(16, 16), four_over_six="mae", global_bound=256),
    "nvfp4 hadamard": QuantSpec(hadamard=Hadamard()),
    "nvfp4 stochastic": QuantSpec(rounding="stochastic"),
    "nvfp4 guarded": QuantSpec(rounding="stochastic", guard=16 / 17),
    "mxfp8": QuantSpec(element="e4m3", **MX),
    "mxfp8 floor": QuantSpec(element="e5m2", **MX, scale_rounding="floor"),
    "mxfp6 even": QuantSpec(element="e3m2", **MX, scale_rounding="even"),
    "mxfp4 ceil": QuantSpec(element="e2m1", **MX, scale_rounding="ceil"),
    "mxfp4 2d stochastic": QuantSpec(
        block=(32, 32), scale="e8m0", global_scale=None, rounding="stochastic"
    ),
    "fp8 tensor": QuantSpec(**FP8, block=(None, None)),
    "fp8 row": QuantSpec(**FP8, block=(1, None)),
    "fp8 block": QuantSpec(**FP8, block=(1, 128)),
    "fp8 2d pow2": QuantSpec(element="e5m2", scale="pow2", global_scale=None, block=(128, 128)),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def both(x: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """Decoded x, after checking that the fused path gives the same operand."""
    q = quantize(x, spec, key=KEY, kernel="reference")
    fused = quantize_dequantize(x, spec, key=KEY, kernel="reference")
    stored = q.decoded()
    torch.testing.assert_close(fused.values, stored.values, rtol=0, atol=0, equal_nan=True)
    if fused.scale is not None:
        torch.testing.assert_close(fused.scale, stored.scale, rtol=0, atol=0, equal_nan=True)
    return q.restore()


def ordinary(rows: int = 32, cols: int = 256) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


@specs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_are_never_hidden(spec: QuantSpec, bad: float, dtype: torch.dtype) -> None:
    x = ordinary().to(dtype)
    x[3, 5] = bad
    y = both(x, spec)
    assert y[3, 5].isnan()
    # A product of the operand with anything is not finite in that row either.
    operand = quantize_dequantize(x, spec, key=KEY, kernel="reference")
    product = operand.values.float() @ torch.ones(operand.values.shape[1], 2)
    product = product if operand.scale is None else product * operand.scale
    assert not product[3].isfinite().any()


@specs
def test_a_bad_block_leaves_blocks_with_their_own_scale_alone(spec: QuantSpec) -> None:
    x = ordinary()
    clean = both(x, spec)
    x[3, 5] = float("nan")
    y = both(x, spec)
    if spec.global_scale is None and None not in spec.block and spec.block[0] == 1:
        assert torch.equal(y[:, 128:], clean[:, 128:])
        assert torch.equal(y[4:], clean[4:])
    if spec.global_scale == "row" or spec.block == (1, None):
        assert torch.equal(y[4:], clean[4:])


def test_the_scale_of_a_bad_block_is_the_standards_nan() -> None:
    x = ordinary()
    x[3, 5] = float("inf")
    assert quantize(x, SPECS["mxfp8"], kernel="reference").scales[3, 0] == 255
    assert quantize(x, SPECS["nvfp4"], kernel="reference").scales[3, 0] == 0x7F
    x[3, 5] = float("nan")
    q = quantize(x, SPECS["mxfp4 ceil"], kernel="reference")
    assert q.scales[3, 0] == 255
    assert (q.element_codes[3, :32] == 7).all(), (
        "NaN has no E2M1 code: the largest value, without a sign"
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block", [(None, None), (1, None)])
@pytest.mark.parametrize(
    "fmt", [fmt for fmt in ELEMENT_FORMATS if not fmt.has_nan], ids=lambda fmt: fmt.name
)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_and_values_without_a_nan_of_their_own_say_it_by_the_scale(
    fmt: ElementFormat, block: tuple[int | None, None], bad: float, rounding: str
) -> None:
    spec = QuantSpec(
        element=fmt.name, block=block, scale="fp32", global_scale=None, rounding=rounding
    )
    x = ordinary()
    x[3, 5] = bad
    amax = torch.full((32 if block[0] else 1, 1), 4.0)
    for kernel in ("auto", "reference"):
        stored = quantize(x, spec, key=KEY, amax=amax, kernel=kernel)
        fused = quantize_dequantize(x, spec, key=KEY, amax=amax, kernel=kernel)
        decoded = stored.decoded()
        assert decoded.scale is not None and fused.scale is not None
        for y in (stored.dequantize(), decoded.values * decoded.scale, fused.values * fused.scale):
            assert y[3].isnan().all(), "all that share the scale"
            assert y[4].isnan().all() == (block[0] is None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 2d", "nvfp4 row", "fp8 tensor", "fp8 row"])
def test_an_amax_from_elsewhere_hides_no_bad_value(name: str, bad: float) -> None:
    x = ordinary()
    spec = SPECS[name]
    x[3, 5] = bad
    rows = 32 if name in ("nvfp4 row", "fp8 row") else 1
    amax = torch.full((rows, 1), 4.0)
    assert quantize(x, spec, amax=amax, kernel="reference").dequantize()[3, 5].isnan()
    operand = quantize_dequantize(x, spec, amax=amax, kernel="reference")
    assert operand.values[3, 5].isnan()


def test_an_amax_from_elsewhere_saturates_finite_values() -> None:
    x = ordinary() * 100
    for name in ("nvfp4", "fp8 tensor"):
        y = quantize(x, SPECS[name], amax=torch.tensor(1.0), kernel="reference").dequantize()
        assert y.abs().max().item() == pytest.approx(1.0, rel=1e-6)


@specs
def test_zeros_stay_zeros(spec: QuantSpec) -> None:
    assert torch.equal(both(torch.zeros(32, 256), spec), torch.zeros(32, 256))
    x = ordinary()
    x[:16, :128] = 0
    assert torch.equal(both(x, spec)[:16, :128], torch.zeros(16, 128))


@specs
@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_tensors_keep_their_relative_error(spec: QuantSpec, scale: float) -> None:
    x = ordinary() * scale
    y = both(x, spec)
    assert y.isfinite().all()
    unit = x.abs().max()
    assert ((y - x) / unit).norm() < 0.2 * (x / unit).norm()


@specs
def test_denormals_and_the_largest_float_give_finite_values(spec: QuantSpec) -> None:
    for scale in (1e-38, 1e-40, 1e-44):
        x = ordinary() * scale
        assert (both(x, spec).abs() <= 4 * x.abs().max()).all()
    x = ordinary().clamp(-1, 1) * 1.7e38  # below 2^127: beyond it, rounding up may leave float32
    if spec.hadamard is None:  # the transform itself may overflow, and then says so
        assert both(x, spec).isfinite().all()
    x = ordinary()
    x[0] *= 1e-40  # a block of denormals beside ordinary ones
    assert both(x, spec).isfinite().all()


@specs
@pytest.mark.parametrize(
    "shape", [(0, 256), (32, 0), (0, 0), (1, 1), (1, 17), (33, 100), (17, 130)]
)
def test_empty_tensors_and_sizes_that_fill_no_block(
    spec: QuantSpec, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    q = quantize(x, spec, key=KEY, kernel="reference")
    y = both(x, spec)
    assert y.shape == shape
    assert q.codes.shape[0] == shape[0]
    assert (y - x).norm() <= 0.25 * x.norm()


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 2d", "mxfp8", "fp8 tensor", "fp8 2d pow2"])
def test_padding_changes_no_scale_and_no_code(name: str) -> None:
    x = ordinary(40, 72)
    spec = SPECS[name]
    padded = torch.zeros(256, 256)
    padded[:40, :72] = x
    small = quantize(x, spec, kernel="reference")
    large = quantize(padded, spec, kernel="reference")
    assert torch.equal(small.element_codes[:, :72], large.element_codes[:40, :72])
    assert torch.equal(small.dequantize(), large.dequantize()[:40, :72])


@specs
def test_strides_do_not_matter(spec: QuantSpec) -> None:
    x = ordinary(64, 96)
    every_other = torch.stack((x, x), dim=-1)[..., 0]
    for strided in (x.T.contiguous().T, every_other, x.flip(0).flip(0)):
        assert torch.equal(both(strided, spec), both(x, spec))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.tensor(1.0),
            "x has 0 dimensions (): quantize takes [rows, cols]; use x.reshape(1, -1)",
        ),
        (
            torch.zeros(16),
            "x has 1 dimensions (16,): quantize takes [rows, cols]; use x.reshape(1, -1)",
        ),
        (
            torch.zeros(2, 3, 4, 16),
            "x has 4 dimensions (2, 3, 4, 16): quantize takes [rows, cols]; use x.reshape(-1, x",
        ),
        (
            torch.zeros(2, 16, dtype=torch.int32),
            "x.dtype=torch.int32: quantize takes float32, bfloat16 and float16",
        ),
        (torch.zeros(2, 16, dtype=torch.float64), "x.dtype=torch.float64: quantize takes float32"),
        (torch.zeros(2, 16, dtype=torch.bool), "x.dtype=torch.bool: quantize takes float32"),
    ],
)
@pytest.mark.parametrize("function", [quantize, quantize_dequantize])
def test_other_shapes_and_dtypes_say_what_to_do(function, x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        function(x, QuantSpec())


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"rounding": "stochastic"}, {}, "key=None: rounding='stochastic'"),
        (
            MX,
            {"amax": torch.tensor(1.0)},
            "amax: block=(1, 32) with scale='e8m0' has no global scale",
        ),
        ({}, {"amax": torch.ones(2)}, "amax has 2 values: this spec takes 1"),
        ({"global_scale": "row"}, {"amax": torch.ones(1)}, "amax has 1 values: this spec takes 4"),
        (
            {**FP8, "block": (None, None), "delayed": Delayed()},
            {},
            "amax=None: delayed scaling needs an amax",
        ),
        ({}, {"kernel": "cuda"}, "kernel='cuda' is not one of auto, reference, cpu, triton"),
    ],
)
def test_arguments_that_do_not_fit_the_spec(fields: dict, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(torch.ones(4, 32), QuantSpec(**fields), **arguments)


def test_the_input_is_left_alone_and_gradients_do_not_flow() -> None:
    x = ordinary().requires_grad_()
    before = x.detach().clone()
    for spec in SPECS.values():
        assert not quantize_dequantize(x, spec, key=KEY, kernel="reference").values.requires_grad
    assert torch.equal(x.detach(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@specs
def test_narrow_inputs_quantise_as_their_float32_values(
    spec: QuantSpec, dtype: torch.dtype
) -> None:
    x = ordinary().to(dtype)
    assert torch.equal(both(x, spec), both(x.float(), spec))
