"""The amaxes of a model's weights on a GPU, measured in one launch between two updates."""

from __future__ import annotations

import weakref

from torch import Tensor

from fp4train.precision.settings import ConstantWeights
from fp4train.quantize.triton_amaxes import amaxes, takes


class MeasuredAmaxes:
    """The amaxes of the weights that were asked for in the passes before: measured together where
    the first is asked for after a write.
    """

    def __init__(self) -> None:
        self._asked: list[weakref.ref[Tensor]] = []
        self._measured: dict[int, Tensor] = {}
        self._constant: object = None

    def __reduce__(self) -> tuple[type[MeasuredAmaxes], tuple[()]]:
        return MeasuredAmaxes, ()

    def amax(self, weight: Tensor, constant: ConstantWeights | None) -> Tensor | None:
        """The amax of a parameter, 0-d float32; None: it is to be measured alone.

        Args:
            constant: the settings of the passes between which nobody writes it.
        """
        if constant is None or not takes(weight):
            return None
        if self._constant is not (now := weakref.ref(constant)):
            self._constant = now
            seen = [w for ref in self._asked if (w := ref()) is not None and takes(w)]
            weights = [w for w in seen if w.device == weight.device] or [weight]
            self._asked = []
            self._measured = dict(zip(map(id, weights), amaxes(weights), strict=True))
        self._asked.append(weakref.ref(weight))
        return self._measured.pop(id(weight), None)
