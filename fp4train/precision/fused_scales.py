"""One global scale for the weights that serving software multiplies as one.

Serving software multiplies queries, keys and values by one weight, gate and up by another, and takes
ONE global scale for each. Weights that were quantised with scales of their own must be quantised
again for it: with the largest amax of the group 3 % of NVFP4's codes change. Under
`recipe.fused_scales` training quantises them so from the start, and the codes can be served:

    amax = max over the group of max |w|        S_enc = 448·6 / amax for each of its weights

A model says which layers form a group (`ParameterSpec.fused`); the policy must keep all of a group
or none (`check_fused`).
"""

from __future__ import annotations

from collections.abc import Mapping

from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.recipe import Recipe


def check_fused(recipe: Recipe, layer_plans: Mapping[str, LayerPlan]) -> None:
    """Raises ValueError where fused scales of `recipe` have no layers, or policy or mesh divide a
    group.

    Args:
        layer_plans: the plans of all layers, by name.
    """
    if not recipe.fused_scales:
        return
    if not any(layer_plan.layer.fused for layer_plan in layer_plans.values()):
        raise ValueError(
            f"recipe {recipe.name}: no part of the model says which layers share a scale: say "
            "it in "
            "fp4train_parameters of the modules that hold them (ParameterSpec.fused), or "
            "recipe.fused_scales=false"
        )
    for name, layer_plan in layer_plans.items():
        for other in (layer_plans[name] for name in layer_plan.fused if name in layer_plans):
            if other.fprop.operands.second != layer_plan.fprop.operands.second:
                if layer_plan.fprop.operands.second is None:
                    kept = layer_plan
                else:
                    kept = other
                raise ValueError(
                    f"recipe {recipe.name}: {name} and {other.layer.name} share one scale, "
                    "and fprop quantises their "
                    f"weights differently ({kept.layer.name}: {kept.fprop.why}): keep all or "
                    "none of "
                    f"{', '.join(layer_plan.fused)} in high precision, or take "
                    "recipe.fused_scales=false"
                )
