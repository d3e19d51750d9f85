"""How a run is cut over its ranks: section `parallel` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

REST = -1
"""As many as there are ranks left."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The sizes of the mesh, and what ranks send each other. A resume may change all of it.

    Args:
        dp_replicate: groups of ranks that each hold the whole model; gradients are summed over them (HSDP).
        dp_shard: ranks that share the weights, gradients and moments of one model (FSDP); -1: all ranks that
            dp_replicate leaves.
        norm: precision in which the squares of the gradient norm are summed. "float64": the norm, and with it
            clipping, does not depend on how gradients are cut over ranks. "auto": float64 on several ranks; float32 on
            one, as torch sums it.
        timeout: seconds that a rank waits for the others in a collective; then the run ends.
    """

    dp_replicate: int = 1
    dp_shard: int = REST
    norm: str = "auto"
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        if self.dp_replicate < 1:
            raise ValueError(f"parallel.dp_replicate={self.dp_replicate} must be at least 1")
        if self.dp_shard < 1 and self.dp_shard != REST:
            raise ValueError(f"parallel.dp_shard={self.dp_shard} must be at least 1, or -1 for all ranks that are left")
        if self.norm not in ("auto", "float64"):
            raise ValueError(f"parallel.norm={self.norm!r} must be auto or float64")
        if not 1 <= self.timeout <= 1e6:
            raise ValueError(f"parallel.timeout={self.timeout} must lie between 1 and 1000000 seconds")

    def shape(self, ranks: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) on so many ranks.

        Raises:
            ValueError: they do not go into each other.
        """
        shards = self.dp_shard
        if shards == REST:
            shards, rest = divmod(ranks, self.dp_replicate)
            if rest:
                raise ValueError(
                    f"parallel.dp_replicate={self.dp_replicate} does not divide the {_count(ranks)} of this run"
                )
        if self.dp_replicate * shards != ranks:
            raise ValueError(
                f"parallel.dp_replicate={self.dp_replicate} × parallel.dp_shard={self.dp_shard} is "
                f"{_count(self.dp_replicate * shards)}, and this run has {ranks}: "
                + ("start it under torchrun" if ranks == 1 else "parallel.dp_shard=-1 takes all that are left")
            )
        return self.dp_replicate, shards


def _count(ranks: int) -> str:
    return f"{ranks} rank" + ("s" if ranks != 1 else "")
