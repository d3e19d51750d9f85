"""Layers that read one x (queries, keys and values; gate and up) as one product per GEMM: where numbers allow it.

With w = [w₁; w₂; …] stacked along the out features N = ΣNᵢ and dy = [dy₁, dy₂, …] beside each other:

    fprop   y  [M, N] = q(x) · q(w)ᵀ        yᵢ are columns of y
    dgrad   dx [M, K] = q(dy) · q(wᵀ)ᵀ      one sum over all N, rounded once; apart, each dxᵢ and each sum is rounded
    wgrad   dw [N, K] = q(dyᵀ) · q(xᵀ)ᵀ     dwᵢ are rows of dw

Each layer's w and dy are quantised as the layer alone would do it, with its amaxes and random bits, and codes and
scales are then joined. That is one operand only where no scale spans several layers' features: blocks must end where a
layer ends, and a scale of the whole tensor must be one that the layers share (`recipe.fused_scales`). So each GEMM is
one product or a product per layer by itself. Of one product y and dw have the numbers of the layers apart, but for the
order of additions. (A bias of a layer in high precision has a gradient that is summed in float32, as that of others.)

A backend that runs the three GEMMs of a layer together (Transformer Engine) runs those of the group together, where
each of the three can be one product. It quantises w and dy of all layers as one, which gives the same codes where no
scale spans several layers. Its weight is one piece of memory, where those of the layers lie then
(`nn/executors/stacked.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fp4train.backends import GEMMS, LAYER_BACKENDS, OPERANDS
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import QuantSpec, amax_extent, has_tensor_amax, why_not_cut

_STACKED = {"fprop": {"w": False}, "dgrad": {"dy": True, "w": True}, "wgrad": {"dy": False}}
"""GEMM → operands that are joined, and whether along their columns; else along their rows."""


def joined(
    found: Mapping[str, LayerPlan], why_not: str | None = None, why_not_stacked: str | None = None
) -> dict[str, LayerPlan]:
    """The plans of all layers, where those of a group multiply together what they can; each GEMM's reason says it.

    Args:
        found: by name, in the model's order.
        why_not: why no layers of the run multiply together (`why_none`); None: some may.
        why_not_stacked: why the weights of the run cannot lie in one piece of memory; None: they can.
    """
    made = dict(found)
    for name, plan in found.items():
        readers = [found[each] for each in plan.readers if each in found]
        if len(readers) < 2:
            continue
        title = ", ".join(each.layer.name.rpartition(".")[2] for each in readers)
        gemms = {}
        for gemm in GEMMS:
            own = getattr(plan, gemm)
            reason = why_not or why_separate(readers, gemm, why_not_stacked)
            how = "one product" if reason is None else f"a product each, because {reason}"
            gemms[gemm] = replace(own, joint=reason is None, why=f"{own.why}; {title}: {how}")
        made[name] = replace(plan, **gemms)
    return made


def why_none(*, compiled: bool, tensor: int) -> str | None:
    """Why no layers of a run multiply together, whatever their numbers; None: they may.

    Args:
        compiled: whether torch.compile has the blocks.
        tensor: ranks that cut each layer.
    """
    if compiled:
        return "train.compile has an operator per layer"
    return "tensor parallelism cuts them" if tensor > 1 else None


def why_not_stacked(*, graph: bool | str, ranks: int) -> str | None:
    """Why the weights of a run cannot lie in one piece of memory; None: they can.

    Args:
        graph: `train.cuda_graph`.
        ranks: that share the weights, or have copies of them.
    """
    if graph == "block":
        return "graphs of blocks copy each weight to where they read it"
    return "FSDP gathers each weight into memory of its own" if ranks > 1 else None


def why_separate(readers: Sequence[LayerPlan], gemm: str, why_not_stacked: str | None = None) -> str | None:
    """Why layers that read one x, in one recipe, do not compute `gemm` as one product; None: they do.

    Args:
        why_not_stacked: see `joined`.
    """
    if (backend := readers[0].layer_backend) is None:
        return _why_separate(readers, gemm)
    if why_not_stacked is not None:
        return f"{LAYER_BACKENDS[backend].title} takes one weight, and {why_not_stacked}"
    return next((reason for each in GEMMS if (reason := _why_separate(readers, each)) is not None), None)


def _why_separate(readers: Sequence[LayerPlan], gemm: str) -> str | None:
    first = readers[0]
    if first.layer.unconverted is not None or first.layer.experts:
        return "they are not linear layers of fp4train"
    if first.why_no_codes is not None:
        return first.why_no_codes
    if any(spec.delayed is not None for spec in first.table.specs()):
        return "each layer has its own amax histories"
    if any(spec is not None and spec.random for spec in (first.fprop.operands.first, first.wgrad.operands.second)):
        return "each layer rounds x by random bits of its own"
    same = [getattr(each, gemm) for each in readers]
    if any((each.operands, each.backend) != (same[0].operands, same[0].backend) for each in same):
        return "they run on " + ", ".join(dict.fromkeys(each.backend for each in same))
    for operand, spec in zip(OPERANDS[gemm], same[0].operands.both, strict=True):
        columns = _STACKED[gemm].get(operand)
        if spec is None or columns is None:
            continue
        for each in readers:
            shared = operand == "w" and bool(each.fused)
            if (reason := why_not_joined(spec, each.layer.out_features, columns=columns, shared=shared)) is not None:
                return f"{reason} ({operand})"
    return None


def why_not_joined(spec: QuantSpec, extent: int, *, columns: bool, shared: bool) -> str | None:
    """Why matrices of so many rows or columns each are not one matrix quantised by `spec`; None: they are.

    Args:
        shared: whether they share a scale of the tensor where the spec has one.
    """
    amax = amax_extent(spec)
    if amax == "tensor" and not (shared and has_tensor_amax(spec)):
        return "each has a scale of its whole tensor"
    if amax == "row" and columns:
        return "each has scales of its whole rows"
    return why_not_cut(spec, extent, columns=columns)
