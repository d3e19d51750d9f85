"""A layer of experts: each token goes to the few that a router chooses, and gets the weighted sum
of their outputs.

    logits = x·w_routerᵀ                              float32
    scores = softmax(logits), or sigmoid(logits)
    chosen = the `top` largest of scores + bias       bias: state that balances the load, without a gradient
    y      = scale · Σ_chosen weight_e · expert_e(x) + shared(x)

with weight_e the score, divided by the sum of the chosen ones where `normalised`. An expert is a
SwiGLU. Gate and up are one weight per expert, as `transformers` holds them: they read the same rows
and share one quantised input.

Three things keep the load even, each by itself or together (`Balance`):

- the loss of Switch Transformer (arXiv:2101.03961), E·Σ_e f_e·P_e with f_e the share of assignments
  that expert e got
  and P_e its mean probability, taken over each sequence (arXiv:2412.19437, equation 17). It is
  linear in sequences, so it does not depend on microbatches and ranks;
- the bias, which moves by `speed` per step towards the mean load of the whole batch
  (arXiv:2408.15664);
- a capacity: an expert takes so many assignments of a sequence, the first ones; the others are
  dropped.

The gradient of these losses enters the backward pass where the router's weights do. The loss that
the model returns is the cross-entropy alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.models.common.cut import HoldsParts
from fp4train.models.common.rotary import SwiGLU, gated_mlp_parameters
from fp4train.nn.call import Counts
from fp4train.nn.experts import Experts, by_expert
from fp4train.nn.ranks import all_rows, summed_over, with_summed_gradient
from fp4train.parameters import ZEROS, ParameterSpec, Split, Spread, inside
from fp4train.precision.context import auxiliary, once
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
        made = torch.zeros(self.experts.count + 3, dtype=torch.float64, device=self.weight.device)
        if self._seen is not None:
            made.copy_(self._seen)
            self._seen.zero_()
        return made

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


def expert_parameters(
    name: str,
    stored: str,
    shape: ExpertShape,
    places: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[ParameterSpec]:
    """The parameters of an `ExpertLayer`; `stored` is the module's name in a folder, which has a
    matrix per expert, `places` are those of an expert's layers.

    Tensor-parallel ranks have whole experts: a rank quantises whole weights and all rows of its
    experts, as one rank does, so that no block is divided however narrow an expert is. Only the sum
    over a token's experts has another order.
    """
    gate, up, down = places
    experts = [f"experts.{number}" for number in range(shape.count)]
    specs = [
        ParameterSpec(
            name="router.weight",
            stored="gate.weight",
            initial=Spread.MATRIX,
            high_precision="router: chooses in float32",
        ),
        ParameterSpec(
            name="gate_up.weight",
            stored=tuple(
                (f"{expert}.{gate}.weight", f"{expert}.{up}.weight") for expert in experts
            ),
            cut=Split.EXPERTS,
            initial=Spread.MATRIX,
        ),
        ParameterSpec(
            name="down.weight",
            stored=tuple((f"{expert}.{down}.weight",) for expert in experts),
            cut=Split.EXPERTS,
            initial=Spread.RESIDUAL,
        ),
    ]
    if shape.bias:
        specs.append(
            ParameterSpec(name="router.bias", stored="gate.e_score_correction_bias", initial=ZEROS)
        )
    if shape.shared:
        specs += gated_mlp_parameters("shared", "shared_experts", places)
    return [*inside(name, stored, specs)]


class ExpertLayer(nn.Module):
    """Routed experts and a shared one: x [B, T, D] → [B, T, D].

    Tensor-parallel ranks have whole experts. Each routes all tokens, which gives the same on every
    rank, and multiplies those of its experts. The parts of y are summed in float32, and rounded
    once.
    """

    def __init__(self, width: int, shape: ExpertShape, balance: Balance) -> None:
        super().__init__()
        self.router = Router(width, shape, balance)
        self.gate_up = Experts(shape.count, width, 2 * shape.hidden, per_token=shape.top)
        self.down = Experts(shape.count, shape.hidden, width, per_token=shape.top)
        self.shared = SwiGLU(width, shape.shared * shape.hidden) if shape.shared else None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the modules that read x."""
        return (
            "router",
            "gate_up",
            *(() if self.shared is None else (f"shared.{name}" for name in self.shared.reads)),
        )

    def forward(self, x_BTD: Tensor, time: int | None = None) -> Tensor:
        """y of x [B, T, D] or, where tensor-parallel ranks share the tokens, of this rank's [B·T /
        p, D]; `time` is T then.
        """
        time = x_BTD.shape[1] if time is None else time
        if torch.compiler.is_dynamo_compiling():
            from fp4train.precision import compile_context

            compiled: Tensor = compile_context.call(self.routed, x_BTD, time)
        else:
            compiled = self.routed(x_BTD, time)
        return compiled if self.shared is None else compiled + self.shared(x_BTD)

    def routed(self, x_BTD: Tensor, time: int) -> Tensor:
        """The weighted sum of each token's experts."""
        shard = self.gate_up.layer_shard
        whole_BTD = x_BTD
        ranks = None if shard is None else shard.tensor
        if shard is not None and ranks is not None and shard.sequence:
            whole_BTD = all_rows(x_BTD, ranks).view(-1, time, x_BTD.shape[-1])
        chosen_MK, weights_MK = self.router(whole_BTD)
        key = self._kept(chosen_MK, time)
        # each finds the gradients for its experts; the router's follow from all of them
        if ranks is not None:
            weights_MK = with_summed_gradient(weights_MK, ranks)
        # In this order of the graph's nodes gradients of x are added up alike, however it is cut.
        x_MD = x_BTD.flatten(0, -2)
        whole_MD = whole_BTD.detach().flatten(0, 1)
        experts = self.gate_up.experts
        out_MD = by_expert(
            x_MD, weights_MK, key, experts, self._mlp, shard=shard, whole_MD=whole_MD
        )
        if shard is None or ranks is None:
            return out_MD.to(x_BTD.dtype).view_as(x_BTD)
        return summed_over(out_MD, ranks, rows=shard.sequence, dtype=x_BTD.dtype).view_as(x_BTD)

    def _mlp(self, rows: Tensor, counts: Counts | Tensor) -> Tensor:
        gate, up = self.gate_up(rows, counts).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up, counts)
        return y

    def _kept(self, chosen_MK: Tensor, time: int) -> Tensor:
        """The expert of each assignment, int64 [M·top]; of those that are dropped, the number of
        experts.
        """
        count = self.router.experts.count
        capacity = self.router.balance.capacity
        key = chosen_MK.flatten()
        if capacity is not None and auxiliary():
            per_sequence = time * chosen_MK.shape[1]
            most = math.ceil(capacity * per_sequence / count)
            late = (
                _rank_within(
                    key + count * (torch.arange(len(key), device=key.device) // per_sequence)
                )
                >= most
            )
            key = key.masked_fill(late, count)
            dropped = key.new_zeros(count + 3, dtype=torch.float64)
            dropped[count + DROPPED] = late.sum()
            once(self.router, lambda: self.router.note(dropped))
        return key


def _rank_within(key: Tensor) -> Tensor:
    """The number of earlier elements that equal each element."""
    order = key.argsort(stable=True)
    place = torch.arange(len(key), device=key.device)
    of_sorted = key[order]
    first = torch.searchsorted(of_sorted, of_sorted)
    return torch.empty_like(key).scatter_(0, order, place - first)


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
