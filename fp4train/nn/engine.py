"""What the plan of a layer becomes (`Executor`), and the one autograd function of planned layers.

A node of the graph runs a `Call`: the products of one layer, or of a group of weights. What these
need comes with the call; the function knows no layer. It saves tensors through autograd, so hooks on
saved tensors and autograd's checks apply, and refuses second derivatives. Other autograd functions
of this folder make no products: they pass weights on (`ValuesFunction`) and sort rows by expert
(`_Dispatch`, `_Combine`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from fp4train.backends import LayerState, Prepared, named
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.ranks import local
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Decoded, Quantized, QuantSpec

Saved = Sequence[Prepared | Tensor | None]
"""What backward needs of a forward pass: codes, values, tensors, or None for what it does not
need.
"""
PreparedPair = tuple[Prepared | None, Prepared | None]
"""The row-wise and the column-wise form of x or dy; None for what is not asked for."""
SavedKinds = list[tuple[Any, ...] | None]
"""The rest of each prepared operand, without its tensors: nothing of values; None: it is a tensor,
or is not saved.
"""
_TENSORS = len(Quantized._fields) - 2
"""Tensors of a `Quantized`."""


class Call(Protocol):
    """What one node computes: the products that `executor`, a `ProductExecutor`, runs."""

    @property
    def executor(self) -> Any: ...

    def wants(self, needs_grad: Sequence[bool], x: Tensor, w: Tensor, bias: Tensor | None) -> None:
        """Let backward compute the gradients of those of x, w and bias that need one."""

    def summed(self, w: Tensor) -> Tensor | None:
        """The weight as `sum_so_far` takes it; None: autograd adds its gradients up."""


GradientSum = Literal["product", "autograd"] | None
"""Adder of dw where it is a term of a sum, over microbatches or ranks: the product that makes it,
where that can, or autograd after it; None: it is the whole gradient.
"""


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dx [M, K], dw [N, K], dbias [N]; None for those not wanted."""

ADDING = frozenset({"cuda"})
"""Types of devices on which a backend that `adds` makes one product of a product and a sum, and
launches less for two products at once.
"""


def fuses(device: str) -> bool:
    """Whether devices of this type are among `ADDING`."""
    return device in ADDING


def adds(dtype: torch.dtype, device: str, sums: GradientSum) -> bool:
    """Whether a wgrad that can adds dw to the sum so far, on devices of this type."""
    return sums == "product" and fuses(device) and dtype is not torch.float32


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
        counted: whether its calls have a place among the tokens of a step.
        tokens: number of ranks that the tokens of x are cut over.
    """

    kinds: ClassVar[tuple[type[LayerState], ...]] = ()
    route: CompiledRoute = EAGER
    states: tuple[str, ...] = ()
    adds = False
    counted = True
    tokens = 1

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
        self.build()

    def build(self) -> None:
        """Look up what the plan names."""
        return None

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

    def takes_call(self, w: Tensor) -> bool:
        """Whether products with this weight need a `LayerCall`; asked where it is not counted."""
        return True

    @abstractmethod
    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        """y [M, N] of x [M, K] in the recipe's dtype; gradients through autograd.

        Args:
            w, bias: [N, K] and [N]; of a group of E weights [E, N, K] and [E, N].
            call: the `LayerCall`, or that of a group, whose rows of x come first; further rows
                count for nothing: those of y are zero. None: the executor takes none.
        """

    @property
    def runs_idle(self) -> bool:
        """Whether its states must see the calls of a group's weight that has no rows."""
        return bool(self.states)

    def begin(self, calls: Sequence[Any], x_MK: Tensor) -> None:
        """Note in calls of one layer, before their products, what depends on what they multiply.

        Args:
            x_MK: the rows of all calls, and no others.
        """
        return None

    def quantised_columns(self, x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of x and w that the layer's own recipe multiplied in the last call."""
        return x_MK, w_NK

    def values(self, w_NK: Tensor, quantised: Callable[[Tensor], Tensor]) -> Tensor:
        """w, float32, where the columns that the layer's own recipe multiplied in the last call are
        `quantised`.
        """
        return quantised(w_NK)


class LayerFunction(torch.autograd.Function):
    """y [M, N] of a call, x [M, K], its weight and bias."""

    @staticmethod
    def forward(ctx: Any, call: Call, x_MK: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        needs_grad = ctx.needs_input_grad[1:]
        call.wants(needs_grad, x_MK, w, bias)
        products: ProductExecutor = call.executor
        y_MN, saved = products.forward(x_MK, w, bias, call)
        saved_tensors, ctx.kinds = flatten(saved)
        ctx.save_for_backward(*saved_tensors)
        ctx.call = call
        ctx.summed = call.summed(w) if products.adds and needs_grad[1] else None
        return y_MN

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Any, ...]:
        # Gradients are enabled only where the graph is kept (create_graph). Others skip the refusal,
        # which takes 3 % of the host's time for a native layer.
        if torch.is_grad_enabled():
            return _once(ctx, dy_MN)
        saved = unflatten(ctx.saved_tensors, ctx.kinds)
        call: Call = ctx.call
        products: ProductExecutor = call.executor
        # The graph lives as long as the loss: codes of the weight must not. torch has no public
        # function for whether the pass keeps its graph.
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.call = None
        total = None
        if ctx.summed is not None:
            of_w, _ = ctx.next_functions[1]
            total = sum_so_far(ctx.summed, of_w)
        if not torch_autocasts(products.device):
            return (None, *products.backward(dy_MN, saved, call, total))
        with without_torchs_autocast(products.device):
            return (None, *products.backward(dy_MN, saved, call, total))


apply: Callable[..., Any] = super(torch.autograd.Function, LayerFunction).apply
"""`LayerFunction.apply` without what torch does for transforms of functions (torch.func), which takes
4 % of the host's time for a native layer (the median of 120 pairs of runs, in turn).
"""
_once = once_differentiable(LayerFunction.backward)
"""The backward pass, without gradients enabled, whose results refuse a second derivative."""


class ProductExecutor(Executor):
    """An executor whose products the engine runs, as a node of autograd's graph."""

    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        y_MN: Tensor
        # torch has no public function for it; its own `apply` asks this one.
        if torch._C._are_functorch_transforms_active():
            y_MN = LayerFunction.apply(call, x_MK, w, bias)  # type: ignore[no-untyped-call]
        else:
            y_MN = apply(call, x_MK, w, bias)
        return y_MN

    @abstractmethod
    def forward(
        self,
        x_MK: Tensor,
        w: Tensor,
        bias: Tensor | None,
        call: Any,
    ) -> tuple[Tensor, Saved]:
        """(y, what backward needs: the weight where dgrad takes it, and the forms of x)."""

    @abstractmethod
    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: Any,
        total: Tensor | None = None,
    ) -> Gradients:
        """The gradients that `call` wants.

        Args:
            saved: the second result of `forward`.
            total: sum to which dw is added, float32, if the executor `adds`; it is not returned
                then.
        """


