"""One call of a linear layer: its position in the run, which keys the random bits, and its delayed amaxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fp4train.precision.context import backward_pass
from fp4train.quantize import QuantSpec, RandomKey

if TYPE_CHECKING:
    from fp4train.nn.gemms import LayerGemms
    from fp4train.nn.outliers import PartsCall
    from fp4train.nn.scaling import DelayedScaling
    from fp4train.nn.weights import PreparedWeights

_OFFSET_SPREAD = 1 << 34
"""Column range for token offsets that are not multiples of 8; no other offset reaches it."""


class TokenCount:
    """The tokens that a layer was given within a step: the offset of a call whose context has no `token_offset`.

    So calls of one step, over microbatches or of a weight that a model uses twice, draw different random bits.
    """

    __slots__ = ("_calls", "_position", "_tokens")

    def __init__(self) -> None:
        self._position: tuple[int, int] | None = None
        self._calls = self._tokens = 0

    def offset(self, position: tuple[int, int], tokens: int, name: str) -> int:
        """Index of the first token of a training call of `tokens` tokens at `position`, (seed, step).

        A backward pass that enters a context of its own repeats a call of its forward pass, and is not counted.

        Raises:
            RuntimeError: it may repeat any of several calls.
        """
        if self._position != position:
            self._position, self._calls, self._tokens = position, 0, 0
        if backward_pass() != -1:
            if self._calls > 1:
                raise RuntimeError(
                    f"layer {name} is called in backward by a context of its own, after {self._calls} calls in this "
                    "step: which of them it repeats, and with which random bits, is not known. Give autocast a "
                    "token_offset, or recompute with fp4train.precision.recompute or recompute_contexts."
                )
            return 0
        offset = self._tokens
        self._calls, self._tokens = self._calls + 1, offset + tokens
        return offset


class Call:
    """The state of one call, shared by forward and backward; tensors are passed separately.

    Args:
        gemms: the layer's GEMMs.
        seed, step: key of the random bits; weights are constant within one (seed, step).
        token_offset: index of the first token in the global batch of the step.
        layer_key: the layer's part of the random key.
        weights: the layer's prepared weights; an empty cache if the context has no step.
        scaling: the layer's amax histories.
        training: whether amaxes enter their histories.
        counters: `step` on the device, where it is read from there (`RandomKey.counters`).
    """

    __slots__ = (
        *("amaxes", "counters", "gemms", "layer_key", "parameter", "parts", "scaling", "seed", "step"),
        *("token_offset", "training", "weights"),
    )

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
        counters: Tensor | None = None,
    ) -> None:
        self.counters = counters
        self.gemms, self.seed, self.step, self.token_offset, self.layer_key = gemms, seed, step, token_offset, layer_key
        self.weights, self.scaling, self.training = weights, scaling, training
        self.amaxes: dict[str, Tensor] | None = None
        self.parameter: Tensor | None = None
        """The parameter whose shard or part w is, if w is new in each call."""
        self.parts: PartsCall | None = None
        """The calls of both parts, where outlier channels are multiplied apart."""

    def of_part(self, gemms: LayerGemms, weights: PreparedWeights) -> Call:
        """The call of a part of the channels, with GEMMs and prepared weights of its own."""
        position = (self.seed, self.step, self.token_offset, self.layer_key)
        return Call(gemms, *position, weights, self.scaling, self.training, self.counters)

    def key(self, operand: int, *, along_tokens: bool = False, feature: int = 0, token: int = 0) -> RandomKey:
        """The random key of x or dy. Tokens are rows; with `along_tokens` they are columns.

        Args:
            feature, token: index of the tensor's first feature in the whole layer and of its first token in the call.
        """
        offset = self.token_offset + token
        if not along_tokens:
            row, column = offset, feature
        else:
            # Eight neighbouring columns share one draw of the generator.
            row, column = feature, offset if offset % 8 == 0 else _OFFSET_SPREAD + offset * 8
        return RandomKey(
            seed=self.seed,
            step=self.step,
            layer=self.layer_key,
            operand=operand,
            row_offset=row,
            col_offset=column,
            counters=self.counters,
        )

    def weight_key(self, operand: int, start: tuple[int, int] = (0, 0)) -> RandomKey:
        """The random key of the weight: the same for all tokens of a step.

        Args:
            start: row and column of its first element in the whole layer's.
        """
        return RandomKey(
            seed=self.seed,
            step=self.step,
            layer=self.layer_key,
            operand=operand,
            row_offset=start[0],
            col_offset=start[1],
            counters=self.counters,
        )

    def amax(self, name: str, spec: QuantSpec, tensor: Tensor) -> Tensor:
        """The delayed amax that scales x or dy; both forms of the tensor use the same one."""
        if self.amaxes is None:
            self.amaxes = {}
        if name not in self.amaxes:
            position = (self.seed, self.step)
            self.amaxes[name] = self.scaling.amax(name, spec, tensor, enter=self.training, position=position)
        return self.amaxes[name]
