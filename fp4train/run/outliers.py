"""The outlier channels of a run's recipes: what is refused before it starts."""

from __future__ import annotations

from fp4train.errors import UserError
from fp4train.precision.plan import Plan


def check_outliers(plan: Plan, *, stages: int, tensors: int = 1) -> None:
    """Raises UserError where a recipe has outlier channels and layers cannot multiply them apart.

    Args:
        stages, tensors: ranks of a pipeline, and ranks that tensor parallelism cuts each layer over.
    """
    layers = (each for stretch in plan.stretches for each in stretch.layers.values())
    having = [each for each in layers if each.quantised and each.recipe.outliers]
    if not having:
        return
    recipe = having[0].recipe
    if stages > 1 or tensors > 1:
        raise UserError(
            f"recipe {recipe.name}: outlier channels are chosen among all input channels of a layer, over the tokens "
            "of the whole batch, which data ranks share and parallel.tp and parallel.pp do not; use "
            "parallel.dp_shard or parallel.dp_replicate, or recipe.outliers=null"
        )
    if not any(each.recipe.outliers and each.recipe.outliers.count(each.layer.in_features) for each in having):
        outliers, widest = recipe.outliers, max(each.layer.in_features for each in having)
        assert outliers is not None
        raise UserError(
            f"recipe {recipe.name}: outliers.share={outliers.share} in multiples of outliers.multiple="
            f"{outliers.multiple} leaves no other channel of any layer (the widest has {widest} input channels); take "
            "a smaller multiple or share, or recipe.outliers=null"
        )
