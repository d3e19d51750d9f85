"""The linear layers that follow the recipe, and those that are kept in high precision.

Training a whole model in FP4 diverges or loses quality. Keeping the last ~15 % of its blocks in
high precision restores it ("Pretraining Large Language Models with NVFP4", arXiv:2509.25149,
section 4.1). TE does not choose layers, because it does not know the structure of the network.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from fp4train.backends.table import GEMMS
from fp4train.precision.layers import CLASS, Layer
from fp4train.precision.phases import in_gemms
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import BF16


@dataclass(frozen=True, kw_only=True)
class LayerRecipe:
    """A recipe of its own for some layers, in the place of the run's.

    Args:
        layers: patterns of layers, as in `LayerPolicy.keep`, without GEMMs.
        recipe: theirs while the run's recipe quantises; GEMMs that a phase leaves in high precision
            stay there.
    """

    layers: Sequence[str]
    recipe: Recipe

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "layers", (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)
        )
        if not isinstance(self.recipe, Recipe):
            raise TypeError(
                f"policy.recipes: recipe={self.recipe!r} must be a recipe, for instance MXFP8()"
            )
        if not self.layers:
            raise ValueError(
                "policy.recipes: layers=[] names no layer: give patterns, for instance "
                "[class:Experts]"
            )
        if wrong := [pattern for pattern in self.layers if _parts(pattern)[1]]:
            raise ValueError(
                f"policy.recipes: layers={wrong[0]!r} names GEMMs, and a recipe here is that "
                "of a whole layer: give "
                "Mixed as the recipe for one per GEMM, or policy.keep for GEMMs in recipe_for_kept"
            )


@dataclass(frozen=True, kw_only=True)
class LayerPolicy:
    """Keep the first and last blocks and named layers in high precision; give other layers recipes
    of their own.

    Linear layers outside the model's blocks (the head) are always kept in high precision;
    embeddings, norms and attention products are never quantised. Nor are gates, decays and steps
    (`Layer.steers`), unless `recipes` names them.

    Args:
        first, last: blocks kept at either end: a count (integer) or a share of all blocks (float in
            [0, 1], rounded up).
        keep: patterns of layer names, matched on whole name components: "mlp.down" matches
            "blocks.3.mlp.down", not "blocks.3.mlp.down_norm"; "*" matches within one component.
            "class:Experts" matches layers by class: their own, or that of a module of the block
            which holds them ("class:*Attention"); "class:*Attention|Mamba2" names two classes.
            "mlp.down:fprop" or "mlp.down:fprop+dgrad" keeps these GEMMs of a layer only.
        recipe_for_kept: recipe of kept layers inside the blocks, BF16 or another such as MXFP8.
        recipes: recipes of layers that are not kept, where it is not the run's; the first that
            matches counts.
    """

    first: int | float = 0
    last: int | float = 0.15
    keep: Sequence[str] = ()
    recipe_for_kept: Recipe = field(default_factory=BF16)
    recipes: Sequence[LayerRecipe] = ()

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ValueError(
                    f"{name}={value!r} must be a count of blocks (integer ≥ 0) or a share "
                    "between 0.0 and 1.0"
                )
            if isinstance(value, float) and value > 1:
                raise ValueError(
                    f"{name}={value} is a share above 1.0; write a count of blocks as an integer"
                )
        if not isinstance(self.recipe_for_kept, Recipe):
            raise TypeError(
                f"recipe_for_kept={self.recipe_for_kept!r} must be a recipe, for instance BF16()"
            )
        object.__setattr__(
            self, "keep", (self.keep,) if isinstance(self.keep, str) else tuple(self.keep)
        )
        object.__setattr__(self, "recipes", tuple(self.recipes))
        if strange := [entry for entry in self.recipes if not isinstance(entry, LayerRecipe)]:
            raise TypeError(f"recipes={strange[0]!r} must be LayerRecipe(layers=…, recipe=…)")
        for pattern in self.keep:
            if wrong := [gemm for gemm in _parts(pattern)[1] if gemm not in GEMMS]:
                raise ValueError(
                    f"keep={pattern!r}: {wrong[0]!r} is no GEMM; after the colon stand some "
                    f"of {', '.join(GEMMS)}, "
                    "joined by +"
                )

    def count(self, which: str, blocks: int) -> int:
        """The number of blocks that `first` or `last` selects, out of `blocks`."""
        value = getattr(self, which)
        # The tolerance keeps 0.2 of 5 blocks at one block, although 0.2·5 may round to a value
        # above 1.
        return min(blocks, value if isinstance(value, int) else math.ceil(value * blocks - 1e-9))

    def why_kept(self, layer: Layer, gemm: str | None = None) -> str | None:
        """The reason why `layer`, or one GEMM of it, does not follow the recipe; None if it
        does.
        """
        if layer.block is None:
            return "outside the blocks"
        if layer.steers is not None and self.recipe_by_pattern(layer) is None:
            return layer.steers
        count_first = self.count("first", layer.blocks)
        last = self.count("last", layer.blocks)
        if layer.block < count_first:
            return f"policy.first={self.first} ({count_first} of {layer.blocks} blocks)"
        if layer.block >= layer.blocks - last:
            return f"policy.last={self.last} ({last} of {layer.blocks} blocks)"
        for pattern in self.keep:
            name, gemms = _parts(pattern)
            if (not gemms or gemm in gemms) and _matches_layer(name, layer):
                return f"policy.keep={pattern}"
        return None

    def recipe_by_pattern(self, layer: Layer) -> tuple[Recipe, str] | None:
        """The recipe that `recipes` has for `layer`, and its pattern as a reason; None: it follows
        the run's.
        """
        for entry in self.recipes:
            for pattern in entry.layers:
                if _matches_layer(pattern, layer):
                    return entry.recipe, f"policy.recipes={pattern}"
        return None

    def why(self, layer: Layer, gemm: str) -> str | None:
        """The reason why one GEMM of `layer` runs in another recipe than the run's; None if it does
        not.
        """
        kept = self.why_kept(layer, gemm)
        layer_recipe = self.recipe_by_pattern(layer)
        return kept or (None if layer_recipe is None else layer_recipe[1])

    def recipe_for(self, layer: Layer, recipe: Recipe) -> Recipe:
        """The recipe of `layer` when the run's current recipe is `recipe`."""
        if not recipe.quantised:
            return recipe
        if self.why_kept(layer) is None:
            if (layer_recipe := self.recipe_by_pattern(layer)) is not None:
                recipe = _with_exceptions_of(recipe, layer_recipe[0])
            kept_gemms = [
                gemm for gemm in GEMMS if self.keep and self.why_kept(layer, gemm) is not None
            ]
            gemms = tuple(gemm for gemm in kept_gemms if gemm not in recipe.high_precision)
            if not gemms:
                return recipe
            try:
                return in_gemms(gemms, recipe, replace(self.recipe_for_kept, dtype=recipe.dtype))
            except ValueError as error:
                raise ValueError(
                    f"policy.keep: {layer.name}: {error}: keep the whole layer, or keep its GEMMs "
                    "in high precision (policy.recipe_for_kept: BF16)"
                ) from error
        steers = layer.block is None or layer.steers is not None
        return _with_exceptions_of(recipe, BF16() if steers else self.recipe_for_kept)

    def readers(self, layer: Layer, recipe: Recipe) -> tuple[str, ...]:
        """The layers of the group of `layer` (`Layer.fused`), itself included, that run in its
        recipe: they quantise alike the x that all of the group read.
        """
        if not self.keep and not self.recipes:  # what the layers of a group differ by
            return layer.fused
        layer_recipe = self.recipe_for(layer, recipe)
        return tuple(
            name
            for name in layer.fused
            if self.recipe_for(replace(layer, name=name), recipe) == layer_recipe
        )

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError for a pattern that matches none of these layers; it would have no
        effect.

        Args:
            names: names of layers, and of their classes as `Layer.classes` has them.
        """
        names = list(names)
        patterns = [("keep", pattern) for pattern in self.keep]
        patterns += [("recipes", pattern) for entry in self.recipes for pattern in entry.layers]
        for key, pattern in patterns:
            name, _ = _parts(pattern)
            alike = list(
                dict.fromkeys(
                    entry for entry in names if entry.startswith(CLASS) == name.startswith(CLASS)
                )
            )
            matched = _matches_class if name.startswith(CLASS) else matches
            if name not in alike and not any(matched(name, entry) for entry in alike):
                some = ", ".join(alike[:8]) + (", …" if len(alike) > 8 else "")
                raise ValueError(
                    f"policy.{key}={pattern!r} matches no linear layer; the model has: {some}"
                )


class _EveryLayer(LayerPolicy):
    """Every layer follows the recipe, those outside of blocks too."""

    def why_kept(self, layer: Layer, gemm: str | None = None) -> None:
        return None


EVERY_LAYER = _EveryLayer()
"""The policy of a loop that gives none."""


def _with_exceptions_of(recipe: Recipe, layer_recipe: Recipe) -> Recipe:
    """`layer_recipe` in the place of `recipe`: with its dtype, and its GEMMs in high precision."""
    return replace(
        layer_recipe,
        dtype=recipe.dtype,
        high_precision=(*layer_recipe.high_precision, *recipe.high_precision),
    )


def _parts(pattern: str) -> tuple[str, tuple[str, ...]]:
    """The part of a pattern that is about the layer, and the GEMMs that it names; none: the whole
    layer.
    """
    prefix = CLASS if pattern.startswith(CLASS) else ""
    name, colon, gemms = pattern.removeprefix(prefix).partition(":")
    return prefix + name, tuple(gemms.split("+")) if colon else ()


def _matches_layer(pattern: str, layer: Layer) -> bool:
    """Whether a pattern without GEMMs is about this layer."""
    if pattern.startswith(CLASS):
        return any(_matches_class(pattern, name) for name in layer.classes)
    return matches(pattern, layer.name)


def _matches_class(pattern: str, name: str) -> bool:
    """Whether a "class:" pattern, or one of the alternatives that "|" divides it into, matches the
    "class:" name.
    """
    alternatives = pattern.removeprefix(CLASS).split("|")
    return any(fnmatchcase(name, CLASS + alternative) for alternative in alternatives)


def matches(pattern: str, name: str) -> bool:
    """Whether the components of `pattern` match consecutive whole components of the dotted
    `name`.
    """
    pattern_parts = pattern.split(".")
    have = name.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(have[i:], pattern_parts, strict=False))
        for i in range(len(have) - len(pattern_parts) + 1)
    )
