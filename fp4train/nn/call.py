"""The protocol of executors, and one call of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fp4train.backends import LayerState, Prepared, named
from fp4train.nn.fused_weights import FusedWeights
from fp4train.nn.held_amaxes import HeldAmaxes
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.ranks import Ranks
from fp4train.nn.scaling import DelayedScaling, MemberScaling
from fp4train.nn.weight_form import WeightForm
from fp4train.precision.context import Context, State, backward_pass
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Position, Quantizer, QuantSpec, RunStep

Weights = Sequence[Tensor]
"""[N, K] each."""
Biases = Sequence[Tensor | None]
"""[N] each, or None."""
Counts = Sequence[int]
"""The rows of x that each weight of a group multiplies, in turn."""


GradientSum = Literal["product", "autograd"] | None
"""Adder of dw where it is a term of a sum, over microbatches or ranks: the product that makes it,
where that can, or autograd after it; None: it is the whole gradient.
"""


class CompiledRoute(NamedTuple):
    """How an executor is called in a compiled graph: the properties of a layer that the graph
    depends on.
    """

    kind: Literal["plain", "torch", "operator", "eager"]
    """`plain`: nn.Linear, outside a context; `torch`: torch's GEMM, where nothing is quantised;
    `operator`: the custom operator; `eager`: outside the graph.
    """
    dtype: torch.dtype | None = None
    """Dtype of the recipe."""
    keeps_x: bool = False
    """Whether wgrad takes x in high precision."""


EAGER = CompiledRoute("eager")


class PreparedForms(Protocol):
    """The prepared forms of one weight [N, K] in one step (`nn.weights.PreparedWeights`)."""

    def prepared(self, w_NK: Tensor, form: WeightForm, call: LayerCall) -> Prepared:
        """The weight in the given form."""

    def delayed_amax(
        self, w_NK: Tensor, quantizer: Quantizer, call: LayerCall
    ) -> tuple[Tensor, Tensor | None]:
        """`DelayedScaling.amax` of the weight."""


class CallSource(Protocol):
    """Who calls an executor, as that sees it (`nn.planned.PlannedLayer`): the source of calls, and
    of what lasts longer than one.

    Attributes:
        states: tensors that executors carry from step to step, by name.
        keeps_forms: whether prepared forms of the weight are kept within a step.
    """

    states: dict[str, LayerState]
    keeps_forms: bool

    def call_in(self, now: State, executor: Executor, tokens: int) -> LayerCall:
        """The coming call of `executor` with so many tokens; inside a recomputed region, that of
        the first pass.
        """

    def new_call(
        self, context: Context, executor: Executor, tokens: int, *, training: bool
    ) -> LayerCall:
        """A call of `executor` with so many tokens; `training`: whether gradients are enabled."""

    def prepared(self, part: Hashable) -> PreparedForms:
        """The prepared forms of the weight, or of a part of it, in a step."""


class GroupCallSource(CallSource, Protocol):
    """A group of weights as its executor sees it (`nn.experts.Experts`)."""

    def new_calls(
        self, executor: Executor, counts: Counts, context: Context, *, training: bool
    ) -> list[LayerCall]:
        """A call of `executor` for each weight."""


class Executor(ABC):
    """Runs what the plan of a layer says.

    Args:
        plan: the layer's plan.
        device: device type of its tensors.
        shard: place of the layer's shard in the whole layer; None: it is whole and alone.
        sums: the sum to which dw is added, unrounded; None: dw is returned in the recipe's dtype.

    Attributes:
        adds: whether wgrad is a product that adds dw to the sum of the weight's gradients
            (`sum_so_far`).
        kinds: kinds of states of its own that an executor of this class may need; those of a
            backend are the backend's.
        route: how it is called under torch.compile.
        states: names of the layer's states that it needs.
    """

    kinds: ClassVar[tuple[type[LayerState], ...]] = ()
    route: CompiledRoute = EAGER
    states: tuple[str, ...] = ()
    adds = False

    def __init__(
        self,
        plan: LayerPlan,
        device: str,
        shard: LayerShard | None = None,
        *,
        sums: GradientSum = None,
    ) -> None:
        self.plan = plan
        self.device = device
        self.shard = shard
        self.sums = sums
        self.dtype = plan.table.torch_dtype

    @classmethod
    def why_no_graph(cls, plan: LayerPlan) -> str | None:
        """Why a layer of `plan` depends on the host, so that no CUDA graph can record it; None: one
        can.
        """
        return None

    @staticmethod
    def quantised(plan: LayerPlan) -> Iterator[tuple[str, QuantSpec]]:
        """(words for its place in the run, spec) of each operand of `plan` that is quantised."""
        place = f"recipe {plan.recipe.name}, {plan.layer.name}, operand"
        return (
            (f"{place} {name} of {gemm}", spec)
            for gemm, name, spec in named(plan.operands)
            if spec is not None
        )

    @abstractmethod
    def __call__(
        self,
        source: CallSource,
        x_MK: Tensor,
        weights: Weights,
        biases: Biases,
        now: State,
        counts: Counts = (),
    ) -> Tensor:
        """y [M, N] of x [M, K] in the recipe's dtype; gradients through autograd.

        Args:
            source: whose states and position in the run count.
            weights, biases: one of each; of a group of E weights two tensors, [E, N, K] and [E, N].
            now: the state of this thread, in a context.
            counts: rows of every group; x may have more rows, which count for nothing: those of y
                are zero.
        """

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of x and w that the layer's own recipe multiplied in the last call."""
        return x_MK, w_NK

    def values(self, w_NK: Tensor, quantised: Callable[[Tensor], Tensor]) -> Tensor:
        """w, float32, where the columns that the layer's own recipe multiplied in the last call are
        `quantised`.
        """
        return quantised(w_NK)

    def calls_of_group(
        self, source: GroupCallSource, x_MK: Tensor, now: State, counts: Counts
    ) -> list[LayerCall]:
        """The coming calls of this executor of one weight, for each of a group; arguments as of a
        call. Inside a recomputed region, those of the first pass.
        """
        assert now.context is not None
        return now.replay.once(
            source,
            partial(source.new_calls, self, counts, now.context, training=torch.is_grad_enabled()),
        )


