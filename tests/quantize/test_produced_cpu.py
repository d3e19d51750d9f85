"""Norms and gates of the C kernels: the bits of torch's operators and of their gradients, on all instruction sets."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.kernels import cpu
from fp4train.kernels.cpu import Machine
from fp4train.quantize import produced_cpu
from fp4train.quantize.produced import SourceTensors
from fp4train.quantize.produced_cpu import norm_backward, values, whole_vectors, why_not

if (missing := cpu.unavailable()) is not None:
    pytest.skip(missing, allow_module_level=True)  # tests/house/test_skips.py fails if this must not be skipped

MACHINES = [Machine(instruction_set=name, threads=threads) for name in cpu.instruction_sets() for threads in (1, 3)]
EVERY = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
SCALES = {"usual": 1.0, "subnormal": 2.0**-130, "tiny": 1e-20, "overflowing": 1e30}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """In every bit, zeros' signs included, but for those of a NaN."""
    both = ours.isnan() & theirs.isnan()
    return torch.equal(ours.view(torch.int16).masked_fill(both, 0), theirs.view(torch.int16).masked_fill(both, 0))


def norm_of_torch(h: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """(y, dh, dweight)."""
    h, weight = h.clone().requires_grad_(), weight.clone().requires_grad_()
    y = F.rms_norm(h, h.shape[-1:], weight, 1e-5)
    return y.detach(), *torch.autograd.grad(y, (h, weight), dy)


def gate_of_torch(gate: Tensor, up: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
    """(h, dgate, dup)."""
    gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    h = F.silu(gate) * up
    return h.detach(), *torch.autograd.grad(h, (gate, up), dh)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_a_norm_has_the_bits_of_torchs(machine: Machine, scale: str) -> None:
    """Widths whose sums have one and more levels, and vectors left over; rows of zeros, and that are not finite."""
    generator = torch.Generator().manual_seed(1)
    for rows, width in ((70, 64), (33, 96), (40, 1024), (9, 1152), (3, 16384 + 64)):
        h, dy = (torch.randn(rows, width, generator=generator) for _ in range(2))
        h = (h * torch.randn(rows, 1, generator=generator).exp() * SCALES[scale]).bfloat16()
        h[0] = 0
        h[1, 5], h[2, width - 1] = torch.inf, torch.nan
        weight = torch.randn(width, generator=generator).bfloat16()
        theirs = norm_of_torch(h, weight, dy.bfloat16())
        rstd = torch.empty(rows)
        ours = (
            *values(SourceTensors("norm", (h, weight, rstd), 1e-5), machine),
            *norm_backward(dy.bfloat16(), h, weight, rstd, machine),
        )
        assert all(map(same, ours, theirs)), (rows, width)


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_a_gate_has_the_bits_of_torchs_for_every_number_and_those_that_are_not_finite(machine: Machine) -> None:
    generator = torch.Generator().manual_seed(2)
    for usual in (False, True):
        gate = EVERY.view(512, 128)
        up, dh = (EVERY[torch.randint(2**16, gate.shape, generator=generator)] for _ in range(2))
        if usual:
            up, dh = (torch.randn(gate.shape, generator=generator).bfloat16() for _ in range(2))
        ours = (
            *values(SourceTensors("gate", (gate, up)), machine),
            *values(SourceTensors("gradients", (dh, gate, up)), machine),
        )
        assert all(map(same, ours, gate_of_torch(gate, up, dh)))


def test_gates_whose_shares_fill_vectors_have_the_bits_of_torchs_on_any_number_of_threads(threads: None) -> None:
    """Those that do not are torch's: its last numbers of a share have another exponential."""
    generator, taken = torch.Generator().manual_seed(3), 0
    for count, rows in product((1, 2, 3, 5), (1, 320, 1001, 1280)):
        torch.set_num_threads(count)
        gate = EVERY[torch.randint(2**16, (rows, 192), generator=generator)]
        if whole_vectors(gate.numel()):
            taken += 1
            up, dh = gate.flip(0), gate.flip(1)
            ours = *values(SourceTensors("gate", (gate, up))), *values(SourceTensors("gradients", (dh, gate, up)))
            assert all(map(same, ours, gate_of_torch(gate, up, dh))), (count, rows)
    assert 8 <= taken < 16
    assert not whole_vectors(4096 * 384 + 32)
    torch.set_num_threads(5)
    assert not whole_vectors(4096 * 384) and whole_vectors(64)


def test_they_run_where_they_have_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says why they do not."""
    assert {why_not(kind, 128) for kind in ("norm", "gate", "gradients")} == {None}
    assert "100 features are no multiple of 64" in str(why_not("norm", 100))
    assert "features of one token are added by several threads" in str(why_not("norm", 1 << 15))
    assert "make no layer_norm" in str(why_not("layer_norm", 128))
    for check in (produced_cpu._norm_is_torchs, produced_cpu._gate_is_torchs):
        check.cache_clear()
    monkeypatch.setattr(
        F, "rms_norm", lambda h, _, weight, eps: (h.double().square().mean(-1) + eps).rsqrt()[:, None] * h * weight
    )
    monkeypatch.setattr(F, "silu", lambda gate: (gate.float() * (1 + 2**-8)).bfloat16())
    for kind in ("norm", "gate"):
        assert f"torch {torch.__version__} rounds otherwise here" in str(why_not(kind, 64))
    monkeypatch.undo()
    for check in (produced_cpu._norm_is_torchs, produced_cpu._gate_is_torchs):
        check.cache_clear()
    monkeypatch.setattr(cpu, "instruction_sets", lambda: ("plain",))
    assert "need AVX2 and FMA" in str(why_not("norm", 64))


def test_the_extension_refuses_what_it_cannot_take() -> None:
    x = torch.zeros(2, 48, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="fused: a job of another size, kind, shape"):
        cpu.fused("gate", (x, x, x), x.shape)
    meta = x.reshape(3, 32).to("meta")
    with pytest.raises((TypeError, RuntimeError)):
        cpu.fused("gate", (meta, meta, meta), meta.shape)
    with pytest.raises(TypeError, match="fused takes 3 arguments"):
        cpu.loaded().fused(b"", 1)
    with pytest.raises(ValueError, match="fused: a job"):
        cpu.loaded().fused(b"", 1, 0)
