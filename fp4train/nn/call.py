"""One call of a linear layer: its recipe, its place in the run, and how x and dy are quantised in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.recipe import Recipe
from fp4train.quantize import Form, QuantSpec, RandomKey


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer: everything that its forward and backward need besides tensors."""

    recipe: Recipe
    seed: int
    step: int
    token_offset: int
    layer_key: int
    backend: str
    device: str
    weights: PreparedWeights
    scaling: DelayedScaling
    training: bool
    amaxes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def position(self) -> tuple[int, int]:
        """Seed and step: weights do not change while it stays the same."""
        return self.seed, self.step

    def key(self, operand: int, *, along_tokens: bool = False) -> RandomKey:
        """The random bits of x or dy, whose tokens are rows or, `along_tokens`, columns."""
        offset = self.token_offset
        # Eight neighbouring columns share one draw of the generator. An offset inside such a group is spread out, to
        # where no other one reaches.
        column = offset if offset % 8 == 0 else (1 << 34) + offset * 8
        return RandomKey(
            seed=self.seed,
            step=self.step,
            layer=self.layer_key,
            operand=operand,
            row_offset=0 if along_tokens else offset,
            col_offset=column if along_tokens else 0,
        )

    def form(
        self, name: str, spec: QuantSpec | None, tensor: Tensor, operand: int, *, along_tokens: bool = False
    ) -> Form | None:
        """How x or dy is quantised as this operand; None in high precision."""
        if spec is None:
            return None
        key = self.key(operand, along_tokens=along_tokens) if spec.rounding == "stochastic" else None
        return Form(spec=spec, key=key, amax=self.amax(name, spec, tensor))

    def weight_key(self, operand: int) -> RandomKey:
        """The random bits of the weight: the same for all tokens of a step."""
        return RandomKey(seed=self.seed, step=self.step, layer=self.layer_key, operand=operand)

    def amax(self, name: str, spec: QuantSpec | None, tensor: Tensor) -> Tensor | None:
        """The amax that scales `tensor` where its spec uses a delayed one: both its forms take the same."""
        if spec is None or spec.delayed is None:
            return None
        if name not in self.amaxes:
            self.amaxes[name] = self.scaling.amax(name, spec, tensor, enter=self.training)
        return self.amaxes[name]
