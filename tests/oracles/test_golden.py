"""Every golden variant, every byte: NVFP4 and FP8 as TE computes them, MX as torchao does, and the
hardware layout.
"""

import pytest
import torch
from golden import REDUCED, load_golden

from fp4train.quantize import (
    Hadamard,
    QuantSpec,
    quantize,
    quantize_dequantize,
    swizzle_scales,
    unswizzle_scales,
)

NVFP4_SPECS = {
    "1d": QuantSpec(),
    "1d_rht": QuantSpec(hadamard=Hadamard()),
    "1d_rht_nosign": QuantSpec(hadamard=Hadamard(signs="none")),
    "2d": QuantSpec(block=(16, 16)),
    "1d_rowscaled": QuantSpec(global_scale="row"),
    "1d_4over6_mae_256": QuantSpec(four_over_six="mae", global_bound=256),
    "1d_4over6_mse_448": QuantSpec(four_over_six="mse"),
    "2d_4over6_mse_256": QuantSpec(block=(16, 16), four_over_six="mse", global_bound=256),
}
FP8_BLOCKS = {"tensor": (None, None), "1x128": (1, 128), "128x128": (128, 128)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that tells -0.0 from 0.0 and takes NaN as equal to itself."""
    as_int = {torch.float32: torch.int32, torch.bfloat16: torch.int16}.get(a.dtype, a.dtype)
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(as_int), b.contiguous().view(as_int)
    )


def assert_operand_equals_codes(x: torch.Tensor, spec: QuantSpec, q) -> None:
    fused = quantize_dequantize(x, spec, kernel="reference")
    stored = q.decoded()
    assert same_bits(fused.values, stored.values)
    assert (fused.scale is None) == (stored.scale is None)
    assert fused.scale is None or same_bits(fused.scale, stored.scale)


@pytest.mark.parametrize("variant", NVFP4_SPECS)
def test_nvfp4_equals_te_reference(variant: str) -> None:
    tensors, lists = load_golden("nvfp4_reference")
    chosen = [case["id"] for case in lists["cases"] if variant in case["variants"]]
    assert chosen
    for case in chosen:
        x = tensors[f"{case}.x"]
        prefix = f"{case}.{variant}."
        # TE transforms the column-wise half only.
        row_spec = QuantSpec() if "rht" in variant else NVFP4_SPECS[variant]
        for suffix, operand, spec in (("", x, row_spec), ("_t", x.T, NVFP4_SPECS[variant])):
            q = quantize(operand, spec, kernel="reference")
            scales = q.scales.repeat_interleave(spec.block[0], dim=0)
            assert torch.equal(q.codes, tensors[prefix + "codes" + suffix]), (case, suffix)
            assert torch.equal(scales, tensors[prefix + "scales" + suffix]), (case, suffix)
            assert same_bits(q.amax.reshape(-1), tensors[prefix + "amax" + suffix]), (case, suffix)
            assert_operand_equals_codes(operand, spec, q)


@pytest.mark.parametrize("mode", ["floor", "rceil", "even", "ceil"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_mx_equals_torchao(element: str, mode: str) -> None:
    tensors, lists = load_golden("mx_reference")
    spec = QuantSpec(
        element=element, block=(1, 32), scale="e8m0", scale_rounding=mode, global_scale=None
    )
    for case in (case["id"] for case in lists["cases"]):
        x = tensors[f"{case}.x"]
        prefix = f"{case}.{element}_{mode}."
        q = quantize(x, spec, kernel="reference")
        assert torch.equal(q.codes, tensors[prefix + "codes"]), case
        assert torch.equal(q.scales, tensors[prefix + "scales"]), case
        assert same_bits(q.dequantize(), tensors[prefix + "dequantized"]), case
        assert_operand_equals_codes(x, spec, q)


@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("block", FP8_BLOCKS)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_equals_te_reference(element: str, block: str, scale: str) -> None:
    tensors, lists = load_golden("fp8_reference")
    spec = QuantSpec(element=element, block=FP8_BLOCKS[block], scale=scale, global_scale=None)
    for case in (case["id"] for case in lists["cases"]):
        x = tensors[f"{case}.x"]
        prefix = f"{case}.{element}_{block}_{scale}."
        for suffix, operand in (("", x), ("_t", x.T)):
            if prefix + "codes" + suffix not in tensors:
                continue
            q = quantize(operand, spec, kernel="reference")
            scales = tensors[prefix + "scale_inv" + suffix]
            assert torch.equal(
                q.codes[:, : operand.shape[1]], tensors[prefix + "codes" + suffix]
            ), (case, suffix)
            assert same_bits(q.scales.reshape(scales.shape), scales), (case, suffix)
            assert_operand_equals_codes(operand, spec, q)


def test_layout_equals_quantise_kernel_contract() -> None:
    tensors, lists = load_golden("nvfp4_layout_reference")
    for case in (case["id"] for case in lists["cases"]):
        q = quantize(tensors[f"{case}.a"].float(), QuantSpec(formula="te2.13"), kernel="reference")
        assert torch.equal(2688 / q.amax.reshape(1), tensors[f"{case}.sf_g"]), case
        assert torch.equal(q.codes, tensors[f"{case}.q"]), case
        scale = swizzle_scales(q.scales)
        assert torch.equal(scale, tensors[f"{case}.scale"]), case
        linear = tensors[f"{case}.scale_linear"]
        assert torch.equal(unswizzle_scales(scale, *linear.shape), linear), case


MX_VARIANTS = {
    f"{e}_{m}"
    for e in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
    for m in ("floor", "rceil", "even", "ceil")
}
FP8_VARIANTS = {
    f"{e}_{block}_{scale}"
    for e in ("e4m3", "e5m2")
    for block in FP8_BLOCKS
    for scale in ("fp32", "pow2")
}


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("nvfp4_reference", set(NVFP4_SPECS)),
        ("mx_reference", MX_VARIANTS),
        ("fp8_reference", FP8_VARIANTS),
    ],
)
def test_the_set_of_every_clone_has_every_variant_and_its_metadata_says_what_it_holds(
    name: str, variants: set[str]
) -> None:
    tensors, lists = load_golden(name, REDUCED)
    assert {variant for case in lists["cases"] for variant in case["variants"]} == variants
    assert {key.split(".")[0] for key in tensors} == {
        case["id"] for each in lists.values() for case in each
    }
    for case in lists["cases"]:
        found = {key.split(".")[1] for key in tensors if key.startswith(f"{case['id']}.")}
        assert found == {"x", *case["variants"]}
        assert list(tensors[f"{case['id']}.x"].shape) == case["shape"]
    magnitudes = [float(tensors[f"{case['id']}.x"].float().abs().max()) for case in lists["cases"]]
    assert min(magnitudes, default=1) < 1e-3 and max(magnitudes, default=1) > 10, (
        "small and large values"
    )
    assert any((tensors[f"{case['id']}.x"] == 0).any() for case in lists["cases"]), "zeros"


def test_the_set_of_every_clone_is_small() -> None:
    assert sum(file.stat().st_size for file in REDUCED.iterdir()) < 3.2e6
