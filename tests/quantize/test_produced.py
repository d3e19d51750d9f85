"""Tensors that are quantised where they are made: the readable functions against torch's operators,
and the codes of the kernels against the reference of those tensors, over several tiles and strips.
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted
from torch import Tensor

from fp4train.quantize import QuantSpec, produced, quantizer

EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours.nan_to_num(7).view(torch.int16), theirs.nan_to_num(7).view(torch.int16))


def test_a_gate_has_the_bits_of_torchs_for_every_number_in_bf16() -> None:
    """The exponential is written out, so that GPUs have its bits, too; what it lacks is no BF16
    ulp.
    """
    ones = torch.ones_like(EVERY)
    gate = EVERY.clone().requires_grad_()
    wanted = F.silu(gate)
    wanted.backward(ones)
    assert same(produced.gated(EVERY, ones), wanted.detach())
    assert gate.grad is not None
    dgate, dup = produced.gate_gradients(ones, EVERY, ones)
    assert same(dgate, gate.grad) and same(dup, wanted.detach())


def test_gradients_of_a_gate_round_where_those_of_torchs_operators_do() -> None:
    torch.manual_seed(0)
    gate, up, dh = (torch.randn(64, 96).bfloat16().requires_grad_() for _ in range(3))
    h = F.silu(gate) * up
    h.backward(dh.detach())
    assert same(produced.gated(gate.detach(), up.detach()), h.detach())
    found = produced.gate_gradients(dh.detach(), gate.detach(), up.detach())
    for ours, theirs in zip(found, (gate.grad, up.grad), strict=True):
        assert theirs is not None and same(ours, theirs)


def test_a_norm_has_the_bits_of_torchs_with_its_factors() -> None:
    torch.manual_seed(0)
    h = torch.randn(64, 96).bfloat16()
    weight = torch.randn(96)
    rstd = (h.float().square().mean(1) + 1e-5).rsqrt()
    theirs = F.rms_norm(h.float(), (96,), weight.bfloat16().float(), 1e-5).bfloat16()
    ulps = (
        produced.normed(h, weight.bfloat16(), rstd).view(torch.int16).int()
        - theirs.view(torch.int16).int()
    )
    assert ulps.abs().max() <= 1 and (ulps != 0).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("row", "kernel", "codes", "reason"),
    [
        (QuantSpec(block=(16, 16)), "auto", True, "no kernel makes both forms"),
        (QuantSpec(), "auto", False, "emulation multiplies its values, not its codes"),
        (QuantSpec(), "reference", True, "kernels that quantise are not Triton's"),
    ],
)
def test_other_pairs_are_refused_with_the_reason(
    row: QuantSpec, kernel: str, codes: bool, reason: str
) -> None:
    device = "cuda" if kernel == "auto" else "cpu"
    pair = quantizer(row, device, kernel), quantizer(QuantSpec(), device, kernel)
    assert reason in str(produced.why_not(*pair, codes=codes))


PROGRAM = """
import torch
from torch.nn.functional import rms_norm
from fp4train.precision import MXFP8, NVFP4, FP8Current
from fp4train.quantize import RandomKey, quantizer, triton_launch
from fp4train.quantize.produced import SourceTensors, norm_backward, produce
launched, launch = [], triton_launch.Launch.__call__
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted
def keys(layer):
    return tuple(RandomKey(seed=5 << 33, step=1, layer=layer, operand=i, row_offset=8 * i) for i in (3, 4))
