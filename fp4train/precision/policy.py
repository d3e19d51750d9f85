"""Which linear layers follow the recipe, and which are kept in high precision.

Training a whole model in FP4 diverges or loses quality. Keeping the last ~15 % of its blocks in high precision restores
it ("Pretraining Large Language Models with NVFP4", arXiv:2509.25149, section 4.1). TE does not choose layers, because
it does not know the structure of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from fp4train.backends.table import GEMMS
from fp4train.precision.layers import Layer
from fp4train.precision.phases import in_gemms
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import BF16


@dataclass(frozen=True, kw_only=True)
class LayerPolicy:
    """Keep the first and last blocks and named layers in high precision.

    Linear layers outside the model's blocks (the head) are always kept in high precision; embeddings, norms and
    attention products are never quantised.

    Args:
        first, last: blocks kept at either end: a count (integer) or a share of all blocks (float in [0, 1], rounded
            up).
        keep: patterns of layer names, matched on whole name components: "mlp.down" matches "blocks.3.mlp.down", not
            "blocks.3.mlp.down_norm"; "*" matches within one component. "mlp.down:fprop" or "mlp.down:fprop+dgrad" keeps
            these GEMMs of a layer only.
        recipe_for_kept: recipe of kept layers inside the blocks, BF16 or another such as MXFP8.
    """

    first: int | float = 0
    last: int | float = 0.15
    keep: Sequence[str] = ()
    recipe_for_kept: Recipe = field(default_factory=BF16)

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ValueError(
                    f"{name}={value!r} must be a count of blocks (integer ≥ 0) or a share between 0.0 and 1.0"
                )
            if isinstance(value, float) and value > 1:
                raise ValueError(f"{name}={value} is a share above 1.0; write a count of blocks as an integer")
        if not isinstance(self.recipe_for_kept, Recipe):
            raise TypeError(f"recipe_for_kept={self.recipe_for_kept!r} must be a recipe, for instance BF16()")
        object.__setattr__(self, "keep", (self.keep,) if isinstance(self.keep, str) else tuple(self.keep))
        for pattern in self.keep:
            if wrong := [gemm for gemm in _parts(pattern)[1] if gemm not in GEMMS]:
                raise ValueError(
                    f"keep={pattern!r}: {wrong[0]!r} is no GEMM; after the colon stand some of {', '.join(GEMMS)}, "
                    "joined by +"
                )

    def count(self, which: str, blocks: int) -> int:
        """The number of blocks that `first` or `last` selects, out of `blocks`."""
        value = getattr(self, which)
        # The tolerance keeps 0.2 of 5 blocks at one block, although 0.2·5 may round to a value above 1.
        return min(blocks, value if isinstance(value, int) else math.ceil(value * blocks - 1e-9))

    def why_kept(self, layer: Layer, gemm: str | None = None) -> str | None:
        """The reason why `layer`, or one GEMM of it, does not follow the recipe; None if it does."""
        if layer.block is None:
            return "outside the blocks"
        first, last = self.count("first", layer.blocks), self.count("last", layer.blocks)
        if layer.block < first:
            return f"policy.first={self.first} ({first} of {layer.blocks} blocks)"
        if layer.block >= layer.blocks - last:
            return f"policy.last={self.last} ({last} of {layer.blocks} blocks)"
        for pattern in self.keep:
            name, gemms = _parts(pattern)
            if (not gemms or gemm in gemms) and matches(name, layer.name):
                return f"policy.keep={pattern}"
        return None

    def recipe_for(self, layer: Layer, recipe: Recipe) -> Recipe:
        """The recipe of `layer` when the run's current recipe is `recipe`."""
        if not recipe.quantised:
            return recipe
        if self.why_kept(layer) is None:
            kept_gemms = [gemm for gemm in GEMMS if self.why_kept(layer, gemm) is not None]
            gemms = tuple(gemm for gemm in kept_gemms if gemm not in recipe.high_precision)
            return in_gemms(gemms, recipe, replace(self.recipe_for_kept, dtype=recipe.dtype)) if gemms else recipe
        kept = BF16() if layer.block is None else self.recipe_for_kept
        return replace(kept, dtype=recipe.dtype, high_precision=(*kept.high_precision, *recipe.high_precision))

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError for a pattern that matches none of these layers; it would have no effect."""
        names = list(names)
        for pattern in self.keep:
            name, _ = _parts(pattern)
            if name not in names and not any(matches(name, each) for each in names):
                some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                raise ValueError(f"policy.keep={pattern!r} matches no linear layer; the model has: {some}")


def _parts(pattern: str) -> tuple[str, tuple[str, ...]]:
    """The part of a pattern that is about the layer's name, and the GEMMs that it names; none: the whole layer."""
    name, colon, gemms = pattern.partition(":")
    return name, tuple(gemms.split("+")) if colon else ()


def matches(pattern: str, name: str) -> bool:
    """Whether the components of `pattern` match consecutive whole components of the dotted `name`."""
    wanted, have = pattern.split("."), name.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(have[i:], wanted, strict=False))
        for i in range(len(have) - len(wanted) + 1)
    )
