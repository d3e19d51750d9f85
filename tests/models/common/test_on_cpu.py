"""Norms, gates and rotations of the C kernels: the bits of torch's operators and of their
gradients, on all instruction sets; which calls are torch's.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from c_calls import counted
from torch import Tensor

from fp4train.kernels import cpu
from fp4train.kernels.cpu import Machine
from fp4train.models.common import OF_TORCH, on_cpu, rotate
from fp4train.models.common.on_cpu import (
    CpuOperators,
    gate_kernel,
    norm,
    norm_gradients,
    rotated,
    whole_vectors,
    why_not,
)

if (missing := cpu.unavailable()) is not None:
    # tests/house/test_skips.py fails if this must not be skipped
    pytest.skip(missing, allow_module_level=True)

MACHINES = [
    Machine(instruction_set=name, threads=threads)
    for name in cpu.instruction_sets()
    for threads in (1, 3)
]
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
SCALES = {"usual": 1.0, "subnormal": 2.0**-130, "tiny": 1e-20, "overflowing": 1e30}
DTYPES = torch.bfloat16, torch.float32


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kinds of what the C kernels made, but for the first comparison with torch's operators."""
    return counted(monkeypatch)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """In every bit, zeros' signs included, but for those of a NaN."""
    both = ours.isnan() & theirs.isnan()
    bits = torch.int16 if ours.dtype is torch.bfloat16 else torch.int32
    return torch.equal(ours.view(bits).masked_fill(both, 0), theirs.view(bits).masked_fill(both, 0))


