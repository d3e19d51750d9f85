"""What keeps the tensors of calls of a layer: parts of an executor that report what they compute, and a
call that is observed at its edges alone, of torch in high precision, of Transformer Engine, of
an nn.Linear that `convert` did not make.

x, w and y pass through the identity, whose backward pass copies the gradient. Products of a backend
are shown by itself (`LayerBackend.watcher`), in the passes of the layer alone: backward from where
dy arrives to the last product that is wanted.
"""

from collections.abc import Callable, Iterator, Sequence, Set as AbstractSet
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.audits.call import ObservedCall, Product, kept
from fp4train.backends import Backend, Prepared
from fp4train.backends.protocol import LayerBackend, Multiplied, NotShownError, ProductWatcher
from fp4train.backends.table import Shape, Table
from fp4train.hardware import Device
from fp4train.nn.executors.joined import Term
from fp4train.nn.executors.terms import CentredForms, TermGemms
from fp4train.nn.operands import TensorForms
from fp4train.quantize import Decoded, QuantSpec
from fp4train.text import first_line


class CallRecorder:
    """Keeps records of calls. What fails in it ends the observation alone; the pass goes on.

    Attributes:
        records: the call, or the parts of its in features that were multiplied apart; none: no call
            came.
        uncovered: why the layer cannot be observed; None: it can be.
        failure: why observing it failed, after which nothing more is kept; None: it did not.
    """

    def __init__(self) -> None:
        self.records: list[ObservedCall] = []
        self.uncovered: str | None = None
        self.failure: str | None = None

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """A context in which tensors are kept."""
        try:
            yield
        except NotShownError as error:
            self.hide(str(error))
        except Exception as error:
            self.records = []
            self.failure = self.failure or first_line(error)

    def hide(self, reason: str) -> None:
        """Note why the layer cannot be observed; nothing more is kept."""
        self.records = []
        self.uncovered = reason

    @property
    def ended(self) -> bool:
        """Whether nothing more is kept."""
        return self.failure is not None or self.uncovered is not None

    def close(self) -> None:
        """Forget everything but the records."""


