"""How a model's blocks are shared out over the stages of a pipeline."""

from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import example, given, strategies as st

from fp4train.models.common import share_blocks


def shares(count: int, parts: int) -> Iterator[list[range]]:
    """Every way to cut `count` blocks into `parts`."""
    for cuts in combinations(range(1, count), parts - 1):
        yield [range(start, end) for start, end in pairwise([0, *cuts, count])]


@st.composite
def stacks(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """The costs of blocks, what the last part does besides, and how many parts there are."""
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    return costs, draw(st.integers(0, 20)), draw(st.integers(1, len(costs)))


@given(stacks())
# where the dearest part is the first, the cheapest rest is not the most even one
@example(([9, 1, 7, 3, 4], 0, 4))
@example(([4, 12, 5, 11, 6, 7, 4, 7, 4], 0, 5))
def test_no_other_share_has_a_cheaper_dearest_part_or_is_more_even(
    stack: tuple[list[int], int, int],
) -> None:
    costs, last, parts = stack

    def rank(share: list[range]) -> tuple[int, int, list[int]]:
        spent = [sum(costs[index] for index in part) for part in share]
        spent[-1] += last
        return max(spent), sum(cost * cost for cost in spent), [len(part) for part in share]

    assert rank(share_blocks(costs, last, parts)) == min(map(rank, shares(len(costs), parts)))


def test_equal_blocks_that_divide_are_shared_equally_unless_the_head_outweighs_one() -> None:
    assert share_blocks([3] * 8, 2, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert [len(part) for part in share_blocks([3] * 8, 12, 4)] == [2, 2, 3, 1]


def test_many_stages_take_milliseconds() -> None:
    """A plan that searches for a mesh shares blocks out hundreds of times."""
    assert len(share_blocks([3] * 256, 2, 64)) == 64
