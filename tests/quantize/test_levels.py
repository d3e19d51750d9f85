"""HiF4 and IF4 against their authors' code, and what their scales promise."""

from dataclasses import replace

import pytest
import torch
from golden import REDUCED
from safetensors.torch import load_file

from fp4train.formats import e6m2_decode, e6m2_encode
from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    RandomKey,
    packed_bytes,
    quantised_in_runs,
    quantize,
    quantize_dequantize,
)

HIF4 = QuantSpec(
    element="e1m2", block=(1, 64), scale="hif4", global_scale=None, rounding="nearest_away"
)
IF4 = QuantSpec(scale="if4", formula="te2.13")
KEY = RandomKey(seed=1, step=2, layer=3, operand=4)


def test_hif4_is_the_authors() -> None:
    vectors = load_file(REDUCED / "hif4.safetensors")
    names = [key.removesuffix(".x") for key in vectors if key.endswith(".x")]
    assert len(names) == 7
    for name in names:
        quantised = quantize(vectors[f"{name}.x"], HIF4, kernel="reference")
        assert torch.equal(quantised.dequantize(torch.bfloat16), vectors[f"{name}.y"]), name


@pytest.mark.parametrize("variant", ["rows", "squares"])
def test_if4_is_the_authors(variant: str) -> None:
    """Codes, of integers as sign and magnitude here, scales with their mark, and the amax."""
    vectors = load_file(REDUCED / "if4.safetensors")
    names = [key.removesuffix(".x") for key in vectors if key.endswith(".x")]
    spec = IF4 if variant == "rows" else replace(IF4, block=(16, 16))
    marks = []
    for name in names:
        quantised = quantize(vectors[f"{name}.x"], spec, kernel="reference")
        theirs = vectors[f"{name}.{variant}.scales"]
        ours = quantised.scales.repeat_interleave(spec.block[0], dim=0)
        assert torch.equal(ours, theirs), name
        assert torch.equal(quantised.amax, vectors[f"{name}.{variant}.amax"])
        packed = vectors[f"{name}.{variant}.codes"]
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).to(torch.int32)
        integers = torch.where(codes > 7, codes - 16, codes)
        marked = (theirs >= 128).repeat_interleave(16, dim=1)
        values = torch.where(marked, integers.float(), _e2m1(codes))
        integer_values = quantised.element_values() / IF4.scale_format.step
        assert torch.equal(
            torch.where(marked, integer_values.round(), quantised.element_values()), values
        )
        marks.append(marked.float().mean().item())
    assert 0.1 < sum(marks) / len(marks) < 0.9, "both grids occur"


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.where(codes > 7, -table[codes & 7], table[codes & 7])


def test_e6m2_has_the_values_of_its_fields_and_rounds_to_the_nearest() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    values = e6m2_decode(codes)
    exponents = (codes.int() >> 2) - 48
    assert torch.equal(values, (1 + (codes.int() & 3) / 4) * exponents.float().exp2())
    assert torch.equal(e6m2_encode(values), codes)
    between = (values[:-1] + values[1:]) / 2
    even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    assert torch.equal(e6m2_encode(between), even)
    assert torch.equal(e6m2_encode(between.nextafter(values[1:])), codes[1:])
    ends = torch.tensor([0.0, 1e-30, 1e30, torch.inf, torch.nan])
    assert e6m2_encode(ends).tolist() == [0, 0, 254, 255, 255]
    assert e6m2_decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("rounding", ["nearest", "nearest_away", "stochastic", "stochastic_8"])
@pytest.mark.parametrize(
    "spec", [HIF4, IF4, replace(IF4, block=(16, 16)), replace(IF4, global_scale="row")], ids=str
)
@pytest.mark.parametrize("hadamard", [None, Hadamard()])
def test_codes_decode_to_the_values_that_emulation_multiplies(
    spec: QuantSpec, rounding: str, hadamard: Hadamard | None
) -> None:
    if hadamard is not None and spec.block[0] != 1:
        hadamard = None
    spec = replace(spec, rounding=rounding, hadamard=hadamard)
    x = torch.randn(37, 150, generator=torch.Generator().manual_seed(1)) * 3
    x[:, 7] *= 40
    x[5] = 0
    quantised = quantize(x, spec, key=KEY)
    values = quantize_dequantize(x, spec, key=KEY)
    decoded = quantised.decoded()
    assert torch.equal(values.values, decoded.values)
    assert values.values.dtype == (torch.bfloat16 if spec.scale == "hif4" else torch.float32)
    restored = quantised.restore(key=KEY)
    assert ((restored - x).norm() / x.norm()) < 0.3
    assert torch.equal(values.tensor(torch.float32), decoded.tensor(torch.float32))


