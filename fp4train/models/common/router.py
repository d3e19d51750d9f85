"""The router of a layer of experts: which experts a token goes to, and what keeps their load even;
`experts.py` says what the layer computes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.models.common.cut import HoldsParts
from fp4train.precision.context import auxiliary
from fp4train.precision.recomputation import once
from fp4train.text import check_choice, check_least

SCORES = ("softmax", "sigmoid")
DROPPED = 0
BALANCE = 1
Z = 2
"""Places of the numbers that follow the loads in what a router has seen."""
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Shape of the layers of experts.

    Args:
        count: number of experts in a layer.
        top: experts per token.
        hidden: width of an expert.
        shared: experts that every token goes to, as one MLP of that many widths.
        scores: `softmax` or `sigmoid` of the router's logits.
        normalised: whether the weights of a token's experts sum to 1, before `scale`.
        scale: factor of the sum of the routed experts.
        bias: whether a bias is added to the scores where experts are chosen.
    """

    count: int = 8
    top: int = 2
    hidden: int = 128
    shared: int = 0
    scores: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    bias: bool = False

    def __post_init__(self) -> None:
        check_least(self, "model.experts.", "count", "top", "hidden")
        if self.top > self.count:
            raise ValueError(
                f"model.experts.top={self.top} exceeds model.experts.count={self.count}"
            )
        if self.shared < 0:
            raise ValueError(f"model.experts.shared={self.shared} must not be negative")
        check_choice("model.experts.scores", self.scores, SCORES)
        if not 0 < self.scale < math.inf:
            raise ValueError(f"model.experts.scale={self.scale} must be finite and above 0")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Means that keep the load of the experts even; the set of weights does not depend on them.

    Args:
        loss: factor of the loss of balance of each layer; 0: there is none.
        speed: change of the bias per optimizer step; 0: it stays. Above 0 it needs `experts.bias`.
        z_loss: factor of the mean of logsumexp(logits)², which keeps logits small
            (arXiv:2202.08906); 0: there is none.
        capacity: assignments that an expert takes in training, per assignments of an even load;
            None: all. Others are dropped, in validation and samples none.
    """

    loss: float = 1e-3
    speed: float = 0.0
    z_loss: float = 0.0
    capacity: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "speed", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"model.balance.{name}={getattr(self, name)} must be finite and not negative"
                )
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ValueError(
                f"model.balance.capacity={self.capacity} must be finite and above 0, or null "
                "for all"
            )


class Router(HoldsParts, nn.Module):
    """Chooses experts, in float32 whatever the recipe: x [B, T, D] → experts [B·T, top] and their
    weights.

    Attributes:
        bias: float32 [E], part of every checkpoint; None: there is none.
    """

    bias: Tensor | None

    def __init__(self, width: int, shape: ExpertShape, balance: Balance) -> None:
        super().__init__()
        self.experts = shape
        self.balance = balance
        self.weight = nn.Parameter(torch.empty(shape.count, width))
        self.register_buffer("bias", torch.zeros(shape.count) if shape.bias else None)
        self._seen: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(Experts int64 [B·T, top], their weights, float32), with the losses of balance attached
        to the weights.
        """
        shape = self.experts
        logits_ME = F.linear(x_BTD.float().flatten(0, 1), self.held(self.weight).float())
        if shape.scores == "softmax":
            scores_ME = logits_ME.softmax(-1)
        else:
            scores_ME = logits_ME.sigmoid()
        with torch.no_grad():
            chosen_MK = (
                (scores_ME if self.bias is None else scores_ME + self.bias)
                .topk(shape.top, -1)
                .indices
            )
        weights_MK = scores_ME.gather(1, chosen_MK)
        if shape.normalised:
            weights_MK = weights_MK / (weights_MK.sum(-1, keepdim=True) + _SMALLEST_SUM)
        weights_MK = weights_MK * shape.scale
        if share := auxiliary():
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and bool(self.balance.loss or self.balance.z_loss)
            ):
                loss = self._losses(logits_ME, scores_ME, chosen_MK, x_BTD.shape[0])
            weights_MK = _WithLoss.apply(weights_MK, loss, share)  # type: ignore[no-untyped-call]
        return chosen_MK, weights_MK

    def _losses(
        self, logits_ME: Tensor, scores_ME: Tensor, chosen_MK: Tensor, sequences: int
    ) -> Tensor:
        """The mean over sequences of the losses; what they are is noted once, not where activations
        are recomputed.
        """
        shape = self.experts
        balance = self.balance
        chosen_BA = chosen_MK.view(sequences, -1)
        counts_BE = scores_ME.new_zeros(sequences, shape.count)
        counts_BE.scatter_add_(1, chosen_BA, torch.ones_like(chosen_BA, dtype=counts_BE.dtype))
        p_ME = scores_ME / scores_ME.sum(-1, keepdim=True)
        uneven = (
            shape.count
            * (counts_BE / chosen_BA.shape[1] * p_ME.view(sequences, -1, shape.count).mean(1)).sum()
        )
        z = logits_ME.logsumexp(-1).square().view(sequences, -1).mean(1).sum()
        with torch.no_grad():
            once(
                self,
                lambda: self.note(
                    torch.cat((counts_BE.sum(0), torch.stack((uneven * 0, uneven, z))))
                ),
            )
        return (balance.loss * uneven + balance.z_loss * z) / sequences

    @torch.no_grad()
    def note(self, numbers: Tensor) -> None:
        """Add to what it has seen in this step."""
        if self._seen is None:
            self._seen = torch.zeros(numbers.shape, dtype=torch.float64, device=numbers.device)
        self._seen += numbers

    def seen(self) -> Tensor:
        """Assignments to each expert, how many of them were dropped, and the sums over sequences of
        both losses, float64 [E + 3], since the last call; they start anew.
        """
        sums = torch.zeros(self.experts.count + 3, dtype=torch.float64, device=self.weight.device)
        if self._seen is not None:
            sums.copy_(self._seen)
            self._seen.zero_()
        return sums

    @torch.no_grad()
    def even_out(self, load_E: Tensor, failed: Tensor) -> None:
        """Move the bias towards the mean load, after an optimizer step.

        Args:
            load_E: assignments of the whole batch.
            failed: bool [], the step changed no weight.
        """
        if self.bias is not None and self.balance.speed:
            move = self.balance.speed * (load_E.mean() - load_E).sign().to(self.bias.dtype)
            self.bias += move.masked_fill(failed, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routers:
    """The routers of a model, or of a part of one: every part has this, whether it has routers or
    not.

    Args:
        blocks: number of blocks of the whole model.
        experts: number of experts of a layer, E.
        here: number of a block → its router, of the blocks that this part has.
    """

    blocks: int
    experts: int
    here: Mapping[int, Router]

    def seen(self, device: torch.device) -> Tensor:
        """Loads that the routers have counted since the last call: `Router.seen` of each block,
        zero where it has no router here; float64 [blocks, E + 3].
        """
        shape = (self.blocks, self.experts + 3)
        table = torch.zeros(shape, dtype=torch.float64, device=device)
        for block, router in self.here.items():
            table[block] = router.seen()
        return table

    def even_out(self, loads_LE: Tensor, failed: Tensor) -> None:
        """Move the biases after an optimizer step, given the load of the whole batch; not where
        bool [] `failed` is True.
        """
        for block, router in self.here.items():
            router.even_out(loads_LE[block], failed)


class _WithLoss(torch.autograd.Function):
    """x itself; backward adds the gradient of share·loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, dx.new_full((), ctx.share), None
