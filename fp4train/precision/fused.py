"""Weights that share one global scale, so that what serving software fuses needs no other codes than training had.

Serving software multiplies queries, keys and values by one weight, gate and up by another, and takes ONE global scale
for each. Weights that were quantised with scales of their own must be quantised again for it: with the largest amax of
the group 3 % of NVFP4's codes change. Under `recipe.fused_scales` training quantises them so from the start:

    amax = max over the group of max |w|        S_enc = 448·6 / amax for each of its weights

A model says which layers form a group (`fp4train_fused`); the policy must keep all of a group or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp4train.backends import LAYER_BACKENDS
from fp4train.hardware import Device
from fp4train.precision.layers import FUSED_BY, Layer
from fp4train.precision.recipe import Recipe
from fp4train.quantize import QuantSpec, has_tensor_amax

if TYPE_CHECKING:
    from fp4train.precision.plan import LayerPlan


def shares_scale(layer: Layer, recipe: Recipe) -> bool:
    """Whether `recipe` takes the scale of this layer's weight from a group of weights."""
    return bool(recipe.fused_scales and layer.fused)


def fused_note(layer: Layer, recipe: Recipe, gemm: str) -> str:
    """Note on a GEMM whose weight has the scale of its group, behind its reason in a plan; "": it has not."""
    w = None if gemm == "wgrad" else recipe.table()[gemm].second
    if not shares_scale(layer, recipe) or w is None or not has_tensor_amax(w):
        return ""
    return f"; {', '.join(name.rpartition('.')[2] for name in layer.fused)} share a scale"


def input_note(readers: Sequence[str], recipe: Recipe, gemm: str, backend: str, device: Device) -> str:
    """Note on a GEMM whose x a backend quantises once for all layers that read it, behind its reason in a plan; "": it
    does not, or no other layer reads x. (Backends of single GEMMs share every x whose bits do not depend on the layer.)
    """
    whole = LAYER_BACKENDS.get(backend)
    if whole is None or gemm == "dgrad" or len(readers) < 2 or not whole.shares_input(recipe.table(), device):
        return ""
    return f"; {', '.join(name.rpartition('.')[2] for name in readers)} share one quantised x"


def shared_spec(plan: LayerPlan) -> QuantSpec | None:
    """The first spec of the layer's weight whose global scale the group shares: what fprop multiplies, or what dgrad
    does or rounds before; None: none is shared."""
    specs = (plan.fprop.operands.second, plan.dgrad.operands.second) if plan.fused else ()
    found = (spec.requantises or spec for spec in specs if spec is not None)
    return next((spec for spec in found if has_tensor_amax(spec)), None)


def check_fused(recipe: Recipe, found: Mapping[str, LayerPlan]) -> None:
    """Raises ValueError where fused scales of `recipe` have no layers, or policy or mesh divide a group.

    Args:
        found: the plans of all layers, by name.
    """
    if not recipe.fused_scales:
        return
    if not any(each.layer.fused for each in found.values()):
        raise ValueError(
            f"recipe {recipe.name}: no part of the model says which layers share a scale: set {FUSED_BY} of the "
            "modules that hold them, or recipe.fused_scales=false"
        )
    for name, each in found.items():
        for other in (found[name] for name in each.fused if name in found):
            if other.fprop.operands.second != each.fprop.operands.second:
                kept = each if each.fprop.operands.second is None else other
                raise ValueError(
                    f"recipe {recipe.name}: {name} and {other.layer.name} share one scale, and fprop quantises their "
                    f"weights differently ({kept.layer.name}: {kept.fprop.why}): keep all or none of "
                    f"{', '.join(each.fused)} in high precision, or take recipe.fused_scales=false"
                )