def flatten(saved: Saved) -> tuple[list[Tensor | None], SavedKinds]:
    """(the tensors, what is none of each): autograd saves tensors alone."""
    tensors: list[Tensor | None] = []
    kinds: SavedKinds = []
    for operand in saved:
        if isinstance(operand, Quantized):
            tensors += operand[2:]
            kinds.append(operand[:2])
        elif isinstance(operand, Decoded):
            tensors += operand[:2]
            kinds.append(())
        else:
            tensors.append(operand)
            kinds.append(None)
    return tensors, kinds


def unflatten(tensors: Sequence[Any], kinds: SavedKinds) -> list[Any]:
    """The argument of `flatten`."""
    remaining = iter(tensors)
    saved: list[Any] = []
    # no generator, whose every step is one more call of Python's
    for kind in kinds:
        if kind is None:
            saved.append(next(remaining))
        elif not kind:
            saved.append(Decoded(next(remaining), next(remaining)))
        else:
            saved.append(Quantized(*kind, *islice(remaining, _TENSORS)))
    return saved


# -- the sum of a weight's gradients ---------------------------------------------------------------


def accumulates(node: Node) -> bool | None:
    """Whether this backward pass adds to the gradients of all leaves below a node of the graph, of
    which `inputs` may leave some out; None: `torch.autograd.grad` returns one instead.
    """
    if below := {
        accumulates(next_node) for next_node, _ in node.next_functions if next_node is not None
    }:
        return None if None in below else all(below)
    # Only this function tells it; torch has no public one.
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that torch.autograd.grad is asked for
        return None


def sum_so_far(w_NK: Tensor, node: Node | None) -> Tensor | None:
    """The sum of a weight's gradients, float32, to which a product of this pass can be added; None:
    autograd has dw.

    It has the first one, those of weights that are no parameters, those that a hook on the
    parameter is to see, and all in passes that leave `.grad` as it is (`accumulates`).

    Args:
        w_NK: the weight that the layer was called with; of tensor-parallel ranks the parameter:
            what autograd saved is another tensor where it is recomputed.
        node: node of the graph, to which autograd would give dw; None: to none.
    """
    if (
        not w_NK.is_leaf
        or w_NK.dtype != torch.float32
        or w_NK._backward_hooks
        or w_NK._post_accumulate_grad_hooks
    ):
        return None
    if w_NK.grad is not None and node is not None and accumulates(node):
        return local(w_NK.grad)
    return None


# -- torch.autocast --------------------------------------------------------------------------------

_has_autocast = cache(torch.amp.is_autocast_available)
"""Kept for each device type: the answer never changes, since torch raises of a name that is not
registered yet.
"""


def torch_autocasts(device: str) -> bool:
    """Whether torch.autocast is on for this device type; "meta" has no autocast."""
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def without_torchs_autocast(device: str) -> AbstractContextManager[object]:
    """Disable torch.autocast: the GEMMs choose their own dtypes, and it must not cast their
    operands again.
    """
    if torch_autocasts(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
