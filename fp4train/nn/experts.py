"""A group of weights, each for the rows that are routed to it: the linear layers of a mixture's
experts, as one layer.

    y [M, N]: rows of expert e are x [count of e, K]·w[e]ᵀ, experts one after the other

Each expert is a linear layer of its own in every bit: it has an amax, blocks and a random key of
its own. Expert 3 of the layer "mlp.up" draws the bits of a linear layer with the name "mlp.up.3";
the index of a token is its place among the rows of its expert. The group is one layer to everything
else: to the plan, the policy, sharding and checkpoints.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.nn.call import Counts, GroupCall, LayerCall, TokenCount
from fp4train.nn.engine import Executor, without_torchs_autocast
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import local
from fp4train.nn.scaling import MemberScaling
from fp4train.precision.context import Context, State
from fp4train.precision.layers import Layer


class Experts(PlannedLayer):
    """`experts` linear layers with one weight [experts, out_features, in_features], in the recipe
    of the surrounding `autocast`; outside of one they multiply in the input's dtype.

    Args:
        bias: whether each expert has a bias; parameter `bias` [experts, out_features].
        per_token: how many of the experts a token is routed to, for costs and for the sizes in a
            plan.
        backend: see `nn.Linear`.

    Raises:
        ValueError: a size is not positive, or a token has more experts than there are.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        per_token: int = 1,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if min(experts, in_features, out_features) < 1 or not 1 <= per_token <= experts:
            raise ValueError(
                f"experts={experts}, in_features={in_features}, out_features={out_features} "
                "must be at least 1, and "
                f"per_token={per_token} between 1 and experts"
            )
        layer = Layer(
            name="experts",
            in_features=in_features,
            out_features=out_features,
            block=0,
            blocks=1,
            experts=experts,
            per_token=per_token,
        )
        self._begin(layer, backend)
        self.weight = nn.Parameter(
            torch.empty(experts, out_features, in_features, device=device, dtype=dtype)
        )
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(experts, out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def _begin(self, layer: Layer, backend: str) -> None:
        self.experts = layer.experts
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self._member_tokens = [TokenCount() for _ in range(layer.experts)]
        super()._begin(layer, backend)

    def reset_parameters(self) -> None:
        """Draw the values of each expert as `nn.Linear` draws its own."""
        bound = self.in_features**-0.5
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)

    @property
    def w_ENK(self) -> Tensor:
        """The weights [experts, out_features, in_features] that this rank has; a view where they
        are stored transposed.
        """
        if self.layer_shard is None:
            w = self.weight
        else:
            w = local(self.weight)
        return w.mT if self.transposed else w

    @property
    def own_weights(self) -> tuple[Tensor, ...]:
        return tuple(self.w_ENK.unbind(0))

    def rename(self, layer: Layer, backend: str) -> None:
        super().rename(layer, backend)
        self._keys = [zlib.crc32(f"{layer.name}.{member}".encode()) for member in self.members]

    @property
    def members(self) -> range:
        """The places of this rank's experts in the whole group."""
        if self.layer_shard is None:
            start = 0
        else:
            start = self.layer_shard.first
        return range(start, start + self.experts)

    def sampled_operands(self, x: Tensor, *counts: Any) -> tuple[Tensor, Tensor, slice]:
        rows = self._counts(x, *counts)
        busiest = max(range(self.experts), key=rows.__getitem__)
        start = sum(rows[:busiest])
        return *self.quantised_columns(x, self.w_ENK[busiest]), slice(start, start + rows[busiest])

    def shard(self, own: LayerShard) -> None:
        assert own.tensor is not None and own.cut == "experts"
        # a call cannot join: other ranks have other experts
        self.layer_shard = own
        self.joined = True
        self.experts = self.w_ENK.shape[0]
        self._member_tokens = [TokenCount() for _ in self.members]
        layer = replace(self.layer, experts=self.experts, cut=own.cut, parts=own.tensor.size)
        self.rename(replace(layer, sources=own.sources), self.backend)

    # -- the call ----------------------------------------------------------------------------------

    def forward(self, input: Tensor, counts: Tensor | Sequence[int]) -> Tensor:
        """y [M, out_features] of input [M, in_features] whose rows are sorted by expert.

        Args:
            counts: rows of each expert, an integer tensor [experts] or a sequence; some may be 0.
                Rows after their sum are not read: their output and gradient are zero. A tensor on a
                device is read by the host.

        Raises:
            ValueError: the input is no matrix with in_features columns, or `counts` do not fit it.
            TypeError: the input is not of a floating dtype.
        """
        if torch.compiler.is_dynamo_compiling():
            # the host reads the counts: no graph has the layer
            from fp4train.precision.compile_context import call

            return cast(Tensor, call(Experts.forward, self, input, counts))
        executor, now = self.executor_now(input.device, input.dtype)
        x_MK, autocast, _ = self.matrix(input)
        rows = self._counts(input, counts)
        if executor is None:
            return self._outside(x_MK, rows)
        with without_torchs_autocast(input.device.type):
            y_MN = executor(x_MK, self.w_ENK, self._biases, self.group_call(now, executor, rows))
        return y_MN.to(autocast or input.dtype)

    def _counts(self, input: Tensor, counts: Tensor | Sequence[int]) -> list[int]:
        """The rows of each expert, checked; on the meta device, where there are none to read, all
        are the first's.
        """
        name = self.layer.name
        if input.dim() != 2:
            raise ValueError(
                f"{name}: input {tuple(input.shape)} must be a matrix of rows sorted by expert"
            )
        if len(counts) != self.experts:
            raise ValueError(f"{name}: {len(counts)} counts for {self.experts} experts")
        if isinstance(counts, Tensor):
            if counts.is_meta:
                return [input.shape[0]] + [0] * (self.experts - 1)
            if counts.is_floating_point():
                raise ValueError(f"{name}: counts of rows must be integers, not {counts.dtype}")
            counts = counts.tolist()
        rows = list(counts)
        if min(rows) < 0 or sum(rows) > input.shape[0]:
            raise ValueError(
                f"{name}: counts of rows must be at least 0 and give at most the "
                f"{input.shape[0]} rows of the input; "
                f"they are {min(rows)} at least and {sum(rows)} together"
            )
        return rows

    @property
    def _biases(self) -> Tensor | None:
        if self.bias is None or self.layer_shard is None:
            return self.bias
        return local(self.bias)

    def _outside(self, x_MK: Tensor, rows: list[int]) -> Tensor:
        """y outside of a context, in torch's own products."""
        used = sum(rows)
        bias_table = self._biases
        biases: Sequence[Tensor | None]
        if bias_table is None:
            biases = [None] * self.experts
        else:
            biases = bias_table.unbind(0)
        parts = zip(torch.split(x_MK[:used], rows), self.own_weights, biases, strict=True)
        y_MN = torch.cat([F.linear(x, w, bias) for x, w, bias in parts])
        tail = x_MK.shape[0] - used
        return F.pad(y_MN, (0, 0, 0, tail)) if tail else y_MN

    def group_call(self, now: State, executor: Any, counts: Counts) -> GroupCall:
        """The coming call of `executor`; inside a recomputed region with the calls of the first
        pass.
        """
        context = now.context
        calls: list[LayerCall] = []
        if executor.counted and context is not None:
            make = partial(self._new_calls, context, executor.member, counts)
            calls = now.replay.once(self, make)
        return GroupCall(executor, calls, counts, self.states)

    def _new_calls(self, context: Context, executor: Executor, counts: Counts) -> list[LayerCall]:
        """A call of `executor` for each expert."""
        training = torch.is_grad_enabled()
        group_call = self.new_call(context, executor, 0, training=training)
        scaling = group_call.scaling
        members = self.members
        elsewhere = [place for place in range(self.layer.group) if place not in members]
        calls = []
        for member, (place, key, count, tokens) in enumerate(
            zip(members, self._keys, counts, self._member_tokens, strict=True)
        ):
            position = group_call.position
            if context.counts == "tokens" and training and count:
                offset = tokens.offset(position.step, count, f"{self.layer.name}.{place}")
                position = position._replace(token=context.position.token + offset)
            call = replace(
                group_call,
                position=position,
                layer_key=key,
                weights=group_call.weights.part(member),
                shared=context.shared.setdefault(f"member {member}", {}),
                member=member,
            )
            if scaling is not None and not isinstance(scaling, MemberScaling):
                call.scaling = MemberScaling(scaling, place, () if member else elsewhere)
            calls.append(call)
        return calls

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_member_tokens": [TokenCount() for _ in range(self.experts)],
        }

    def extra_repr(self) -> str:
        sizes = (
            f"experts={self.experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}"
        )
        return f"{sizes}, bias={self.bias is not None}, backend={self.backend}"


