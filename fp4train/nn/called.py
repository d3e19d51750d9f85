"""A guard for the first step of a loop: each layer that the plan quantises must be called in it.

A plan says what a layer's own product runs in. Some models multiply a layer's weight in other code:
a fused kernel that takes `out_proj.weight` (Mamba), a router, a head that is used by its weight.
That product runs in high precision, whatever the plan says. Its mark is a weight that has a
gradient while its layer was not called.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from fp4train.errors import UserError
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.plan import Plan
from fp4train.text import first_few

_log = logging.getLogger(__name__)

_NAMED = 6
"""Most layers that a message names."""


def check_called(
    plan: Plan,
    layers: Iterable[PlannedLayer],
    called: Collection[str],
    trained: Callable[[PlannedLayer], bool],
    *,
    elsewhere: str = "",
) -> None:
    """Look at a model after the backward passes of its first step. Layers that were neither called
    nor trained are logged as one warning: experts that got no token, layers that are skipped,
    frozen ones that other code multiplies.

    Args:
        plan: the run's plan; a layer is planned if a GEMM of it is quantised in any stretch.
        layers: the converted layers of the model, or of this rank's part of it.
        called: names of the layers that were called.
        trained: whether the weight of a layer has a gradient.
        elsewhere: another cause that the loop knows, for the message.

    Raises:
        UserError: a planned layer was not called, and its weight has a gradient.
    """
    layers = list(layers)
    quantised = {
        name: layer_plan.recipe.name
        for stretch in reversed(plan.stretches)
        for name, layer_plan in stretch.layers.items()
        if layer_plan.quantised
    }
    multiplied = {layer.weight for layer in layers if layer.layer.name in called}
    missed = [
        layer
        for layer in layers
        if layer.layer.name in quantised and layer.layer.name not in called
    ]
    # another layer that was called shares it
    missed = [layer for layer in missed if layer.weight not in multiplied]
    if bypassed := [layer.layer.name for layer in missed if trained(layer)]:
        kept = ",".join(dict.fromkeys(map(_suffix, bypassed)))
        raise UserError(
            f"{first_few(bypassed, _NAMED)}: planned in {quantised[bypassed[0]]} and not "
            "called in the first step, but "
            "the weight has a gradient. Other code multiplies it in high precision (a fused "
            "kernel, a router)"
            f"{elsewhere}. Call the layer instead, or plan it in high precision: "
            f"policy.keep=[{kept}]"
        )
    if missed:
        _log.warning(
            "planned and neither called nor trained in the first step: %s. Experts without a "
            "token and skipped layers "
            "are harmless; a frozen weight that other code multiplies runs in high precision",
            first_few([layer.layer.name for layer in missed], _NAMED),
        )


def _suffix(name: str) -> str:
    """The part of a layer's name behind the number of its block, which a policy matches in every
    block.
    """
    parts = name.split(".")
    last = max((at for at, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :]) or name
