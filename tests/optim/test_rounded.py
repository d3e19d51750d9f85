"""AdamW with moments in BF16: torch's but for the rounding, whose mean is the value; its kernels
equal to the bit.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from steps_of_slabs import BOXES, by_c, stepped
from torch import Tensor, nn

from fp4train.kernels import cpu
from fp4train.optim.adamw import AdamW
from fp4train.optim.rounded import MOMENTS, RoundedAdamW, rounded, slabs, update
from fp4train.quantize import RandomKey, random_bits
from fp4train.run.step import clip, step_unless
from fp4train.shards import TensorShard


def model(rows: int = 16, columns: int = 24) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(columns, rows)


def optimizer_of(module: nn.Module, **options: Any) -> RoundedAdamW:
    made = AdamW(moments="bfloat16", **options).build(module)
    assert isinstance(made, RoundedAdamW)
    return made


def give_gradients(*modules: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameters in zip(*(m.parameters() for m in modules), strict=True):
        gradient = torch.randn(parameters[0].shape, generator=generator)
        for parameter in parameters:
            parameter.grad = gradient.clone()


def test_a_step_is_that_of_torch_from_the_same_moments() -> None:
    own = model()
    other = model()
    mine = optimizer_of(own)
    torchs = AdamW().build(other)
    for step in range(4):
        give_gradients(own, other, seed=step)
        if step:
            for state, like in zip(torchs.state.values(), mine.state.values(), strict=True):
                state.update({name: like[name].float() for name in MOMENTS})
            for parameter, like in zip(other.parameters(), own.parameters(), strict=True):
                parameter.data.copy_(like.data)
        mine.step()
        torchs.step()
        for a, b in zip(own.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            for name in MOMENTS:
                found = mine.state[a][name].float()
                exact = torchs.state[b][name]
                assert ((found - exact).abs() <= 2.0**-7 * exact.abs()).all(), (
                    "one of the two neighbours"
                )
    assert {float(state["step"]) for state in mine.state.values()} == {4.0}


def test_over_all_random_bits_the_mean_of_a_rounded_value_is_the_value() -> None:
    """Exactly: the upper half of float32 leaves sixteen bits, and there are sixteen random ones."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    for value in (math.pi, -1.7e-5, 3e30, -1e-38, 1.0, 0.0):
        x = torch.full((1 << 16,), value)
        assert rounded(x, bits).double().mean() == x[0].double()


def test_the_random_bits_of_a_step_are_unbiased_within_five_standard_errors() -> None:
    """One gradient for all 65,536 weights: of both moments the mean over the weights is the exact
    one.
    """
    module = nn.Linear(256, 256, bias=False)
    optimizer = optimizer_of(module)
    module.weight.grad = torch.full((256, 256), 0.0123)
    optimizer.step()
    for name, exact in zip(MOMENTS, (0.0123 * 0.1, 0.0123**2 * 0.05), strict=True):
        found = optimizer.state[module.weight][name].double()
        low = found.min()
        high = found.max()
        assert low < exact < high
        share = (exact - low) / (high - low)
        assert abs(found.mean() - exact) < 5 * (high - low) * (share * (1 - share)).sqrt() / 256


def test_a_moment_follows_gradients_that_rounding_to_nearest_would_lose() -> None:
    """Each step moves v by 2⁻¹⁰ of itself, a quarter of what BF16 tells apart."""
    module = nn.Linear(64, 64, bias=False)
    optimizer = optimizer_of(module, betas=(0.9, 0.999))
    second = []
    for _ in range(40):
        module.weight.grad = torch.full((64, 64), math.sqrt(2.0))
        optimizer.step()
        state = optimizer.state[module.weight]
        if not second:
            state["exp_avg_sq"].fill_(1.0)
        second.append(float(state["exp_avg_sq"].double().mean()))
    exact = 2 - 0.999**39
    assert second[-1] == pytest.approx(exact, abs=0.003) and exact > 1.03


@pytest.mark.parametrize(("shape", "offsets", "held"), BOXES)
def test_a_shard_is_updated_as_its_part_of_the_whole(shape: Any, offsets: Any, held: Any) -> None:
    place = tuple(slice(o, o + h) for o, h in zip(offsets, held, strict=True))
    whole = stepped(update, shape, (0,) * len(shape), shape)
    for all_of_it, part in zip(whole, stepped(update, shape, offsets, held), strict=True):
        assert torch.equal(all_of_it[place], part)


@pytest.mark.parametrize(("shape", "offsets", "held"), BOXES)
def test_the_c_kernel_equals_the_reference_in_every_bit(
    shape: Any, offsets: Any, held: Any
) -> None:
    if cpu.unavailable():
        # tests/house/test_skips.py fails where it could be built
        pytest.skip(str(cpu.unavailable()))
    for mine, reference in zip(
        stepped(by_c, shape, offsets, held), stepped(update, shape, offsets, held), strict=True
    ):
        assert torch.equal(mine, reference)


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)"
)
def test_the_triton_kernel_equals_the_reference_in_the_interpreter() -> None:
    """In a process of its own: Triton decides when a kernel is defined whether it is
    interpreted.
    """
    run = interpreted(str(Path(__file__).parents[1] / "helpers" / "steps_of_slabs.py"))
    assert run.stdout.split() == ["True"] * len(BOXES), run.stdout + run.stderr


