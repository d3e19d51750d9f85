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
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.models.common.expert_ranks import ExpertRanks
from fp4train.models.common.rotary import SwiGLU, gated_mlp_parameters
from fp4train.models.common.router import DROPPED, Balance, ExpertShape, Router
from fp4train.nn.call import Counts
from fp4train.nn.experts import Experts, by_expert
from fp4train.nn.ranks import all_rows, summed_over, with_summed_gradient
from fp4train.parameters import ZEROS, ParameterSpec, Split, Spread, inside
from fp4train.precision.context import auxiliary
from fp4train.precision.recomputation import once


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
    once. Expert-parallel ranks send rows to each other (`exchange`).
    """

    exchange: ExpertRanks | None = None

    def __init__(self, width: int, shape: ExpertShape, balance: Balance) -> None:
        super().__init__()
        self.router = Router(width, shape, balance)
        self.gate_up = Experts(shape.count, width, 2 * shape.hidden, per_token=shape.top)
        self.down = Experts(shape.count, shape.hidden, width, per_token=shape.top)
        self.shared = SwiGLU(width, shape.shared * shape.hidden) if shape.shared else None

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
        shard, experts = self.gate_up.layer_shard, self.gate_up.experts
        mlp: Callable[[Tensor, Counts | Tensor], Tensor] = self._mlp
        if self.exchange is not None:
            shard, experts = None, self.router.experts.count
            mlp = partial(self.exchange, mlp)
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
        out_MD = by_expert(x_MD, weights_MK, key, experts, mlp, shard=shard, whole_MD=whole_MD)
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
    group_start = torch.searchsorted(of_sorted, of_sorted)
    return torch.empty_like(key).scatter_(0, order, place - group_start)