class EdgeCall:
    """A call that is observed at its edges.

    Args:
        record: receives the tensors; with a backend x and dy are filled up to the tokens that were
            multiplied.
        backend: backend that shows its products; None: torch multiplies.
        backward_gemms: GEMMs of the backward pass that the backend will multiply.
    """

    def __init__(
        self,
        recorder: CallRecorder,
        record: ObservedCall,
        backend: LayerBackend | None = None,
        backward_gemms: AbstractSet[str] = frozenset(),
    ) -> None:
        self.recorder = recorder
        self.record = record
        self._left = set(backward_gemms)
        self._backend = backend
        self._watcher: ProductWatcher | None = None
        if backend is not None:
            self._watcher = backend.watcher(self._seen, recorder.guarding)

    def passed(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor, whose gradient becomes the field `name` of the record."""
        if not tensor.requires_grad:
            return tensor
        result: Tensor = _Passed.apply(tensor, name, self)  # type: ignore[no-untyped-call]
        return result

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of the forward pass."""
        if self._watcher is not None:
            self._watcher.begin()
        try:
            yield
        finally:
            self.close()

    def returned(self, y: Tensor) -> Tensor:
        """y as the layer returns it."""
        with self.recorder.guarding():
            self.record.y = kept(y).reshape(-1, y.shape[-1])
            return self.passed(y, "dy")
        return y

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Keep a gradient; the products that follow dy are watched, up to the last one wanted."""
        with self.recorder.guarding():
            if torch.is_grad_enabled():
                raise NotShownError("its gradients are differentiated themselves (create_graph)")
            if type(gradient) is not Tensor:
                kind = type(gradient).__name__
                raise NotShownError(f"its {name} is no tensor of values, but a {kind}")
            if name == "dy":  # another pass may give fewer gradients
                self.record.dx = self.record.dw = None
                self.record.forget("dgrad", "wgrad")
            setattr(self.record, name, kept(gradient).reshape(-1, gradient.shape[-1]))
            if name == "dy" and self._left and self._watcher is not None:
                self._watcher.begin()

    def close(self) -> None:
        """Watch no more."""
        if self._watcher is not None:
            self._watcher.end()

    def _seen(self, product: Multiplied) -> None:
        record = self.record
        assert self._backend is not None
        shown = Product(
            product.first,
            product.second,
            product.result,
            product.bias,
            product.before,
            elsewhere=True,
            backend=self._backend.name,
        )
        copied = record.products[product.gemm] = shown.kept()
        if product.gemm == "fprop":
            if record.x is not None:
                record.x = _filled(record.x, len(product.result))
            return
        if product.gemm == "dgrad" and record.dy is not None:
            record.dy = _filled(record.dy, len(product.result))
        elif product.gemm == "wgrad":
            record.dw = copied.result
            forward = record.products.get("fprop")
            if record.dy is not None and forward is not None:
                record.dy = _filled(record.dy, len(forward.result))
        self._left.discard(product.gemm)
        if not self._left:
            self.close()


def _filled(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros behind it: backends fill up tokens to whole blocks."""
    return F.pad(tensor, (0, 0, 0, rows - len(tensor)))


class ObservedLayer:
    """An executor of a whole layer (`nn.executors.whole_layer`), observed at the edges of its calls; a call
    that the engine runs it observes itself.

    Args:
        executor: the executor that computes.
        begin: gives the record of a call that begins, of its x, w and bias; None: it is not kept.
        backend: backend that shows its products; None: torch multiplies.
    """

    def __init__(
        self,
        executor: Any,
        recorder: CallRecorder,
        begin: Callable[[Tensor, Tensor, Tensor | None], ObservedCall | None],
        backend: LayerBackend | None,
    ) -> None:
        self._executor = executor
        self._recorder = recorder
        self._begin = begin
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def __call__(self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: Any) -> Tensor:
        by_engine = self._backend is None and call is not None
        edges = None
        if torch.is_grad_enabled() and not by_engine:
            with self._recorder.guarding():
                record = self._begin(x_MK, w, bias)
                if record is not None:
                    gradients = {"dgrad": x_MK, "wgrad": w}
                    gemms = {gemm for gemm, of in gradients.items() if of.requires_grad}
                    edges = EdgeCall(self._recorder, record, self._backend, gemms)
        if edges is None:
            y_MN: Tensor = self._executor(x_MK, w, bias, call)
            return y_MN
        x_MK = edges.passed(x_MK, "dx")
        if self._backend is None:
            w = edges.passed(w, "dw")
        with edges.forward():
            y_MN = self._executor(x_MK, w, bias, call)
        return edges.returned(y_MN)


class _Passed(torch.autograd.Function):
    """The identity, whose gradient an observed call keeps under a name."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str, edges: EdgeCall) -> Tensor:
        ctx.name = name
        ctx.edges = edges
        return tensor.detach()  # no view, which later code could not write

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.edges.arrived(ctx.name, gradient)
        return gradient, None, None


class PassRecorder(Protocol):
    """Keeps what the running pass of a layer computes (`audits.observe.Observer`)."""

    def product(self, gemm: str, product: Product) -> None:
        """A product of the running pass, whose tensors are copied."""

    def mean(self, tensor: str, mean: Tensor | None) -> None:
        """The mean of the tokens of x or dy; None: no product takes it."""

    def copied(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor of the running pass; None: the pass is not kept."""


class ObservedBackend:
    """A backend that reports what it multiplies for one GEMM."""

    def __init__(self, backend: Backend, gemm: str, recorder: PassRecorder) -> None:
        self._backend = backend
        self._gemm = gemm
        self._recorder = recorder
        self.name = backend.name
        self.takes_codes = backend.takes_codes
        self.both = None
        self.takes_tiles = backend.takes_tiles
        self.adds = backend.adds

    def why_not(self, table: Table, gemm: str, layer: Shape, device: Device) -> str | None:
        return self._backend.why_not(table, gemm, layer, device)

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        result = self._backend.product(a, b, out_dtype=out_dtype, bias=bias)
        self._recorder.product(self._gemm, Product(a, b, result, bias))
        return result

    def add(self, total_RS: Tensor, a: Prepared, b: Prepared) -> None:
        earlier_sum = self._recorder.copied(total_RS)
        self._backend.add(total_RS, a, b)
        if earlier_sum is not None:
            self._recorder.product(self._gemm, Product(a, b, total_RS, None, earlier_sum))

    def summing(self, accumulator: str) -> Backend:
        return ObservedBackend(self._backend.summing(accumulator), self._gemm, self._recorder)

    def writes_float32(self, spec: QuantSpec | None) -> bool:
        return self._backend.writes_float32(spec)


class ObservedTerms(TermGemms):
    """A layer whose operands have two terms, which reports the means that it takes out, and
    the codes of joined products.
    """

    def __init__(self, executor: TermGemms, recorder: PassRecorder) -> None:
        self.__dict__.update(executor.__dict__)
        self._executor = executor
        self._recorder = recorder

    def _forms_of_x(self, *arguments: Any) -> CentredForms:
        forms = super()._forms_of_x(*arguments)
        self._recorder.mean("x", forms.mean)
        return forms

    def _forms(self, forms: TensorForms, *arguments: Any) -> CentredForms:
        centred = super()._forms(forms, *arguments)
        if forms is self.dy:
            self._recorder.mean("dy", centred.mean)
        return centred

    def row_of_mean(self, gemm: str, mean: Decoded, w: Prepared) -> Tensor:
        return self._executor.row_of_mean(gemm, mean, w)  # not the product of the GEMM

    def joined_product(
        self,
        gemm: str,
        terms: tuple[tuple[Prepared, Prepared], Sequence[Term]],
        operands: Term,
        bias: Tensor | None,
    ) -> Tensor:
        result = self._executor.joined_product(gemm, terms, operands, bias)
        self._recorder.product(gemm, Product(*terms[0], result, bias, joined=True))
        return result