def test_a_step_that_failed_changes_nothing_and_gradients_are_divided() -> None:
    module = model()
    other = model()
    optimizer = optimizer_of(module)
    plain = optimizer_of(other)
    give_gradients(module, other)
    before = [p.detach().clone() for p in module.parameters()]
    step_unless(optimizer, torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(
        float(state["step"]) == 0 and not state["exp_avg"].any()
        for state in optimizer.state.values()
    )
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.tensor(4.0)
    step_unless(optimizer, torch.tensor(False), clip(optimizer, gradients, 1.0, norm))
    for parameter in other.parameters():
        assert parameter.grad is not None
        parameter.grad /= norm + 1e-6
    plain.step()
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
    assert not any(hasattr(optimizer, name) for name in ("found_inf", "grad_scale"))


def test_on_a_gpu_torchs_fused_kernel_divides_what_a_pass_of_its_own_clips_on_a_cpu() -> None:
    """`aten::_fused_adamw_` divides by `grad_scale` on both: its CPU kernel stands in for that of a
    GPU.
    """
    modules = model(), model()
    give_gradients(*modules)
    optimizers = [AdamW().build(m) for m in modules]
    gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in modules]
    norm = torch.tensor(7.0)
    assert clip(optimizers[0], gradients[0], 2.0, norm) is None
    on_gpu: Any = [SimpleNamespace(is_cuda=True)]
    divisor = clip(optimizers[1], on_gpu, 2.0, norm)
    for optimizer, given in zip(optimizers, (None, divisor), strict=True):
        step_unless(optimizer, torch.tensor(False), given)
    for a, b in zip(*(m.parameters() for m in modules), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_torchs_kernels_clip_in_a_pass_of_their_own_on_a_gpu_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = AdamW().build(model())
    scaled = list[float]()
    monkeypatch.setattr(
        torch, "_foreach_mul_", lambda gradients, factor: scaled.append(float(factor))
    )
    on_gpu: Any = [SimpleNamespace(is_cuda=True)]
    assert clip(optimizer, on_gpu, 2.0, torch.tensor(4.0), fused=False) is None
    assert scaled == [pytest.approx(0.5)]


def test_an_optimizer_without_a_kernel_gets_gradients_that_are_clipped() -> None:
    parameter = nn.Parameter(torch.ones(4))
    gradients = [torch.ones(4)]
    assert clip(torch.optim.Rprop([parameter]), gradients, 1.0, torch.tensor(2.0)) is None
    torch.testing.assert_close(gradients[0], torch.full((4,), 0.5))


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, RoundedAdamW]]:
    module = model()
    optimizer = optimizer_of(module)
    give_gradients(module)
    optimizer.step()
    yield module, optimizer


def test_moments_are_loaded_in_the_bits_in_which_they_were_saved(
    trained: tuple[nn.Module, RoundedAdamW],
) -> None:
    other = optimizer_of(model())
    other.load_state_dict(trained[1].state_dict())
    for mine, saved in zip(other.state.values(), trained[1].state.values(), strict=True):
        assert float(mine["step"]) == float(saved["step"]) == 1
        assert all(
            mine[name].dtype == torch.bfloat16 and torch.equal(mine[name], saved[name])
            for name in MOMENTS
        )


def test_moments_of_float32_are_rounded_when_loaded_and_those_of_bf16_go_on_in_float32(
    trained: tuple[nn.Module, RoundedAdamW],
) -> None:
    plain = AdamW().build(model())
    plain.load_state_dict(trained[1].state_dict())
    assert {state["exp_avg"].dtype for state in plain.state.values()} == {torch.float32}
    back = optimizer_of(model())
    back.load_state_dict(plain.state_dict())
    for mine, saved in zip(back.state.values(), trained[1].state.values(), strict=True):
        assert all(torch.equal(mine[name], saved[name]) for name in MOMENTS)


def test_weights_in_bf16_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="needs float32 weights, and weight is torch"):
        optimizer_of(nn.Linear(4, 4).bfloat16())
    with pytest.raises(ValueError, match=r"optim\.moments='float16'"):
        AdamW(moments="float16")


def test_a_box_that_cuts_a_middle_dimension_is_a_slab_per_outer_index() -> None:
    box = TensorShard(shape=(4, 6, 8), offsets=(1, 2, 0), tensor=torch.zeros(2, 3, 8))
    assert [(s.rows.start, s.rows.stop, s.row, s.column) for s in slabs(box)] == [
        (0, 3, 8, 0),
        (3, 6, 14, 0),
    ]
    assert slabs(TensorShard(shape=(4, 6), offsets=(4, 0), tensor=torch.zeros(0, 6))) == []


def test_bits_of_the_two_moments_and_of_two_steps_differ() -> None:
    drawn: list[Tensor] = []
    for layer, step in ((1, 1), (2, 1), (1, 2)):
        drawn.append(random_bits(RandomKey(seed=0, step=step, layer=layer, operand=7), 4, 64))
    assert not any(torch.equal(a, b) for a, b in zip(drawn, drawn[1:] + drawn[:1], strict=True))