def by_expert(
    x_MD: Tensor,
    weights_MK: Tensor,
    key: Tensor,
    experts: int,
    function: Callable[[Tensor, Counts | Tensor], Tensor],
    *,
    shard: LayerShard | None = None,
    whole_MD: Tensor | None = None,
) -> Tensor:
    """The weighted sum [M, N] of the experts of each token, in the dtype of y·weight.

    Args:
        weights_MK: weights of a token's experts.
        key: int64 [M·K], those experts; what is not below `experts` counts for none.
        function: y of rows of x, sorted by expert, and of the rows that each expert has.
        shard: part of the experts that this rank has, `experts` of them: the sum is over these, the
            gradient of x over those of all ranks. None: it has them all.
        whole_MD: with a shard, x of the tokens of all ranks, of which it is this rank's share.
    """
    if shard is not None:
        key = key - shard.first
        key = key.masked_fill((key < 0) | (key >= experts), experts)
    counts_E = key.new_zeros(experts + 1).scatter_add_(0, key, torch.ones_like(key))[:experts]
    order = key.argsort(stable=True)
    # the host waits once, for all products
    counts = counts_E if counts_E.is_meta else counts_E.tolist()
    if not counts_E.is_meta:
        order = order[: sum(counts)]
    if whole_MD is None:
        whole_MD = x_MD.detach()
    else:
        whole_MD = whole_MD.detach()
    rows: Tensor = _Dispatch.apply(x_MD, whole_MD, order, weights_MK.shape[1], shard)  # type: ignore[no-untyped-call]
    out: Tensor = _Combine.apply(function(rows, counts), weights_MK, order)  # type: ignore[no-untyped-call]
    return out


