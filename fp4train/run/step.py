"""An optimizer step on the device: its rows, the passes of its microbatches, and the update.

A step is queued as a whole, and the host waits for nothing. Two runners queue it: `EagerSteps`
here, kernel by kernel, and `RecordedSteps` (`step_graph.py`), which replays what it recorded of
these.

The gradient norm is that over all ranks,

    norm = sqrt(Σ_p Σ_i g_pi²)

Each rank sums the squares of the parts it holds. Summed in float32 the result would depend on how
the gradients are cut, in the last bits, and training amplifies them: two runs of 4-bit training
part within a few steps. In float64 the rounding to float32 at the end removes the difference. One
rank sums as many do: two ranks are two microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4train.data.stream import Rows
from fp4train.errors import UserError
from fp4train.optim import divides_gradients, takes_flags
from fp4train.parallel.fsdp import join_scales, synchronise
from fp4train.parallel.pipeline import Microbatch
from fp4train.parallel.tensor import replicas
from fp4train.parallel.world import World
from fp4train.precision import Recipe
from fp4train.precision.context import Context, use
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import Position, RunStep
from fp4train.run.queued import Queued
from fp4train.shards import local

if TYPE_CHECKING:
    from fp4train.run.run import Run

Scaling = dict[str, dict[str, Tensor]]
"""States of delayed scaling, by layer."""

_PIECE = 1 << 16
"""Elements of a tensor on a CPU that are cast at once: half a megabyte, which stays in the
cache.
"""


class EagerSteps:
    """Queues every kernel of a step anew."""

    counters = None
    """See `StepRunner`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def step(self, recipe: Recipe, rows: Iterable[Rows]) -> Queued:
        """Forward, backward and optimizer. Where loss or gradients are not finite, the weights stay
        as they are.

        What is queued depends on the step only through device memory and `run.step`, as
        `step_graph.py` says.
        """
        run = self.run
        clip_at = self.run.config.optim.clip
        divided = self.run.world.size > 1
        loss = torch.zeros((), device=run.device)
        share = microbatch_share(run)
        for microbatch_loss in train_losses(run, recipe, rows, run.loss_scale.value * share):
            loss += microbatch_loss * share
        loss = run.world.summed(loss)
        trained = {name: p for name, p in run.model.named_parameters() if p.grad is not None}
        gradients = [
            local(p.grad) if divided else p.grad for p in trained.values() if p.grad is not None
        ]
        if run.loss_scale.value != 1.0:
            torch._foreach_mul_(gradients, 1 / run.loss_scale.value)
        if run.world.tensor is None:
            replica_counts = None
        else:
            replica_counts = [replicas(p) for p in trained.values()]
        norm, norms = gradient_norms(gradients, run.world, replica_counts)
        failed = ~(loss.isfinite() & norm.isfinite())
        if run.failed is None:
            run.failed = failed
        else:
            run.failed = failed | run.failed
        fused = run.config.train.kernels != "torch"
        if clip_at is None:
            divisor = None
        else:
            divisor = clip(run.optimizer, gradients, clip_at, norm, fused=fused)
        run.mid_update = True
        step_unless(run.optimizer, run.failed, divisor)
        run.optimizer.zero_grad(set_to_none=True)
        return Queued(list(trained), torch.cat((torch.stack((loss, norm)), norms)))

    def unrecorded(self) -> AbstractContextManager[None]:
        """Every step is."""
        return nullcontext()


@contextmanager
def eagerly(run: Run) -> Iterator[None]:
    """A context in which every module of `run` runs by itself and no step is recorded, so that
    hooks see all tensors.
    """
    runner = run.runner
    run.runner = EagerSteps(run)
    try:
        with (
            torch.compiler.set_stance("force_eager") if run.config.train.compile else nullcontext()
        ):
            yield
    finally:
        run.runner = runner


def microbatch_share(run: Run) -> float:
    """The factor of a microbatch's loss in the current step: the loss of the step is the mean over
    the targets of the whole batch that count, wherever they lie.
    """
    size = run.config.train.batch_size * run.world.mesh.context
    return run.microbatch_rows / size * run.data.feed.loss_factor(run.batch_index)


