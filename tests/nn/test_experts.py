"""Groups of weights against their oracle, a loop of linear layers: equal in every bit, in
recipes of every part.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import adding
import pytest
import torch
from configured import recipe_named
from covering import COVERING
from linear_layers import own_channels
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn import Experts, Linear
from fp4train.parallel.tensor import tensor_cut_of
from fp4train.parameters import ParameterSpec, Split
from fp4train.precision import BF16, NVFP4, FP8Delayed, Recipe, autocast, recompute

EXPERTS = 4
K = 48
N = 40
COUNTS = [5, 0, 17, 33]
ROWS = sum(COUNTS) + 6
TELLING = (
    "averis",
    "chon",
    "fp8_block",
    "fp8_delayed",
    "mxfp4_backward",
    "nvfp4_tiles",
    "tetrajet_v2_outliers",
)
"""Of `COVERING`, one of each kind of products: of two terms, cut residuals, histories, parts in high
precision, scales of tiles, channels apart.
"""


@cache
def recipe_of(name: str) -> Recipe:
    """A recipe by its name; outlier channels are chosen in the first step, a few of the K."""
    recipe = recipe_named(name)
    if recipe.outliers is None:
        return recipe
    return replace(recipe, outliers=replace(recipe.outliers, start=0, steps=1, multiple=8))


class Loop(nn.Module):
    """The oracle: a linear layer for each expert, with the names that the experts' random keys
    document.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.up = nn.ModuleList(
            nn.Linear(K, N, bias=experts.bias is not None) for _ in range(EXPERTS)
        )
        for number, linear in enumerate(self.up):
            linear.weight.data.copy_(experts.weight[number])
            if experts.bias is not None:
                linear.bias.data.copy_(experts.bias[number])

    def forward(self, x_MK: Tensor, counts: Sequence[int]) -> Tensor:
        parts = x_MK[: sum(counts)].split(list(counts))
        y = torch.cat([linear(part) for linear, part in zip(self.up, parts, strict=True)])
        return torch.cat([y, y.new_zeros(len(x_MK) - len(y), N)])

    def gradients(self) -> list[Tensor]:
        """Of the weights, and of the biases if there are any, one expert after the other."""
        each = [[p.grad for p in linear.parameters() if p.grad is not None] for linear in self.up]
        return [torch.stack(gradients) for gradients in zip(*each, strict=True)]


def pair(*, bias: bool = False) -> tuple[Experts, Loop]:
    torch.manual_seed(0)
    experts = Experts(EXPERTS, K, N, bias)
    experts.rename(replace(experts.layer, name="up"), "auto")
    loop = Loop(experts)
    f4.convert(loop)
    return experts, loop


def x_with_a_tail() -> Tensor:
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[sum(COUNTS) :] = torch.nan
    return x