def of_torch(
    operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, ...]:
    """(y, gradients of the inputs)."""
    inputs = tuple(each.clone().requires_grad_() for each in inputs)
    y = operation(*inputs)
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def gates(gate: Tensor, up: Tensor, dh: Tensor, machine: Machine = cpu.HERE) -> tuple[Tensor, ...]:
    """(h, dgate, dup) of the kernels."""
    kinds: Any = (("gate", gate, up), ("gate_gradients", dh, gate, up))
    return tuple(
        each for kind, *tensors in kinds for each in gate_kernel(kind, *tensors, machine=machine)
    )


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_a_norm_has_the_bits_of_torchs(machine: Machine, scale: str) -> None:
    """Widths whose sums have one and more levels, and vectors left over; rows of zeros, and that
    are not finite.
    """
    generator = torch.Generator().manual_seed(1)
    for rows, width in ((70, 64), (33, 96), (40, 1024), (9, 1152), (3, 16384 + 64)):
        h, dy = (torch.randn(rows, width, generator=generator) for _ in range(2))
        h = (h * torch.randn(rows, 1, generator=generator).exp() * SCALES[scale]).bfloat16()
        h[0] = 0
        h[1, 5] = torch.inf
        h[2, width - 1] = torch.nan
        weight = torch.randn(width, generator=generator).bfloat16()
        dy = dy.bfloat16()
        theirs = of_torch(
            lambda h, weight: F.rms_norm(h, h.shape[-1:], weight, 1e-5), (h, weight), dy
        )
        x, rstd = norm(h, weight, 1e-5, machine)
        dh, products = norm_gradients(dy, h, weight, rstd, machine)
        assert all(map(same, (x, dh, products.sum(0).bfloat16()), theirs)), (rows, width)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_has_the_bits_of_torchs_for_every_number_of_bf16_and_those_that_are_not_finite(
    machine: Machine, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    for usual in (False, True):
        gate = EVERY.view(512, 128)
        up, dh = (EVERY[torch.randint(2**16, gate.shape, generator=generator)] for _ in range(2))
        if usual:
            up, dh = (torch.randn(gate.shape, generator=generator).bfloat16() for _ in range(2))
        gate, up, dh = (
            each.to(dtype) if usual else each.to(dtype) * 1.2345678 for each in (gate, up, dh)
        )
        assert all(map(same, gates(gate, up, dh, machine), of_torch(silu_product, (gate, up), dh)))


@pytest.mark.long
def test_gates_have_the_bits_of_torchs_for_every_thirteenth_number_of_float32() -> None:
    """330 million: each exponent, and mantissas of all kinds."""
    count = 1 << 24
    one = torch.ones(1 << 24)
    for first in range(-(2**31), 2**31 - 13 * count, 13 * count):
        gate = (
            torch.arange(first, first + 13 * count, 13, dtype=torch.int64)
            .to(torch.int32)
            .view(torch.float32)
        )
        (h,) = gate_kernel("gate", gate, one)
        assert same(h, F.silu(gate))


def test_gates_whose_shares_fill_vectors_have_the_bits_of_torchs_on_any_number_of_threads(
    threads: None,
) -> None:
    """Those that do not are torch's: its last numbers of a share have another exponential."""
    generator = torch.Generator().manual_seed(3)
    taken = 0
    for count, rows in product((1, 2, 3, 5), (1, 320, 1001, 1280)):
        torch.set_num_threads(count)
        gate = EVERY[torch.randint(2**16, (rows, 192), generator=generator)]
        if whole_vectors(gate.numel()):
            taken += 1
            up = gate.flip(0)
            dh = gate.flip(1)
            assert all(map(same, gates(gate, up, dh), of_torch(silu_product, (gate, up), dh))), (
                count,
                rows,
            )
    assert 8 <= taken < 16
    assert not whole_vectors(4096 * 384 + 32)
    torch.set_num_threads(5)
    assert not whole_vectors(4096 * 384) and whole_vectors(64)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotation_has_the_bits_and_the_layout_of_torchs(
    machine: Machine, dtype: torch.dtype
) -> None:
    """Of heads that lie beside each other and that do not, angles whose halves differ, numbers that
    are not finite.
    """
    generator = torch.Generator().manual_seed(4)
    for batch, time, heads, width in ((2, 7, 3, 64), (1, 33, 1, 128), (3, 1, 5, 192)):
        x, dy = (
            EVERY[torch.randint(2**16, (batch, time, heads, width), generator=generator)]
            for _ in range(2)
        )
        cos, sin = (torch.randn(time, width, generator=generator).to(dtype) for _ in range(2))
        for beside, q, dq in (
            (True, x, dy),
            (False, x.transpose(1, 2).contiguous().transpose(1, 2), dy.flip(0)),
        ):
            q = q.to(dtype).transpose(1, 2)
            dq = dq.to(dtype).transpose(1, 2)
            y, dx = of_torch(lambda q, cos=cos, sin=sin: rotate(q, cos, sin), (q,), dq)
            ours = rotated("rotation", q, cos, sin, machine=machine)
            strides = [
                [s for s, n in zip(each.stride(), each.shape, strict=True) if n > 1]
                for each in (ours, y)
            ]
            assert same(ours, y) and (not beside or strides[0] == strides[1])
            assert same(rotated("rotation_gradients", dq, cos, sin, machine=machine), dx)


@pytest.mark.parametrize("kind", ["norm", "gate", "rotation"])
def test_the_comparison_with_torch_may_be_the_first_call_of_a_model_in_inference_mode(
    kind: str,
) -> None:
    for check in (on_cpu._norm_is_torchs, *on_cpu._CHECKS.values()):
        check.cache_clear()
    with torch.inference_mode():
        assert why_not(kind, 64, torch.bfloat16) is None


def test_they_run_where_they_have_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says why they do not."""
    kinds = ("norm", "gate", "rotation")
    checks = (on_cpu._norm_is_torchs, on_cpu._gate_is_torchs)
    assert {why_not(kind, 128, torch.bfloat16) for kind in kinds} == {None}
    assert {why_not(kind, 128, torch.float32) for kind in kinds[1:]} == {None}
    assert "in float32 torch adds two parts of a norm's gradient" in str(
        why_not("norm", 128, torch.float32)
    )
    assert "100 features are no multiple of 64" in str(why_not("norm", 100, torch.bfloat16))
    assert "100 features are no multiple of 64" in str(why_not("rotation", 100, torch.bfloat16))
    assert "features of one token are added by several threads" in str(
        why_not("norm", 1 << 15, torch.bfloat16)
    )
    assert "activations are float16" in str(why_not("norm", 64, torch.float16))
    for check in checks:
        check.cache_clear()
    on_cpu._rotation_is_torchs.cache_clear()
    monkeypatch.setattr(
        F,
        "rms_norm",
        lambda h, _, weight, eps: (
            (h.double().square().mean(-1) + eps).rsqrt()[:, None] * h * weight
        ),
    )
    monkeypatch.setattr(F, "silu", lambda gate: (gate.float() * (1 + 2**-8)).to(gate.dtype))
    monkeypatch.setattr(
        on_cpu, "rotate", lambda x, cos, sin: rotate(x.float(), cos, sin).to(x.dtype)
    )
    for kind in kinds:
        assert f"torch {torch.__version__} rounds otherwise here" in str(
            why_not(kind, 64, torch.bfloat16)
        )
    monkeypatch.undo()
    for check in checks:
        check.cache_clear()
    on_cpu._rotation_is_torchs.cache_clear()
    monkeypatch.setattr(cpu, "instruction_sets", lambda: ("plain",))
    assert "need AVX2 and FMA" in str(why_not("norm", 64, torch.bfloat16))
    monkeypatch.setattr(cpu, "unavailable", lambda: "not built")
    assert why_not("norm", 64, torch.bfloat16) == "not built"


def operations(
    operators: Any, x: Tensor, weight: Tensor, angles: tuple[Tensor, ...]
) -> list[Tensor]:
    """A norm, a gate, and rotations of x [2, 8, 1, 64]."""
    q, k = operators.rotate(x, x, *angles)
    return [operators.rms_norm(x, weight, 1e-5), operators.silu_product(x, x.flip(0)), q, k]


ALL = {"norm": 1, "gate": 1, "rotation": 2}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, ALL),
        ({"no_grad": True}, ALL),
        ({"dtype": torch.float16}, {}),
        ({"dtype": torch.float32}, {"gate": 1, "rotation": 2}),
        ({"autocast": True}, {}),
        ({"width": 96}, {"gate": 1}),
        ({"apart": True}, {"norm": 1, "rotation": 2}),
        ({"one angle": True}, {"norm": 1, "gate": 1}),
    ],
    ids=str,
)
def test_a_call_that_they_do_not_take_is_torchs(
    change: dict[str, Any], taken: dict[str, int], calls: Counter[str]
) -> None:
    width = change.get("width", 64)
    dtype = change.get("dtype", torch.bfloat16)
    x = torch.randn(2, 8, 1, 2 * width, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = (x[..., ::2] if "apart" in change else x[..., :width].contiguous()).requires_grad_()
    weight = x.detach()[0, 0, 0]
    angles = tuple(x.detach()[:, 0].expand(2, 1, width))
    angles = tuple(each[:, :1] for each in angles) if "one angle" in change else angles
    with (
        torch.autocast("cpu", enabled="autocast" in change),
        torch.set_grad_enabled("no_grad" not in change),
    ):
        ours = operations(CpuOperators(), x, weight, angles)
        theirs = operations(OF_TORCH, x, weight, angles)
    assert calls == taken
    assert [y.dtype for y in ours] == [y.dtype for y in theirs] and all(
        map(torch.equal, ours, theirs)
    )


def test_a_frozen_weight_has_no_gradient() -> None:
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    weight = torch.ones(64).bfloat16()
    for operators in (CpuOperators(), OF_TORCH):
        (again,) = torch.autograd.grad(
            operators.rms_norm(x, weight, 1e-5).sum(), x, create_graph=True
        )
        (once,) = torch.autograd.grad(operators.rms_norm(x, weight, 1e-5).sum(), x)
        assert torch.equal(once, again)


def test_the_extension_refuses_what_it_cannot_take() -> None:
    x = torch.zeros(2, 48, dtype=torch.bfloat16)
    cases = ("gate", "rotation")
    for kind in cases:
        with pytest.raises(ValueError, match="fused: a job of another size, kind, dtype or shape"):
            cpu.fused(kind, (x, x, x, x), x.shape)
    heads = torch.zeros(2, 64)
    with pytest.raises(ValueError, match="fused: a job of another size, kind, dtype or shape"):
        cpu.fused("norm", (heads,) * 4, heads.shape)
    with pytest.raises(ValueError, match="fused: a job of another size, kind, dtype or shape"):
        cpu.fused("rotation", (heads,) * 4, heads.shape, heads=0)
    meta = x.reshape(3, 32).to("meta")
    with pytest.raises((TypeError, RuntimeError)):
        cpu.fused("gate", (meta, meta, meta), meta.shape)
    with pytest.raises(TypeError, match="fused takes 3 arguments"):
        cpu.loaded().fused(b"", 1)
    with pytest.raises(ValueError, match="fused: a job"):
        cpu.loaded().fused(b"", 1, 0)
    with pytest.raises(ValueError, match="this CPU lacks the instruction set"):
        cpu.loaded().fused(b"", 1, 9)