def row_range(run: Run) -> tuple[int, int]:
    """(The position of the first row of this rank's share of the current step's batch, its
    rows).
    """
    return (
        run.batch_index * run.config.train.batch_size + run.world.data_rank * run.rank_rows,
        run.rank_rows,
    )


def step_rows(run: Run) -> Iterator[Rows]:
    """This rank's share of the current step's batch, in the rows of one microbatch after another,
    on the device.

    The share of the next step is fetched meanwhile.
    """
    first_row, count = row_range(run)
    tokens, targets = run.data.feed.rows(
        first_row, count, then=first_row + run.config.train.batch_size
    )
    yield from zip(
        torch.split(tokens, run.microbatch_rows),
        torch.split(targets, run.microbatch_rows),
        strict=True,
    )


def microbatches(run: Run, recipe: Recipe, rows: Iterable[Rows]) -> Iterator[Microbatch]:
    """The microbatches of `rows`, with the place of each in the whole batch."""
    rank_start = run.world.data_rank * run.rank_rows
    constant = ConstantWeights()
    size = run.config.train.batch_size * run.world.mesh.context
    share = run.loss_scale.value * run.microbatch_rows / size
    for start, row in zip(
        range(rank_start, rank_start + run.rank_rows, run.microbatch_rows), rows, strict=True
    ):
        last = start + run.microbatch_rows == rank_start + run.rank_rows
        offset = start * run.config.train.seq_len
        yield microbatch(
            run,
            recipe,
            row,
            constant=constant,
            token_offset=offset,
            last=last,
            called_layers=run.course.called,
            auxiliary=share,
        )


def microbatch(
    run: Run,
    recipe: Recipe,
    rows: Rows,
    *,
    constant: ConstantWeights,
    token_offset: int = 0,
    last: bool = True,
    called_layers: dict[object, bool] | None = None,
    auxiliary: float = 0.0,
) -> Microbatch:
    """Rows to be run in `recipe`, whose plan was applied to the layers (`Run.apply`).

    Args:
        rows: whole sequences; where ranks share them, this one's chunks are run.
        constant: shared by passes between which no weight is written.
        token_offset: place of the first token of `rows` in the batch.
        called_layers: set in which layers note that they were called (`Context.called_layers`).
        auxiliary: weight of a training pass's losses beside the returned one (`Context.auxiliary`).
    """

    tokens_BT, targets_BT = (run.world.own_chunk(row) for row in rows)
    token_offset += run.world.chunk * run.microbatch_tokens

    @contextmanager
    def context() -> Iterator[None]:
        now = Context(
            recipe=recipe,
            policy=run.config.policy,
            position=Position(
                RunStep(run.config.run.seed, run.step), token_offset, run.runner.counters
            ),
            counts="nothing",
            constant=constant,
            called_layers=called_layers,
            applied=True,
            auxiliary=auxiliary,
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


def train_losses(run: Run, recipe: Recipe, rows: Iterable[Rows], weight: float) -> Iterator[Tensor]:
    """The mean loss of each microbatch of `rows`, whose backward pass has run on the loss times
    `weight`.

    Of a pipeline the ranks of the last stage get them, the others nothing.
    """
    divided = run.world.size > 1
    with run.region():
        if run.pipeline is not None:
            yield from run.pipeline.train(list(microbatches(run, recipe, rows)), weight)
        else:
            for microbatch in microbatches(run, recipe, rows):
                if divided:
                    synchronise(run.model, last=microbatch.last)
                if run.teacher is None:
                    taught = {}
                else:
                    taught = {"teacher": run.teacher(microbatch.tokens_BT)}
                with microbatch.context():
                    loss = _loss(run, microbatch, **taught)
                (loss * weight).backward()  # type: ignore[no-untyped-call]
                yield loss.detach()
    if divided:
        join_scales(run.model, run.world)


def losses(run: Run, batches: Iterable[Microbatch]) -> Iterator[Tensor]:
    """The mean loss of each microbatch, without gradients; of a pipeline the last stage's ranks get
    them.

    Between two of them gradients are as the caller has them: who stops early leaves nothing
    switched off.
    """
    if run.pipeline is not None:
        yield from run.pipeline.evaluate(batches)
        return
    for microbatch in batches:
        with torch.no_grad(), microbatch.context():
            loss = _loss(run, microbatch)
        yield loss


def _loss(run: Run, microbatch: Microbatch, **taught: Any) -> Tensor:
    """The model's mean loss over a microbatch.

    Raises:
        UserError: a plugin's model gives something else.
    """
    loss: object = run.model(microbatch.tokens_BT, microbatch.targets_BT, **taught)
    if not isinstance(loss, Tensor) or loss.ndim:
        shape = f" {list(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(
            f"{type(run.model).__name__}.forward(tokens, targets) gave a {type(loss).__name__}{shape}, "
            "and must give the mean loss, a tensor without axes"
        )
    return loss


