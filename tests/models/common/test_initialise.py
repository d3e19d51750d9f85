"""Initial weights: a pure function of seed, name and position; the same for every way in which a
model is cut.
"""

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from configured import shape_of
from hypothesis import given, strategies as st
from limits import set_limit
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.common import (
    fill_normal,
    materialise,
    why_not_deferred,
)
from fp4train.models.common.initialise import initialise, key_of
from fp4train.models.llama import Llama, LlamaModel
from fp4train.parameters import ONES, ZEROS, Normal, ParameterSpec
from fp4train.quantize import philox4x32

SEED = 5
CPU = torch.device("cpu")


def drawn(shape: tuple[int, ...], *, name: str = "w", std: float = 1.0, seed: int = SEED) -> Tensor:
    into = torch.empty(shape)
    fill_normal(into, shape, (0,) * len(shape), std, key_of(seed, name))
    return into


@given(st.data())
def test_a_slice_of_the_draw_is_the_draw_of_the_slice(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    part = torch.empty(sizes)
    fill_normal(part, shape, offsets, 0.02, key_of(SEED, "w"))
    whole = drawn(shape, std=0.02)
    assert torch.equal(
        part, whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    )


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those of rows nor those within a long row."""
    whole = drawn((7, 50))
    for chunk in (3, 50, 120):
        set_limit(monkeypatch, "elements drawn at a time", chunk)
        assert torch.equal(drawn((7, 50)), whole)


def test_an_element_is_the_quantile_of_its_word() -> None:
    """Against the standard library's quantile, which calls the C library's logarithm."""
    key = key_of(SEED, "blocks.0.wq")
    whole = drawn((3, 10), name="blocks.0.wq", std=0.02)
    for row in range(3):
        for column in range(10):
            counter = (column // 4, row, key.step * 8 + key.operand, key.layer)
            words = philox4x32(tuple(torch.tensor([n]) for n in counter), (SEED, 0))  # type: ignore[arg-type]
            expected = NormalDist().inv_cdf((int(words[column % 4]) + 0.5) / 2**32) * 0.02
            assert float(whole[row, column]) == pytest.approx(expected, rel=1e-7)


def test_the_bits_are_those_of_every_version() -> None:
    assert [float(v).hex() for v in drawn((2, 3), name="embed.weight")[1]] == [
        "0x1.22a4440000000p-1",
        "-0x1.6df2820000000p-1",
        "0x1.43eb5e0000000p-3",
    ]


def test_moments_and_tails_are_those_of_a_normal_distribution() -> None:
    """Each within 5 standard errors of n = 2²⁰ values; the largest between its 1e-4 and 1 − 1e-4
    quantiles.
    """
    z = drawn((1024, 1024)).double()
    n = z.numel()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert float((z**power).mean()) == pytest.approx(expected, abs=5 * math.sqrt(variance / n))
    for quantile in (1e-4, 0.01, 0.075, 0.25, 0.5, 0.925):
        share = float((z < NormalDist().inv_cdf(quantile)).double().mean())
        assert share == pytest.approx(quantile, abs=5 * math.sqrt(quantile * (1 - quantile) / n))
    largest = float(z.abs().max())
    assert NormalDist().inv_cdf(1 - 4.6 / n) < largest < NormalDist().inv_cdf(1 - 5e-5 / n)


def test_no_two_parameters_of_the_largest_preset_share_a_key() -> None:
    with torch.device("meta"):
        model = preset("405b").build(vocab_size=128256, seq_len=8)
    names = [name for name, _ in model.named_parameters()]
    keys = sorted(key_of(SEED, name).words for name in names)
    assert len(names) == 126 * 9 + 3 and all(a != b for a, b in pairwise(keys))


def preset(size: str) -> Llama:
    shape = shape_of(f"llama_{size}")
    assert isinstance(shape, Llama)
    return shape


def small(*, tied: bool = True) -> Llama:
    return Llama(width=32, layers=2, heads=4, kv_heads=2, hidden=48, tied=tied)


def test_the_blocks_of_large_llamas_are_drawn_by_counter() -> None:
    assert {size: preset(size).draw for size in ("tiny", "350m", "1b", "405b")} == {
        "tiny": "torch",
        "350m": "torch",
        "1b": "counter",
        "405b": "counter",
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_born_on_the_meta_device_is_the_one_built_on_the_cpu(tied: bool) -> None:
    torch.manual_seed(SEED)
    built = small(tied=tied).build(vocab_size=60, seq_len=16)
    initialise(built, "counter")
    with torch.device("meta"):
        deferred = f4.convert(small(tied=tied).build(vocab_size=60, seq_len=16))
    materialise(deferred, CPU, seed=SEED)
    assert isinstance(deferred, LlamaModel)
    assert (deferred.head.weight is deferred.embed.weight) == tied
    for (name, a), (again, b) in zip(
        built.named_parameters(), deferred.named_parameters(), strict=True
    ):
        assert name == again and torch.equal(a, b) and b.requires_grad, name
    assert torch.equal(built.cos, deferred.cos) and torch.equal(built.sin, deferred.sin), (
        "the buffers that no state dict has"
    )


def test_weights_by_counter_have_the_spread_of_those_by_torch() -> None:
    models = [small().build(vocab_size=512, seq_len=8) for _ in range(2)]
    initialise(models[1], "counter")
    for (name, a), b in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        if a.dim() == 1:
            assert torch.equal(a, b)
        else:
            assert not torch.equal(a, b) and float(a.std() / b.std()) == pytest.approx(
                1, abs=0.1
            ), name


class Odd(nn.Module):
    """A user's model, with a layer whose draws are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(2, 2, 1)
        self.register_buffer("mask", torch.ones(2))

    def fp4train_parameters(self) -> list[ParameterSpec]:
        return [
            ParameterSpec(name="mix.weight", initial=Normal(1.0)),
            ParameterSpec(name="mix.bias", initial=ZEROS),
            ParameterSpec(name="mask", initial=ONES),
        ]


def test_a_model_that_cannot_be_born_is_told_what_it_lacks() -> None:
    assert "the parameter weight of Linear has no initial values; 2 have none" in str(
        why_not_deferred(nn.Linear(2, 2))
    )
    with pytest.raises(ValueError, match=r"of Linear has no initial values.*: build it on the CPU"):
        materialise(nn.Linear(2, 2), CPU, seed=0)
    incomplete = Odd().to("meta")
    incomplete.fp4train_parameters = lambda: Odd().fp4train_parameters()[:2]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the buffer mask of Odd has no initial values"):
        materialise(incomplete, CPU, seed=0)
    model = Odd().to("meta")
    materialise(model, CPU, seed=0)
    assert bool((model.mix.bias == 0).all()) and bool((model.mask == 1).all())