def _placed(x: Tensor, order: Tensor, count: int) -> Tensor:
    """`count` rows, of which those of `order` are x, and the others zero."""
    if len(order) == count:
        all_rows = x.new_empty(count, *x.shape[1:])
    else:
        all_rows = x.new_zeros(count, *x.shape[1:])
    return all_rows.index_copy_(0, order, x)


class _Dispatch(torch.autograd.Function):
    """The row of the token of each assignment in `order`, of which a token has `top`. Backward adds
    those of a token in their order, in float32, which indexing by torch would leave to chance on a
    GPU, and those of other ranks' experts.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, whole_MD: Tensor, order: Tensor, top: int, shard: LayerShard | None
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens = len(whole_MD)
        ctx.top = top
        ctx.shard = shard
        return whole_MD.index_select(0, order // top)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (order,), shard = ctx.saved_tensors, ctx.shard
        dx_MKD = _placed(dy, order, ctx.tokens * ctx.top).view(ctx.tokens, ctx.top, dy.shape[-1])
        dx_MD = dx_MKD.sum(1, dtype=torch.float32)
        if shard is not None:
            dx_MD = (shard.tensor.sum_rows if shard.sequence else shard.tensor.sum)(dx_MD)
        return dx_MD.to(dy.dtype), None, None, None, None


class _Combine(torch.autograd.Function):
    """Σ of weight·y over the assignments of each token, y [A, N] being those of `order`; only these
    rows are kept.
    """

    @staticmethod
    def forward(ctx: Any, y_AN: Tensor, weights_MK: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(y_AN, weights_MK, order)
        y_MKN = _placed(y_AN, order, weights_MK.numel()).view(*weights_MK.shape, y_AN.shape[-1])
        return (y_MKN * weights_MK[..., None]).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_MN: Tensor) -> tuple[Tensor, Tensor, None]:
        y_AN, weights_MK, order = ctx.saved_tensors
        dout_AN = dout_MN.index_select(0, order // weights_MK.shape[1])
        dweights = _placed((dout_AN * y_AN).sum(-1), order, weights_MK.numel()).view_as(weights_MK)
        dy_AN = dout_AN * weights_MK.flatten()[order][:, None]
        return dy_AN.to(y_AN.dtype), dweights.to(weights_MK.dtype), None
