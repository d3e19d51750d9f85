"""What a configuration cannot do on so many ranks: asked before a run begins, and before a plan prices it."""

from __future__ import annotations

from fp4train.config import Config
from fp4train.errors import UserError
from fp4train.parallel.config import Mesh
from fp4train.parallel.stages import check_microbatches


def check_cut(config: Config, mesh: Mesh) -> None:
    """Raises UserError where a batch cannot be cut into equal microbatches on equal ranks, enough for a pipeline, or
    where something needs whole what the ranks share."""
    batch, ranks, rows = config.train.batch_size, mesh.data, config.train.microbatch
    if batch % (ranks * (rows or 1)):
        each = "" if rows is None else f" × train.microbatch={rows}"
        raise UserError(
            f"train.batch_size={batch} is not divisible by {ranks} data ranks{each}: every rank must have the same "
            "number of sequences and microbatches"
        )
    sequences = rows or batch // ranks
    if config.parallel.sp and sequences * config.train.seq_len % mesh.tensor:
        raise UserError(
            f"the {sequences * config.train.seq_len} tokens of a microbatch cannot be shared by parallel.tp="
            f"{mesh.tensor} ranks: choose another train.microbatch or train.seq_len, or parallel.sp=false"
        )
    if config.eval.errors_every and mesh.tensor > 1:
        raise UserError(
            f"eval.errors_every={config.eval.errors_every} measures whole operands, and parallel.tp={mesh.tensor} "
            "leaves none on any rank: eval.errors_every=0, or measure a checkpoint on one rank (fp4train sensitivity)"
        )
    if config.oscillation.every and mesh.shard * mesh.tensor * mesh.pipeline > 1:
        raise UserError(
            f"oscillation.every={config.oscillation.every}: weights are watched whole, and this run cuts them over "
            "ranks; use parallel.dp_shard=1 with dp_replicate, or leave it out"
        )
    if (reason := getattr(config.optim, "needs_whole", None)) and mesh.shard * mesh.tensor > 1:
        raise UserError(reason)
    try:
        check_microbatches(batch // ranks // sequences, config.parallel)
    except ValueError as error:
        raise UserError(str(error)) from error
