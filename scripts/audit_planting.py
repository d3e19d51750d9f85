"""Faults that programs have had, planted into the quantisation and the products of a live layer.

Each is a function that changes what one operand of one layer becomes, or its product; `planted`
puts it into the place where fp4train makes operands. They use fp4train's kernels, not the audit's
code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.nn.call import LayerCall
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.operands import Form, TensorForms
from fp4train.nn.weights import PreparedWeights
from fp4train.quantize import Decoded, Quantized, quantizer, reference

GROUP = 16
"""Tokens that a Hadamard transform mixes."""


@dataclass
class Place:
    """An operand that is being made.

    Args:
        tensor: "x", "w" or "dy"; column: whether it is the form along tokens, or that of wᵀ.
        values: [R, C] in the orientation that is quantised.
        spec: its spec; key: its random key, or None; codes: whether codes are asked for.
        call: the call.
        memory: state that a fault keeps from step to step.
    """

    tensor: str
    column: bool
    values: Tensor
    spec: Any
    key: Any
    codes: bool
    call: LayerCall
    memory: dict[str, Any]

    def quantised(self, **changes: Any) -> Any:
        """The operand by the kernels, with other values, spec, key or amax."""
        spec = changes.pop("spec", self.spec)
        values = changes.pop("values", self.values)
        key = changes.pop("key", self.key)
        amax = changes.pop("amax", None)
        chosen = quantizer(spec, values.device.type)
        make = chosen.codes if self.codes else chosen.values
        return make(values, key if spec.random else None, amax)

    def decoded(self, **changes: Any) -> Decoded:
        operand = self.quantised(**changes)
        return operand.decoded() if isinstance(operand, Quantized) else operand


Change = Callable[[Place], Any]
"""The operand as a faulty program makes it; None: as it is."""


def _stochastic(make: Change) -> Change:
    return lambda place: make(place) if place.spec.random else None


def _row_wise(tensor: str, make: Change) -> Change:
    def change(place: Place) -> Any:
        return make(place) if place.tensor == tensor and not place.column else None

    return change


def _column_wise(tensor: str, make: Change) -> Change:
    def change(place: Place) -> Any:
        return make(place) if place.tensor == tensor and place.column else None

    return change


def _zero(place: Place) -> Any:
    return place.quantised(values=torch.zeros_like(place.values))


def _weak_generator(place: Place) -> Any:
    key = place.key.replace(operand=0, row_offset=0, col_offset=0, layer=0)
    return place.quantised(key=key)


def _nearest(place: Place) -> Any:
    return place.quantised(spec=replace(place.spec, rounding="nearest"))


def _padded(operand: Decoded) -> Decoded:
    """The operand with columns of zeros up to whole groups of the transform, as it has with it."""
    missing = -operand.values.shape[1] % GROUP
    return Decoded(F.pad(operand.values, (0, missing)), operand.scale)


def _no_hadamard(place: Place) -> Any:
    return _padded(place.decoded(spec=replace(place.spec, hadamard=None)))


def _tail(place: Place) -> Any:
    values = place.values.clone()
    values[-(len(values) // 4) :] = values[:1]
    return place.quantised(values=values)


def _half(place: Place) -> Any:
    values = place.values.clone()
    half = len(values) // 2
    values[half:] = torch.linspace(-1, 1, values[half:].numel()).view_as(values[half:])
    return place.quantised(values=values)


def _wrong_amax(place: Place) -> Any:
    amax = place.memory["w"].abs().max().float()
    return place.quantised(amax=amax)


def _stale_amax(place: Place) -> Any:
    step = place.call.position.step.number
    amaxes = place.memory.setdefault("amaxes", {})
    amaxes.setdefault(step, place.values.float().abs().max())
    return place.quantised(amax=amaxes.get(step - 1, amaxes[step]))


def _along_rows(place: Place) -> Any:
    spec = replace(place.spec, hadamard=None)
    values = place.values.T.contiguous()
    turned = replace(place, values=values, spec=spec).decoded()
    return _padded(Decoded(turned.values.T.contiguous(), turned.scale))


def _inverted(place: Place) -> Any:
    decoded = place.decoded()
    assert decoded.scale is not None
    return Decoded(decoded.values, 1 / decoded.scale)


def _floor_scale(place: Place) -> Any:
    """The block scale is cut off: E4M3 toward zero, by the bits of the exact one."""
    plain = reference.quantize(place.values, place.spec)
    blocks = reference.to_blocks(place.values, place.spec).abs().amax(dim=(1, 3)).float()
    decode = plain.global_decode()
    assert decode is not None
    encode = 1 / decode
    exact = blocks * (encode * torch.tensor(6.0).reciprocal())
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = (torch.searchsorted(table, exact.clamp(max=448.0), right=True) - 1).to(torch.uint8)
    scale = table[scales.int()]
    factor = (scale * decode).reciprocal().clamp(max=torch.finfo().max)
    t = reference.to_blocks(place.values, place.spec).float() * factor[:, None, :, None] + 0.0
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    low = torch.bucketize(t.abs(), edges, right=False)
    even = torch.bucketize(t.abs(), edges, right=True)
    index = torch.where(low == even, low, torch.where(low % 2 == 0, low, even))
    values = grid[index].copysign(t) * scale[:, None, :, None]
    rows, columns = place.values.shape
    values = values.reshape(-1, values.shape[2] * values.shape[3])[:rows, :columns]
    return Decoded(values.to(torch.bfloat16), decode)


def _one_for_zero_scale(place: Place) -> Any:
    codes = reference.quantize(place.values, place.spec)
    scales = torch.where(codes.scales == 0, 0x38, codes.scales).to(torch.uint8)
    return codes._replace(scales=scales).decoded()


def _doubled_code(place: Place) -> Any:
    decoded = place.decoded()
    values = decoded.values.clone()
    at = int(values[0].abs().argmax())
    values[0, at] *= 2
    return Decoded(values, decoded.scale)


OPERAND_FAULTS: dict[str, tuple[Change, str]] = {
    "zeroed stochastic rounding": (_stochastic(_zero), "from zeros"),
    "a weak generator": (_stochastic(_weak_generator), "random bits of operand 0"),
    "the same bits in every step": (
        _stochastic(lambda place: place.quantised(key=place.key.replace(step=0))),
        "random bits of step 0",
    ),
    "the same bits in every microbatch": (
        _stochastic(
            lambda place: place.quantised(key=place.key.replace(row_offset=0, col_offset=0))
        ),
        "first tokens",
    ),
    "another seed of stochastic rounding": (
        _stochastic(lambda place: place.quantised(key=place.key.replace(seed=12345))),
        "not those of its position",
    ),
    "an option that resolves to off": (_stochastic(_nearest), "rounding=nearest"),
    "Hadamard on one operand only": (_column_wise("dy", _no_hadamard), "hadamard=None"),
    "scale floor instead of nearest": (_row_wise("x", _floor_scale), "cut off"),
    "a zero block scale taken for 1": (_row_wise("x", _one_for_zero_scale), "taken for 1"),
    "an inverted global scale": (_row_wise("x", _inverted), "inverted"),
    "amax of the wrong tensor": (_row_wise("x", _wrong_amax), "amax of w"),
    "amax stale by one step": (_row_wise("x", _stale_amax), "step before"),
    "a padded tail not masked": (_row_wise("x", _tail), "repeat the first row"),
    "columns quantised along rows": (_column_wise("dy", _along_rows), "other axis"),
    "dgrad with the forward's spec": (_row_wise("dy", _nearest), "rounding=nearest"),
    "half of a shard uninitialised": (_row_wise("x", _half), "are of another tensor"),
    "one 4-bit code doubled": (_row_wise("x", _doubled_code), "single values changed"),
}
"""Fault → (what it makes of an operand, words that its explanation must have)."""


@dataclass
class Planted:
    """A fault that is planted.

    Args:
        layer: name of the layer that has it; None: all layers.
        memory: state that the fault keeps from step to step.
        on: whether it acts.
    """

    layer: str | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    on: bool = True

    def acts_on(self, call: LayerCall) -> bool:
        keys = {zlib.crc32(name.encode()) for name in (self.layer or "",)}
        return self.on and (self.layer is None or call.layer_key in keys)


@contextmanager
def planted_operand(change: Change, layer: str | None = None) -> Iterator[Planted]:
    """A context in which the operands of a layer are made as `change` makes them."""
    fault = Planted(layer)
    whole_prepare = TensorForms.prepare

    def of_form(form: Form, x_MK: Tensor, call: LayerCall) -> Any:
        if form.spec is None:
            return form.prepare(x_MK, call)
        values = x_MK.T if form.column else x_MK
        key = form.key(call, len(x_MK)) if form.stochastic else None
        place = Place(
            form.tensor, form.column, values, form.spec, key, form.codes, call, fault.memory
        )
        operand = change(place)
        return form.prepare(x_MK, call) if operand is None else operand

    def prepare(
        forms: TensorForms, x_MK: Tensor, call: LayerCall, row: bool = True, column: bool = True
    ) -> Any:
        if not fault.acts_on(call):
            return whole_prepare(forms, x_MK, call, row, column)
        pair = ((forms.row, row), (forms.column, column))
        return tuple(of_form(form, x_MK, call) if asked else None for form, asked in pair)

    def forward(executor: Gemms, x_MK: Tensor, w_NK: Tensor, *arguments: Any) -> Any:
        fault.memory["w"] = w_NK
        return whole_forward(executor, x_MK, w_NK, *arguments)

    whole_forward = Gemms.forward
    with (
        mock.patch.object(TensorForms, "prepare", prepare),
        mock.patch.object(Gemms, "forward", forward),
    ):
        yield fault


@contextmanager
def stale_weights(layer: str | None = None) -> Iterator[Planted]:
    """A context in which the prepared weight of a layer is that of the step before."""
    fault = Planted(layer)
    whole_form = PreparedWeights.prepared
    latest: dict[int, Tensor] = {}
    stale: dict[int, Tensor] = {}
    steps: dict[int, int] = {}

    def form(
        weights: PreparedWeights,
        w_NK: Tensor,
        wanted: Any,
        call: LayerCall,
        *more: Any,
        **options: Any,
    ) -> Any:
        step = call.position.step.number
        if fault.acts_on(call):
            key = call.layer_key
            if steps.get(key) != step:
                current = w_NK.detach().clone()
                stale[key] = latest.get(key, current)
                latest[key] = current
                steps[key] = step
            return whole_form(PreparedWeights(False), stale[key], wanted, call, *more, **options)
        return whole_form(weights, w_NK, wanted, call, *more, **options)

    with mock.patch.object(PreparedWeights, "prepared", form):
        yield fault


ProductChange = Callable[[str, Tensor], Tensor]
"""(GEMM, product) → the product as a faulty program returns it."""


def _element(amount: float) -> Callable[[Tensor], Tensor]:
    def change(product: Tensor) -> Tensor:
        product = product.clone()
        product[min(3, len(product) - 1), 5] += amount
        return product

    return change


def _row(product: Tensor) -> Tensor:
    product = product.clone()
    product[min(2, len(product) - 1)] *= 1.01
    return product


PRODUCT_FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "one product doubled": ("fprop", lambda product: product * 2, "doubled"),
    "one product zeroed": ("dgrad", torch.zeros_like, "zero"),
    "one element of a product + 1e4": ("fprop", _element(1e4), "single elements"),
    "one element of wgrad + 1e8": ("wgrad", _element(1e8), "single elements"),
    "a row of every product 1 % wrong": ("", _row, "row 2"),
}
"""Fault → (GEMM, or all; what it makes of the product; words that its explanation must have)."""


@contextmanager
def planted_product(
    gemm: str, change: Callable[[Tensor], Tensor], layer: str | None = None
) -> Iterator[Planted]:
    """A context in which what a layer's GEMM returns is changed."""
    fault = Planted(layer)
    whole_forward, whole_backward = Gemms.forward, Gemms.backward

    def forward(
        executor: Gemms, x: Tensor, w: Tensor, bias: Tensor | None, call: LayerCall, *more: Any
    ) -> Any:
        y, saved = whole_forward(executor, x, w, bias, call, *more)
        if fault.acts_on(call) and gemm in ("", "fprop"):
            y = change(y)
        return y, saved

    def backward(
        executor: Gemms,
        dy: Tensor,
        saved: Any,
        call: LayerCall,
        *more: Any,
        **options: Any,
    ) -> Any:
        dx, dw, dbias = whole_backward(executor, dy, saved, call, *more, **options)
        if fault.acts_on(call):
            if dx is not None and gemm in ("", "dgrad"):
                dx = change(dx)
            if dw is not None and gemm in ("", "wgrad"):
                dw = change(dw)
        return dx, dw, dbias

    with (
        mock.patch.object(Gemms, "forward", forward),
        mock.patch.object(Gemms, "backward", backward),
    ):
        yield fault