torch.manual_seed(0)
h, gate, up, dh, change = (torch.randn(70, 2 * 264).bfloat16()[:, ::2].contiguous() for _ in range(5))
weight, rstd = torch.randn(264), torch.empty(70)
gate[2, 3] = torch.nan
for recipe, without in ((NVFP4(), ()), (MXFP8(), ("root", "gate")), (FP8Current(), ())):
    table = recipe.table()
    x, dy = (table["fprop"].first, table["wgrad"].second), (table["dgrad"].first, table["wgrad"].first)
    for source, specs, drawn in (
        (SourceTensors("norm", (h, weight, rstd), 1e-5), x, [(None, None)]),
        (SourceTensors("norm", (torch.empty_like(h), weight, rstd, h, change), 1e-5), x, [(None, None)]),
        (SourceTensors("root", (h, weight, rstd), 0.1), x, [(None, None)]),
        (SourceTensors("gate", (gate, up)), x, [(None, None)]),
        (SourceTensors("gradients", (dh, gate, up)), dy, [keys(7), keys(9)]),
    ):
        if source.kind in without:  # another form of the rows and columns, of the same sources
            continue
        launched.clear()
        made = produce(*(quantizer(spec, "cpu", "triton") for spec in specs), source, drawn)
        for forms, values, key in zip(made, source.values(), drawn):
            for ours, spec, tensor, bits in zip(forms, specs, (values, values.T), key):
                theirs = quantizer(spec, "cpu", "reference").codes(tensor, bits)
                assert torch.equal(ours.codes, theirs.codes), (recipe.name, source.kind)
                assert torch.equal(ours.scales.nan_to_num(), theirs.scales.nan_to_num()), (recipe.name, source.kind)
                pairs = [(ours.amax, theirs.amax), (ours.global_decode(), theirs.global_decode())]
                assert all(a is b or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        if len(source.tensors) > 3:
            assert torch.equal(source.tensors[0], h + change)
        mean = source.tensors[0].double().square().mean(1)
        factors = {"norm": (mean + 1e-5).rsqrt(), "root": 1 / (mean.sqrt() + 0.1)}.get(source.kind)
        assert factors is None or (rstd / factors - 1).abs().max() < 2**-21
        print(recipe.name, source.kind, len(source.tensors), *launched)
        if recipe.name == "MXFP8":
            turned = produce(*(quantizer(spec, "cpu", "triton").in_tiles for spec in specs), source, drawn, True)
            for forms, values in zip(turned, source.values()):
                theirs = quantizer(specs[1], "cpu", "reference").codes(values.T)
                assert torch.equal(forms[1].codes.view(torch.uint8), theirs.codes[:, :70].T), source.kind
                ours = forms[1]._replace(codes=theirs.codes)
                scales = [each.block_scales().nan_to_num(-1) for each in (ours, theirs)]
                assert torch.equal(*scales), source.kind
h[5] = 0
def within(x, w):
    return rms_norm(x, (264,), w, 1e-5)
def outside(x, w):  # of a vector of zeros the norm has no gradient
    return w * (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) / 264**0.5 + 0.1))
for norm, rounded, rstd, eps in (
    (within, weight.bfloat16(), (h.float().square().mean(1) + 1e-5).rsqrt(), 0.0),
    (outside, weight, (h.float().square().mean(1).sqrt() + 0.1).reciprocal(), 0.1),
):
    exact = h.double().requires_grad_(), rounded.double().requires_grad_()
    norm(*exact).backward(dh.double())
    made = norm_backward(dh, h, weight, rstd, eps)
    for ours, theirs, error in zip(made, (exact[0].grad, exact[1].grad), (2**-8, 2**-20)):
        assert (ours - theirs).abs().max() <= error * theirs.abs().max(), eps
    summed = norm_backward(dh, h, weight, rstd, eps, gate)
    assert torch.equal(summed[0].nan_to_num(), (made[0] + gate).nan_to_num()) and torch.equal(summed[1], made[1])
"""


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_codes_are_those_of_the_reference_over_tiles_and_strips_in_the_interpreter() -> None:
    """NVFP4 with Hadamard and random bits; MXFP8, also with the columns' codes as x lies; FP8 with
    one scale; NaN; sizes that fill no tile; norms of a sum, which is torch's; and gradients of both
    norms, and their sum with another one, which is torch's, too.
    """
    run = interpreted("-c", PROGRAM)
    assert run.stdout.splitlines() == [
        "NVFP4 norm 3 amax_produced quantize_produced",
        "NVFP4 norm 5 amax_produced quantize_produced",
        "NVFP4 root 3 amax_produced quantize_produced",
        "NVFP4 gate 2 amax_produced quantize_produced",
        "NVFP4 gradients 3 amax_produced quantize_produced",
        "MXFP8 norm 3 quantize_produced",
        "MXFP8 norm 5 quantize_produced",
        "MXFP8 gradients 3 quantize_produced",
        "FP8Current norm 3 amax_produced turned_produced",
        "FP8Current norm 5 amax_produced turned_produced",
        "FP8Current root 3 amax_produced turned_produced",
        "FP8Current gate 2 amax_produced turned_produced",
        "FP8Current gradients 3 amax_produced turned_produced",
    ], run.stdout + run.stderr
