"""Values that a spec represents exactly: for tests, and to separate input rounding from other errors."""

import math
from dataclasses import replace

from torch import Tensor

from fp4train.quantize.quantize import quantize
from fp4train.quantize.spec import QuantSpec
from fp4train.quantize.transform import Hadamard


def cast_to_representable(x: Tensor, spec: QuantSpec) -> Tensor:
    """x rounded to nearest onto what `spec` represents; same shape and dtype, in the domain of x.

    Leading dimensions are rows. Quantising the result again gives the same values to the precision of x's dtype (with a
    Hadamard transform: to that of its BF16 rounding), so a product of such tensors shows no quantisation error. With
    delayed scaling the tensor's own amax is used.
    """
    if spec.rounding == "eden" or (isinstance(spec.hadamard, Hadamard) and spec.hadamard.signs == "step"):
        raise ValueError(f"{spec}: its transform is drawn anew in each step, so no values stay representable")
    spec = replace(spec, rounding="nearest", delayed=None, requantises=None)
    cols = x.shape[-1] if x.ndim else 1
    x_RC = x.detach().reshape(math.prod(x.shape[:-1]), cols)
    return quantize(x_RC, spec).restore(x.dtype).reshape(x.shape)
