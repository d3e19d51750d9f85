"""Norms, gates and rotations of a run on a CPU, in C kernels: a model with them has the bits of one
on torch's operators, whatever its layers read and whatever watches them.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from c_calls import counted
from torch import Tensor

import fp4train as f4
from fp4train.config import TrainSettings
from fp4train.kernels import cpu
from fp4train.models.common import ExpertShape, on_cpu
from fp4train.models.hybrid import Hybrid, ScanShape
from fp4train.models.llama import Llama
from fp4train.models.moe import MixtureOfExperts
from fp4train.precision import BF16, FP32, NVFP4, FP8Current, LayerPolicy, Recipe
from fp4train.run.fuse import fuse

Results = dict[str, Tensor | None]
SMALL = {"width": 128, "heads": 2, "kv_heads": 1, "tied": False}
EXPERTS = ExpertShape(count=2, top=1, hidden=32, shared=1)
SCAN = ScanShape(heads=32, head_dim=2, state=16, chunk=16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kinds of what the C kernels made, but for the first comparison with torch's operators."""
    if reason := cpu.unavailable():
        pytest.skip(reason)  # tests/house/test_skips.py fails if this must not be skipped
    assert on_cpu.why_not("norm", 128, torch.bfloat16) is None
    return counted(monkeypatch)


def trained(
    recipe: Recipe,
    kernels: str,
    calls: Counter[str],
    change: Any = None,
    family: Any = Llama,
    **options: Any,
) -> Results:
    """Loss and gradients of two microbatches of a small model on this CPU, and the loss of an
    evaluation.
    """
    torch.manual_seed(0)
    llama = {"layers": 2, "hidden": 192} if family is Llama else {}
    model = f4.convert(family(**SMALL | llama | options).build(vocab_size=60, seq_len=32)).train()
    fuse(
        model,
        TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=32, kernels=kernels),
        "cpu",
    )
    if change is not None:
        change(model)
    tokens = torch.randint(60, (2, 32), generator=torch.Generator().manual_seed(1))
    calls.clear()
    policy = LayerPolicy(last=0.5)
    for _ in range(2):
        with f4.autocast(recipe, policy=policy, step=0):
            loss = model(tokens, tokens.flip(1))
        loss.backward()
    with torch.no_grad(), f4.autocast(recipe, policy=policy, step=0):
        evaluated = model.eval()(tokens, tokens.flip(1))
    return {"loss": loss.detach(), "evaluated": evaluated} | {
        name: p.grad for name, p in model.named_parameters()
    }


def of_passes(norms: int, gates: int, rotations: int, forward: int = 3) -> dict[str, int]:
    """Calls of two microbatches with gradients, and of `forward` passes, for what one pass has."""
    names = {"norm": norms, "gate": gates, "rotation": rotations}
    found = {name: forward * count for name, count in names.items()}
    return {
        n: c for n, c in (found | {f"{n}_gradients": 2 * c for n, c in names.items()}).items() if c
    }


OF_TWO_LAYERS = of_passes(5, 2, 4)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in (NVFP4(), FP8Current(), BF16(), FP32())),
        *((NVFP4(), {key: True}) for key in ("recompute", "qk_norm", "qkv_bias")),
        pytest.param(BF16(), {"recompute": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_model_has_the_bits_of_one_on_torchs_operators(
    recipe: Recipe, options: dict[str, Any], calls: Counter[str]
) -> None:
    """Gradients of norms' weights included. The second layer stays in high precision, and the
    head's norm is read by it.
    """
    plain = trained(recipe, "torch", calls, **options)
    assert not calls
    fused = trained(recipe, "auto", calls, **options)
    again = {"norm": 8, "gate": 4, "rotation": 8} if options.get("recompute") else {}
    expected = Counter(of_passes(9, 2, 4) if options.get("qk_norm") else OF_TWO_LAYERS) + Counter(
        again
    )
    if isinstance(recipe, FP32):
        del expected["norm"], expected["norm_gradients"]
    assert calls == expected
    assert different(plain, fused) == []


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        (Hybrid, {"pattern": "M*-", "scan": SCAN}, of_passes(4, 0, 0)),
        (
            MixtureOfExperts,
            {"layers": 2, "dense": 1, "experts": EXPERTS, "hidden": 192},
            of_passes(5, 2, 4),
        ),
    ],
)
@pytest.mark.parametrize("recipe", [NVFP4(), BF16()], ids=lambda recipe: recipe.name)
def test_other_families_have_them_too(
    family: Any,
    options: dict[str, Any],
    expected: dict[str, int],
    recipe: Recipe,
    calls: Counter[str],
) -> None:
    plain = trained(recipe, "torch", calls, family=family, **options)
    fused = trained(recipe, "auto", calls, family=family, **options)
    assert calls == expected
    assert different(plain, fused) == []


def different(one: Results, other: Results) -> list[str]:
    """Names of tensors that are not the same in every bit but those of a NaN."""
    pairs = [(name, a, other[name]) for name, a in one.items()]
    return [
        n
        for n, a, b in pairs
        if a is None or b is None or not torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    ]
