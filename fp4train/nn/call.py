"""One call of a linear layer: its place in the run, which keys the random bits, and its delayed amaxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fp4train.quantize import QuantSpec, RandomKey

if TYPE_CHECKING:
    from fp4train.nn.gemms import LayerGemms
    from fp4train.nn.scaling import DelayedScaling
    from fp4train.nn.weights import PreparedWeights

_OFFSET_SPREAD = 1 << 34
"""Where token offsets that are no multiple of 8 are spread to: no other offset reaches there."""


class Call:
    """What forward and backward of one call need besides tensors.

    Args:
        gemms: what the layer runs.
        seed, step: weights do not change while they stay the same.
        token_offset: index within the step's batch of the first token.
        layer_key: keys the random bits of the layer.
        weights: the layer's prepared weights; None where nobody says when the weights change.
        scaling: the layer's amax histories.
        training: whether amaxes enter their histories.
    """

    __slots__ = ("amaxes", "gemms", "layer_key", "scaling", "seed", "step", "token_offset", "training", "weights")

    def __init__(
        self,
        gemms: LayerGemms,
        seed: int,
        step: int,
        token_offset: int,
        layer_key: int,
        weights: PreparedWeights,
        scaling: DelayedScaling,
        training: bool,
    ) -> None:
        self.gemms, self.seed, self.step, self.token_offset, self.layer_key = gemms, seed, step, token_offset, layer_key
        self.weights, self.scaling, self.training = weights, scaling, training
        self.amaxes: dict[str, Tensor] | None = None

    def key(self, operand: int, *, along_tokens: bool = False) -> RandomKey:
        """The random bits of x or dy, whose tokens are rows or, `along_tokens`, columns."""
        offset = self.token_offset
        row = column = 0
        if not along_tokens:
            row = offset
        else:
            # Eight neighbouring columns share one draw of the generator.
            column = offset if offset % 8 == 0 else _OFFSET_SPREAD + offset * 8
        return RandomKey(
            seed=self.seed,
            step=self.step,
            layer=self.layer_key,
            operand=operand,
            row_offset=row,
            col_offset=column,
        )

    def weight_key(self, operand: int) -> RandomKey:
        """The random bits of the weight: the same for all tokens of a step."""
        return RandomKey(seed=self.seed, step=self.step, layer=self.layer_key, operand=operand)

    def amax(self, name: str, spec: QuantSpec, tensor: Tensor) -> Tensor:
        """The delayed amax that scales x or dy; both forms of the tensor take the same."""
        if self.amaxes is None:
            self.amaxes = {}
        if name not in self.amaxes:
            self.amaxes[name] = self.scaling.amax(name, spec, tensor, enter=self.training)
        return self.amaxes[name]