def test_a_choice_of_grids_has_no_larger_error_than_either_and_the_published_order() -> None:
    """IF4 of a Gaussian tensor: below both NVFP4 and NVINT4."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))

    def errors(spec: QuantSpec) -> torch.Tensor:
        quantised = quantize(x, spec, kernel="reference")
        return (quantised.dequantize() - x).square().reshape(512, -1, 16).sum(dim=2)

    adaptive = errors(IF4)
    floats = errors(QuantSpec(formula="te2.13"))
    assert (adaptive <= floats * (1 + 1e-5) + 1e-9).all()
    chosen = quantize(x, IF4, kernel="reference").scales >= 128
    assert (adaptive[chosen] < floats[chosen]).all()
    assert adaptive.mean() < 0.85 * floats.mean()
    assert adaptive.mean() < errors(QuantSpec(element="int4", formula="te2.13")).mean()


@pytest.mark.parametrize(
    "spec",
    [
        replace(HIF4, rounding="stochastic"),
        pytest.param(replace(IF4, rounding="stochastic", guard=16 / 17), marks=pytest.mark.long),
    ],
    ids=["hif4", "if4"],
)
def test_stochastic_rounding_is_unbiased_where_nothing_is_clipped(spec: QuantSpec) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    draws = torch.stack(
        [
            quantize(x, spec, key=KEY.replace(step=step), kernel="reference").dequantize()
            for step in range(256)
        ]
    )
    upper = (draws == draws.amax(dim=0)).float().mean(dim=0)
    mixed = (upper > 0.05) & (upper < 0.95)
    z = ((draws.mean(dim=0) - x) / (draws.std(dim=0) / 256**0.5))[mixed]
    assert mixed.float().mean() > 0.7
    assert z.square().mean().item() == pytest.approx(1.0, abs=0.12)
    assert abs(z.mean().item()) < 4 / z.numel() ** 0.5


@pytest.mark.parametrize("spec", [HIF4, IF4], ids=["hif4", "if4"])
def test_nan_and_infinity_are_never_hidden(spec: QuantSpec) -> None:
    for value in (torch.nan, torch.inf):
        x = torch.ones(3, 192)
        x[1, 70] = value
        result = quantize(x, spec).dequantize()
        assert result[1, 64:80].isnan().all()
        if spec is HIF4:
            assert torch.equal(result[0], quantize(torch.ones(1, 192), spec).dequantize()[0])


@pytest.mark.parametrize("spec", [HIF4, IF4], ids=["hif4", "if4"])
def test_a_shard_has_the_bytes_of_its_part_of_the_whole(spec: QuantSpec) -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(4))
    whole = quantize(x, spec)
    amax = whole.amax
    for columns in (False, True):
        extent = 256 if columns else 16
        runs = [(0, extent // 4), (extent // 4, extent - extent // 4)]
        joined = quantised_in_runs(x, spec, KEY, runs, amax, columns=columns)
        assert torch.equal(joined.codes, whole.codes)
        assert torch.equal(joined.scales, whole.scales)


def test_bytes_of_a_matrix() -> None:
    for spec in (HIF4, IF4):
        quantised = quantize(torch.randn(32, 128), spec)
        stored = quantised.codes.nbytes + quantised.scales.nbytes
        assert packed_bytes(spec, 32, 128) == stored == 32 * 128 * 4.5 / 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": "hif4"}, "global_scale='tensor': scale='hif4' spans the whole range; use None"),
        (
            {"scale": "hif4", "global_scale": None},
            "scale='hif4': its levels are those of E1M2 elements in blocks of 64, not of e2m1 in "
            "(1, 16): use element='e1m2' and block=(1, 64)",
        ),
        (
            {"scale": "hif4", "global_scale": None, "element": "e1m2", "block": (64, 64)},
            "use element='e1m2' and block=(1, 64)",
        ),
        (
            {
                "scale": "hif4",
                "global_scale": None,
                "element": "e1m2",
                "block": (1, 64),
                "guard": 0.9,
            },
            "guard=0.9: only scale='e4m3'",
        ),
        ({"scale": "if4", "element": "int4"}, "scale='if4': it chooses between integers and E2M1"),
        ({"scale": "if4", "global_scale": None}, "global_scale=None: scale='if4' covers"),
        ({"scale": "if4", "global_scale": "block"}, "use global_scale='tensor'"),
        ({"scale": "if4", "four_over_six": "mse"}, "use scale='e4m3' or four_over_six=None"),
        ({"scale": "if4", "rounding": "eden", "hadamard": Hadamard()}, "rounding='eden': needs"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        QuantSpec(**fields)
    assert message in str(refused.value)