def two_steps(
    model: nn.Module, recipe: Recipe, counts: Sequence[int] = COUNTS, choice: Experts | None = None
) -> list[Tensor]:
    """Outputs and gradients of two microbatches in each of two steps.

    Args:
        choice: whose outlier channels the layers take from the second step on; None: their own.
    """
    found = []
    for step in range(2):
        model.zero_grad()
        if step and choice is not None:
            for layer in model.up:  # type: ignore[union-attr]
                layer.load_scaling_state(choice.scaling_state())  # type: ignore[operator]
        for _ in range(2):
            x = x_with_a_tail().requires_grad_()
            with autocast(recipe, seed=3, step=step):
                y = model(x, counts)
            y.float().square().sum().backward()
            assert x.grad is not None
            found += [y.detach(), x.grad]
        own = [p.grad for p in model.parameters() if p.grad is not None]
        found += model.gradients() if isinstance(model, Loop) else own
    return found


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        *(
            pytest.param(name, True, marks=[pytest.mark.long] * (name not in TELLING))
            for name in COVERING
        ),
        ("bf16", False),
        ("nvfp4", False),
        ("fp16", False),
    ],
)
def test_experts_equal_a_loop_of_linears_in_every_bit_in_recipes_of_every_part(
    name: str, sums: bool
) -> None:
    experts, loop = pair(bias=True)
    for layer in (experts, *loop.up):
        layer.sum_gradients(sums)  # type: ignore[operator, union-attr]
    recipe = recipe_of(name)
    found = two_steps(experts, recipe)
    expected = two_steps(loop, recipe, choice=None if recipe.outliers is None else experts)
    assert (len(own_channels(experts)) == experts.in_features) == (recipe.outliers is None)
    assert len(found) == len(expected)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "recipe", [BF16(), NVFP4().with_high_precision("wgrad")], ids=["all", "wgrad"]
)
def test_dw_of_an_expert_is_added_to_its_gradient_within_its_product(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """From the second microbatch of each step on, as on a GPU; experts without tokens have no
    product.
    """
    added = adding.begin(monkeypatch)
    found = []
    for in_product in (False, True):
        experts, _ = pair(bias=True)
        experts.sum_gradients(True, in_product=in_product)
        found.append(two_steps(experts, recipe))
        assert added == [(N, K)] * 2 * sum(map(bool, COUNTS)) * in_product
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
    before = experts.weight.grad.clone()
    with autocast(recipe, seed=3, step=1):
        y = experts(x_with_a_tail(), COUNTS)
    (given,) = torch.autograd.grad(y.float().square().sum(), experts.weight)
    assert (
        torch.equal(experts.weight.grad, before)
        and given.any()
        and len(added) == 2 * sum(map(bool, COUNTS))
    )


@pytest.mark.parametrize(
    "counts",
    [[0, 0, 0, 0], [0, 55, 0, 0], torch.tensor([1, 2, 3, 4])],
    ids=["none", "one", "tensor"],
)
def test_counts_of_any_kind_leave_the_tail_out(counts: Sequence[int]) -> None:
    experts, loop = pair()
    found = two_steps(experts, NVFP4(), counts)
    expected = two_steps(loop, NVFP4(), list(map(int, counts)))
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert not found[0][int(sum(counts)) :].any() and not found[1][int(sum(counts)) :].any()


def test_outside_of_a_context_experts_are_torchs_linear_layers() -> None:
    experts, loop = pair(bias=True)
    for dtype in (torch.float32, torch.bfloat16):
        x = x_with_a_tail().to(dtype)
        assert torch.equal(experts.to(dtype)(x, COUNTS), loop.to(dtype)(x, COUNTS))


def test_recomputed_experts_draw_the_bits_of_the_first_pass() -> None:
    experts, _ = pair()
    found = []
    for again in (False, True):
        experts.zero_grad()
        x = x_with_a_tail().requires_grad_()
        with autocast(NVFP4()):
            y = recompute(experts, x, COUNTS) if again else experts(x, COUNTS)
        y.float().square().sum().backward()
        found.append([y.detach(), x.grad, experts.weight.grad])
        experts = pair()[0]
    assert all(torch.equal(*each) for each in zip(*found, strict=True))  # type: ignore[arg-type]


def test_a_copy_and_a_checkpoint_of_amax_histories_go_on_alike() -> None:
    experts, _ = pair()
    two_steps(experts, FP8Delayed())
    twin = copy.deepcopy(experts)
    other = pair()[0]
    other.load_scaling_state(experts.scaling_state())
    results = [two_steps(each, FP8Delayed()) for each in (experts, twin, other)]
    for found in results[1:]:
        assert all(torch.equal(*each) for each in zip(found, results[0], strict=True))
    assert "history.dy.3" in experts.scaling_state()


@pytest.mark.parametrize(
    ("input", "counts", "said"),
    [
        (torch.zeros(8, K), [1, 2, 3], "3 counts for 4 experts"),
        (torch.zeros(8, K), [1, 2, 3, 3], "at most the 8 rows of the input"),
        (torch.zeros(8, K), [9, -1, 0, 0], "at least 0"),
        (torch.zeros(8, K), torch.ones(4), "must be integers, not torch.float32"),
        (torch.zeros(2, 4, K), [1, 1, 1, 1], "must be a matrix"),
        (torch.zeros(8, K + 1), [1, 1, 1, 1], f"does not end in in_features={K}"),
    ],
)
def test_rows_and_counts_that_do_not_fit_are_refused(
    input: Tensor, counts: Sequence[int], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        pair()[0](input, counts)


def test_sizes_that_make_no_group_are_refused() -> None:
    with pytest.raises(ValueError, match="per_token=5 between 1 and experts"):
        Experts(4, K, N, per_token=5)


def test_outlier_channels_of_experts_are_those_of_a_layer_with_the_rows_of_all() -> None:
    """Rows after those of the experts count for nothing, an expert without rows neither."""
    experts = pair()[0]
    alone = f4.convert(nn.Linear(K, N))
    assert isinstance(alone, Linear)
    recipe = recipe_of("tetrajet_v2_outliers")
    two_steps(experts, recipe)
    for _ in range(2):
        with autocast(recipe, seed=3, step=0):
            alone(x_with_a_tail()[: sum(COUNTS)])
    assert (
        experts.scaling_state().keys()
        == alone.scaling_state().keys()
        == {"outliers.norms", "outliers.steps"}
    )
    assert all(
        torch.equal(each, alone.scaling_state()[name])
        for name, each in experts.scaling_state().items()
    )


def test_recomputed_experts_choose_outlier_channels_once_and_repeat_the_bits() -> None:
    class Again(nn.Module):
        def __init__(self, inner: Experts) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x_MK: Tensor, counts: Sequence[int]) -> Tensor:
            return recompute(self.inner, x_MK, counts)

    recipe = recipe_of("tetrajet_v2_outliers")
    plain = pair()[0]
    again = pair()[0]
    found = two_steps(Again(again), recipe)
    expected = two_steps(plain, recipe)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
    assert all(
        torch.equal(each, plain.scaling_state()[name])
        for name, each in again.scaling_state().items()
    )


def test_a_cut_that_does_not_say_which_ranks_have_which_experts_is_refused() -> None:
    model: Any = nn.ModuleDict({"up": pair()[0]})
    model.fp4train_parameters = lambda: [ParameterSpec(name="up.weight", cut=Split.OUT)]
    with pytest.raises(
        TypeError, match=r"up has experts, and fp4train_parameters of ModuleDict says otherwise"
    ):
        tensor_cut_of(model, 2)
