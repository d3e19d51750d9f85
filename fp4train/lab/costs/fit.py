"""Whether a model and a batch can be cut as a mesh asks; each problem says what to do."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fp4train.lab.costs.shards import Weight
from fp4train.parallel.config import Mesh
from fp4train.precision.layers import find_blocks


def problems(model: nn.Module, weights: list[Weight], mesh: Mesh) -> Iterator[str]:
    """Why `model` cannot be cut over `mesh`: heads and widths by tensor parallelism, blocks by the pipeline."""
    counts = {
        (name, number)
        for module in model.modules()
        for name in ("heads", "kv_heads")
        if isinstance(number := getattr(module, name, None), int)
    }
    for name, number in sorted(counts):
        if number % mesh.tensor:
            yield f"parallel.tp={mesh.tensor} does not divide model.{name}={number}: {_choices('parallel.tp', number)}"
    for weight in weights:
        if weight.split is not None and weight.shape[weight.split] % mesh.tensor:
            size = weight.shape[weight.split]
            yield f"parallel.tp={mesh.tensor} does not divide {size}, the split dimension of {weight.name}"
            break
    blocks = len(find_blocks(model))
    parts = mesh.pipeline * mesh.virtual
    if blocks % parts:
        each = f" × parallel.pp_chunks={mesh.virtual}" if mesh.virtual > 1 else ""
        fits = _choices("parallel.pp", blocks // mesh.virtual) if blocks % mesh.virtual == 0 else "no parallel.pp does"
        yield f"parallel.pp={mesh.pipeline}{each} does not divide the {blocks} blocks: {fits}"


def batch_problem(sequences: int, microbatch: int | None, mesh: Mesh) -> str | None:
    """Why a batch of `sequences` cannot be divided over the data ranks and their microbatches; None if it can."""
    if sequences % mesh.data:
        low = sequences // mesh.data * mesh.data
        near = [str(n) for n in (low, low + mesh.data) if n]
        return (
            f"train.batch_size={sequences} does not divide over {mesh.data} data ranks "
            f"(dp_replicate {mesh.replicate} × dp_shard {mesh.shard}): train.batch_size={' or '.join(near)} does"
        )
    local = sequences // mesh.data
    if microbatch is not None and local % microbatch:
        return (
            f"train.microbatch={microbatch} does not divide the {local} sequences of a data rank: "
            f"{_choices('train.microbatch', local)}"
        )
    return None


def _choices(key: str, number: int) -> str:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    shown = divisors if len(divisors) <= 12 else [*divisors[:11], divisors[-1]]
    return f"{key} may be {', '.join(map(str, shown))}"
