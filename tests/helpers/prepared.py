"""Operands as a layer prepares them for a backend."""

from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.quantize import Decoded, QuantSpec, quantizer


def prepared(backend: Backend, x_RC: Tensor, spec: QuantSpec | None) -> Prepared:
    """x as codes or values, as the backend takes them; itself in high precision."""
    if spec is None:
        return Decoded(x_RC, None)
    found = quantizer(spec, x_RC.device.type)
    return found.codes(x_RC) if backend.takes_codes else found.values(x_RC)