def gradient_norms(
    gradients: Sequence[Tensor], world: World, copies: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(The norm of all gradients, a 0-d float32, the norm of each of this rank's parts, float32
    [N]).

    They are NaN or infinite if a gradient is.

    Args:
        gradients: this rank's parts (`shards.local`), at least one.
        copies: number of tensor-parallel ranks that hold a part, for every part; None: one.
    """
    squares = _squares(gradients)
    if copies is None:
        once = squares
    else:
        once = squares / torch.tensor(copies, device=squares.device)
    return world.summed_over_parts(once.sum()).sqrt().float(), squares.sqrt().float()


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each, float64 [N].

    One kernel for all of them on a GPU. On a CPU torch would make a float64 copy of each tensor.
    """
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float64)).square()
    pieces = (
        map(Tensor.double, torch.split(gradient.reshape(-1), _PIECE)) for gradient in gradients
    )
    return torch.stack(
        [torch.stack([exact.dot(exact) for exact in group]).sum() for group in pieces]
    )


def clip(
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[Tensor],
    most: float,
    norm: Tensor,
    *,
    fused: bool = True,
) -> Tensor | None:
    """Scale this rank's parts of the gradients, of norm `norm`, so that it is at most `most`.

    Args:
        fused: whether torch's fused kernels divide; `train.kernels=torch` has a pass of its own.

    Returns:
        What `optimizer` has to divide them by, a float32 [], where its kernel can. None: they are
        scaled in place.

    A pass of its own reads and writes each gradient, 8 bytes. torch's fused kernels for GPUs divide
    in their own pass and write the quotient, 4 bytes more; on CPUs the pass of its own stays, whose
    products have other bits than quotients. `RoundedAdamW` divides everywhere and writes no
    gradient.

    Norm, clipping and AdamW move per weight, with float32 moments, 4 + 4 + 28 = 36 bytes of 32 that
    must be (1.125), on CPUs 4 + 8 + 28 = 40 (1.25); with BF16 moments 4 + 20 = 24 of 24.
    """
    if divides_gradients(optimizer, on_gpu=fused and gradients[0].is_cuda):
        return torch.clamp((norm + 1e-6) / most, min=1.0)
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(gradients), factor)
    return None


def step_unless(
    optimizer: torch.optim.Optimizer, failed: Tensor, divisor: Tensor | None = None
) -> None:
    """`optimizer.step()` where `failed` is False; where it is True, weights, moments and step
    counts stay as they are.

    torch's fused optimizers take the flag into their kernel, as they do for `torch.amp.GradScaler`.
    For others the host waits until the flag is known.

    Args:
        optimizer: whose gradients are ready.
        failed: bool [], on the device of the parameters.
        divisor: divisor of the gradients, float32 [], as `clip` gives it.
    """
    if not takes_flags(optimizer):
        if not bool(failed):
            optimizer.step()
        return
    scaler_options = {"found_inf": failed.float()} | (
        {} if divisor is None else {"grad_scale": divisor}
    )
    for name, value in scaler_options.items():
        setattr(optimizer, name, value)
    try:
        optimizer.step()
    finally:
        for name in scaler_options:
            delattr(optimizer, name)