class TokenCount:
    """The tokens that a layer was given within a step: the offset of a call whose context has no
    `token_offset`.

    So calls of one step, over microbatches or of a weight that a model uses twice, draw different
    random bits.
    """

    __slots__ = ("_calls", "_step", "_tokens")

    def __init__(self) -> None:
        self._step: RunStep | None = None
        self._calls = self._tokens = 0

    def offset(self, step: RunStep, tokens: int, name: str) -> int:
        """Index of the first token of a training call of `tokens` tokens.

        A backward pass that enters a context of its own repeats a call of its forward pass, and is
        not counted.

        Raises:
            RuntimeError: it may repeat any of several calls.
        """
        if self._step != step:
            self._step = step
            self._calls = 0
            self._tokens = 0
        if backward_pass() != -1:
            if self._calls > 1:
                raise RuntimeError(
                    f"layer {name} is called in backward by a context of its own, after "
                    f"{self._calls} calls in this "
                    "step: which of them it repeats, and with which random bits, is not "
                    "known. Give autocast a "
                    "token_offset, or recompute with fp4train.precision.recompute or "
                    "recompute_contexts."
                )
            return 0
        offset = self._tokens
        self._calls = self._calls + 1
        self._tokens = offset + tokens
        return offset


class GradientDtypes(NamedTuple):
    """The dtypes of the gradients that backward computes; None for those it does not."""

    x: torch.dtype | None = None
    w: torch.dtype | None = None
    bias: torch.dtype | None = None


def gradient_dtypes(
    x: Tensor, w: Tensor, bias: Tensor | None, needs_grad: Sequence[bool]
) -> GradientDtypes:
    """The dtypes of the gradients of those of x, w and bias that need one (`needs_grad`)."""
    return GradientDtypes(
        x.dtype if needs_grad[0] else None,
        w.dtype if needs_grad[1] else None,
        bias.dtype if bias is not None and needs_grad[2] else None,
    )


_NO_GRADIENTS = GradientDtypes()


@dataclass(eq=False, slots=True)
class LayerCall:
    """The state of one call, shared by forward and backward; tensors are passed separately.

    Args:
        executor: executor of the layer's GEMMs.
        position: the place of its tokens in the run.
        layer_key: the layer's part of the random key.
        weights: the layer's prepared weights; an empty cache if the context has no step.
        scaling: the layer's amax histories, or held amaxes; None: no operand takes the amax of an
            earlier step.
        training: whether amaxes enter their histories.
        shared: the context's cache of forms that several layers read; None: this x is no other
            layer's, or is that of a compiled graph, which reuses the memory of its tensors.
        parameter: the parameter whose shard or part w is, if w is new in each call.
        gradients: gradients that backward computes; set by each forward pass.
        amaxes: the amaxes of this call that `scaling` gave, by tensor.
        fused: the weights that share a global scale with this layer's.
        member: the place of the weight in the layer's group.
    """

    executor: Any
    position: Position
    layer_key: int
    weights: PreparedForms
    scaling: DelayedScaling | HeldAmaxes | MemberScaling | None
    training: bool
    shared: dict[str, Any] | None
    fused: FusedWeights
    parameter: Tensor | None = None
    gradients: GradientDtypes = _NO_GRADIENTS
    amaxes: dict[str, Tensor] | None = None
    member: int = 0

    def amax(
        self,
        name: str,
        quantizer: Quantizer,
        tensor: Tensor,
        *,
        later: bool = False,
        over: Sequence[Ranks] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`DelayedScaling.amax` of x or dy, the same for both forms of the tensor."""
        assert self.scaling is not None
        if self.amaxes is None:
            self.amaxes = {}
        if name in self.amaxes:
            return self.amaxes[name], None
        step = self.position.step
        amaxes = self.scaling.amax(
            name, quantizer, tensor, enter=self.training, step=step, later=later, over=over
        )
        self.amaxes[name] = amaxes[0]
        return amaxes
