"""Specs that no single Triton kernel knows, in steps: torch's operators make another tensor of x,
and a kernel quantises it.

    requantises   x.T is quantised by a kernel, and its values are rounded to BF16
    hadamard      the readable reference's operators transform x, where a transform has more
                  neighbours than a thread holds, is no Hadamard transform, or draws signs that the
                  kernel of an amax does not

The random bits of an element are those of its place in what is quantised last, as in the reference:
the results are equal in every bit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fp4train.quantize.quantized import Decoded, Quantized, operand_width
from fp4train.quantize.quantizer import Quantizer, check_input
from fp4train.quantize.random import RandomKey
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import transform
from fp4train.quantize.triton_limits import why_not_spec


def last_step(spec: QuantSpec) -> QuantSpec:
    """The spec by which a kernel quantises last; the spec itself where no step comes before."""
    # an infinite float32 scale depends on the dtype of x, and the groups of MS-EDEN on its transform
    if not spec.scale_format.is_byte or spec.rounding == "eden":
        return spec
    last = spec
    if spec.requantises is not None:
        last = replace(spec, requantises=None)
    if last.hadamard is not None and why_not_spec(last) is not None:
        last = replace(last, hadamard=None)
    return last


def why_not_steps(spec: QuantSpec) -> str | None:
    """Why the kernels do not quantise by the spec, in one step or in several; None if they do."""
    reason = why_not_spec(spec)
    if reason is None:
        return None
    last = last_step(spec)
    if last == spec:
        return reason
    first = spec.requantises
    if first is not None and first.hadamard is not None:
        return f"requantises with hadamard={first.hadamard!r}: no step undoes the transform"
    return why_not_spec(last) or (None if first is None else why_not_spec(first))


class StepsQuantizer(Quantizer):
    """See the module and `Quantizer`.

    Args:
        first: quantizer of `spec.requantises`; None: x is not rounded before.
        last: quantizer of `last_step(spec)`.
    """

    kernel = "triton"

    def __init__(self, spec: QuantSpec, first: Quantizer | None, last: Quantizer) -> None:
        super().__init__(spec)
        self._first = first
        self._last = last
        self._transforms = spec.hadamard is not None and last.spec.hadamard is None

    def codes(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Quantized:
        """Codes and scales of x."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        shape = (x_RC.shape[0], x_RC.shape[1])
        quantized = self._last.codes(self._before(x_RC, key), key, amax)
        return quantized._replace(spec=self.spec, shape=shape)

    def values(
        self, x_RC: Tensor, key: RandomKey | None = None, amax: Tensor | None = None
    ) -> Decoded:
        """`codes(...).decoded()` to the bit, without the codes."""
        x_RC = check_input(x_RC, self.spec, key, amax)
        return self._last.values(self._before(x_RC, key), key, amax)

    def decode(self, quantized: Quantized) -> Decoded:
        """`quantized.decoded()` to the bit."""
        self._check_spec(quantized)
        rows, columns = quantized.shape
        shape = (rows, operand_width(self.spec, columns))
        return self._last.decode(quantized._replace(spec=self._last.spec, shape=shape))

    def _before(self, x_RC: Tensor, key: RandomKey | None) -> Tensor:
        """What the last step quantises."""
        if self._first is not None:
            x_RC = self._first.values(x_RC.T).tensor(torch.bfloat16).T
        if self._transforms and self.spec.hadamard is not None:
            x_RC = transform(x_RC, self.spec.hadamard, key)
        return x_RC
