"""Expert parallelism: ranks with tokens of their own that share the experts of every layer.

Of n ranks the one with index r has the experts r·E/n … (r + 1)·E/n − 1, whole. Each routes its own
tokens, and sends the row of each assignment to the rank that has the expert, which sends y back; in
backward dy and dx go the same ways (GShard, arXiv:2006.16668). A rank multiplies the rows of one
source after the other, at the place in the run of that source's tokens: amaxes, blocks and random
bits are those of the source alone, and gradients of weights are added from the first source to the
last. So n ranks have the bits of one that passes n microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4train.nn.call import Counts
from fp4train.nn.ranks import Ranks, exchanged
from fp4train.precision.context import current, use
from fp4train.precision.recomputation import once


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks that share the experts of every layer."""

    ranks: Ranks

    def __call__(
        self, mlp: Callable[[Tensor, Counts], Tensor], rows: Tensor, counts: Counts
    ) -> Tensor:
        """y of rows sorted by expert, as `mlp` gives it for the experts of this rank.

        Args:
            counts: rows of each expert of all ranks.
        """
        context = current()
        first_token = 0 if context is None else context.position.token
        mine = len(counts) // self.ranks.size
        asked = [counts[start : start + mine] for start in range(0, len(counts), mine)]
        sent = [sum(part) for part in asked]

        def of_sources() -> list[list[int]]:
            """The rows of each source for each expert of this rank, and its first token."""
            told = torch.tensor([[*part, first_token] for part in asked], device=rows.device)
            one = [1] * self.ranks.size
            table: list[list[int]] = self.ranks.exchange(told, one, one).tolist()
            return table

        sources = once(self, of_sources)
        received = [sum(counts) for *counts, _ in sources]
        parts = torch.split(exchanged(rows, self.ranks, sent, received), received)
        outputs = []
        # autograd passes them the other way round
        for x, (*counts, token) in reversed([*zip(parts, sources, strict=True)]):
            now = context and replace(
                context, position=context.position._replace(token=token), shared={}
            )
            with use(now):
                outputs.append(mlp(x, counts))
        return exchanged(torch.cat(outputs[::-1]), self.ranks, received, sent)
