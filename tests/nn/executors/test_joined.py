"""Sums of products as one product: its operands in BF16 hold every term, to float32's rounding."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from pretended import Machine
from torch import Tensor

from fp4train.nn.executors import Outer, Term, without_mean
from fp4train.nn.executors.joined import COLUMNS, joined, parts_of
from fp4train.quantize import Decoded

ROWS, COLUMNS_OF_B = 48, 40


@pytest.fixture(autouse=True, scope="module")
def instructions_for_bf16() -> Iterator[None]:
    """Operands are joined as on a CPU with instructions for BF16, whatever this one has."""
    with pytest.MonkeyPatch.context() as patch:
        Machine(patch).lacks_instructions_for()
        yield


def normal(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def operands(columns: int, scales: tuple[float | None, float | None] = (None, None)) -> Term:
    """Two operands in BF16 with these scales."""
    first, second = (None if scale is None else torch.tensor(scale) for scale in scales)
    return (
        Decoded(normal(ROWS, columns, 1).bfloat16(), first),
        Decoded(normal(COLUMNS_OF_B, columns, 2).bfloat16(), second),
    )


def exact(term: Term) -> Tensor:
    total = term[0].values.double() @ term[1].values.double().T
    for operand in term:
        if operand.scale is not None:
            total = total * operand.scale.double()
    return total


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.lists(st.sampled_from([None, 1e-12, 3e-5, 1.0, 7e8]), min_size=4, max_size=4),
    st.sampled_from(["none", "ones", "vector"]),
)
def test_joined_operands_hold_the_sum_of_all_terms(
    columns: int, more: int, scales: list[float | None], outer: str
) -> None:
    first, second, third, fourth = (1.0 if scale is None else scale for scale in scales)
    assume(third * fourth / (first * second) < 1e37)  # beyond, none are joined
    main = operands(columns, (scales[0], scales[1]))
    terms = [main, operands(more, (scales[2], scales[3]))]
    if outer != "none":
        size = float(exact(main).abs().max())
        column = normal(ROWS, 1, 3).flatten() if outer == "vector" else None
        terms.append(Outer(column, size * normal(COLUMNS_OF_B, 1, 4).flatten()).operands(ROWS))
    both = joined(terms)
    assert both is not None
    assert all(operand.values.dtype is torch.bfloat16 for operand in both)
    assert all(operand.values.shape[1] % COLUMNS == 0 for operand in both)
    total = sum(map(exact, terms))
    magnitude = sum(exact(as_magnitudes(term)) for term in terms)
    assert bool(((exact(both) - total).abs() <= 2.0**-22 * magnitude).all())


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, ROWS),
    st.integers(0, ROWS),
    st.sampled_from([None, 3e-5]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_joined_rows_do_not_depend_on_which_rows_are_beside_them(
    bound: int, other_bound: int, scale: float | None, dtype: torch.dtype
) -> None:
    """A mean and a residual are those of all rows; the rows of x are cut anywhere."""
    start, stop = sorted((bound, other_bound))
    row = normal(COLUMNS_OF_B, 1, 4).flatten()
    main, (residual, factor) = operands(33, (scale, None)), operands(5, (scale, 0.3))
    residual = Decoded(residual.values.to(dtype) * 1.001, residual.scale)

    def of_rows(start: int, stop: int) -> Term | None:
        first, second = (
            Decoded(operand.values[start:stop], operand.scale) for operand in (main[0], residual)
        )
        outer = Outer(None, row).operands(stop - start)
        return joined([(first, main[1]), outer, (second, factor)])

    whole = of_rows(0, ROWS)
    part = of_rows(start, stop)
    assert whole is not None and part is not None
    assert torch.equal(part[0].values, whole[0].values[start:stop])
    assert torch.equal(part[1].values, whole[1].values)


def as_magnitudes(term: Term) -> Term:
    first, second = (Decoded(operand.values.abs(), operand.scale) for operand in term)
    return first, second


def test_a_float32_number_is_the_sum_of_three_in_bf16() -> None:
    values = torch.cat([normal(64, 64, 5).flatten() * 2.0**power for power in range(-60, 60, 7)])
    assert torch.equal(sum(part.double() for part in parts_of(values)), values.double())


WITHOUT_JOIN = {
    "float32": (Decoded(torch.ones(4, 8), None), Decoded(torch.ones(4, 8), None)),
    "a scale of rows": (
        Decoded(torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4, 1)),
        Decoded(torch.ones(4, 8, dtype=torch.bfloat16), None),
    ),
    "a scale of zero": (
        Decoded(torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor(0.0)),
        Decoded(torch.ones(4, 8, dtype=torch.bfloat16), None),
    ),
    "a scale under which the term leaves float32": (
        Decoded(torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor(1e-36)),
        Decoded(torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor(1e-6)),
    ),
}


@pytest.mark.parametrize("term", WITHOUT_JOIN.values(), ids=WITHOUT_JOIN.keys())
def test_what_has_no_joined_operands_has_none(term: Term) -> None:
    assert joined([term, Outer(None, torch.ones(4)).operands(4)]) is None


@pytest.mark.parametrize("rows", [(0, 4), (4, 0), (0, 0)])
def test_operands_without_rows_are_joined(rows: tuple[int, int]) -> None:
    a, b = (Decoded(torch.ones(count, 8, dtype=torch.bfloat16), None) for count in rows)
    both = joined([(a, b), Outer(None, torch.ones(rows[1])).operands(rows[0])])
    assert both is not None and [len(operand.values) for operand in both] == list(rows)


def test_a_term_that_is_not_finite_is_not_joined() -> None:
    ones = torch.ones(4, 8, dtype=torch.bfloat16)
    for number in (torch.inf, torch.nan):
        row = torch.tensor([1.0, number, 1.0, 1.0])
        terms = [(Decoded(ones, None), Decoded(ones, None)), Outer(None, row).operands(4)]
        assert joined(terms) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(-120, 100), st.booleans())
def test_the_mean_is_subtracted_in_float32_and_rounded_once(
    rows: int, columns: int, power: int, transposed: bool
) -> None:
    x = (normal(rows, columns, 6) * 2.0**power).bfloat16()
    if transposed:
        x = x.T
    mean = x.float().mean(0) + 2.0**power
    expected = (x.float() - mean).bfloat16()
    assert torch.equal(without_mean(x, mean).view(torch.int16), expected.view(torch.int16))
