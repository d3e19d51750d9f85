"""The rows of a step: where they lie in the data, and in which precision they are run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fp4train.parallel.pipeline import Microbatch
from fp4train.precision import Recipe
from fp4train.precision.context import Context, use
from fp4train.run.run import Run
from fp4train.run.step_graph import Rows


def step_rows(run: Run) -> Iterator[Rows]:
    """This rank's share of the current step's batch, in the rows of one microbatch after another, on the device."""
    size, own = run.config.train.batch_size, run.world.data_rank * run.share
    begin = run.batch * size
    for first in range(own, own + run.share, run.rows):
        then = first + run.rows
        # After the last row of its share a rank goes on with the first one of the next step's.
        then = begin + (then if then < own + run.share else own + size)
        yield run.feed.rows(begin + first, run.rows, then=then)


def microbatches(run: Run, recipe: Recipe, rows: Iterable[Rows]) -> Iterator[Microbatch]:
    """The microbatches of `rows`, with the place of each in the whole batch."""
    own = run.world.data_rank * run.share
    for first, each in zip(range(own, own + run.share, run.rows), rows, strict=True):
        last = first + run.rows == own + run.share
        offset = first * run.config.train.seq_len
        yield microbatch(run, recipe, *each, token_offset=offset, last=last, applied=True)


def microbatch(
    run: Run,
    recipe: Recipe,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    *,
    token_offset: int = 0,
    last: bool = True,
    applied: bool = False,
) -> Microbatch:
    """Rows to be run in `recipe`; `applied`: its plan is that of the model's layers, else they resolve it."""

    @contextmanager
    def context() -> Iterator[None]:
        now = Context(
            recipe=recipe,
            policy=run.config.policy,
            seed=run.config.run.seed,
            step=run.step,
            token_offset=token_offset,
            counters=run.counters,
            applied=applied,
        )
        with use(now), run.region():
            yield

    return Microbatch(
        tokens_BT=tokens_BT.to(run.device),
        targets_BT=targets_BT.to(run.device),
        context=context,
        dtype=recipe.torch_dtype,
        last=last,
    )
