"""Bytes that a step moves between float32 weights, their gradients and the products, on one rank, in passes of their
own at the speed of a copy.

ROUNDED   a weight that no GEMM quantises, to the recipe's dtype: once per step; in each pass of compiled blocks, of a
          weight gathered in float32, and of the only microbatch; the head for the loss in every microbatch
WIDENED   dw of a product in the recipe's dtype, by autograd: in each microbatch where dw is no term of a sum, in
          compiled blocks, and where a backend writes no float32
ZEROS     Transformer Engine adds dw to them: once per step, in each microbatch where autograd adds the result; the
          embedding adds gradients of rows to them in each microbatch
ADDED     dw to the gradient: in each microbatch after the first, where its product does not add it; gradients of a
          weight that embedding and head share to each other, in each
SCALED    the gradient of the head, after the loss: in each microbatch

Products of operands in the recipe's dtype, emulated ones, and Transformer Engine's add dw in float32 unless that is
left to autograd (`Workload.fused`), and so do those between chunks of the loss; these bytes overlap with arithmetic and
are taken to be hidden.

Software that gathers embedding and head as units of their own (`Mesh.own_units`) has weights and gradients in BF16,
which FSDP makes float32 where it copies them, or adds dw within the GEMM (Megatron-LM): of it only sums of gathered
gradients count.
"""

from typing import Final

import torch

from fp4train.backends import BACKENDS
from fp4train.lab.costs.workload import ModelWeight, Workload
from fp4train.parallel.config import Mesh

ROUNDED, WIDENED, ZEROS, ADDED, SCALED = 4 + 2, 2 + 4, 4, 4 + 4 + 4, 4 + 4
"""Bytes per weight of each pass."""

OPTIMIZER_BYTES: Final = {8: 36, 4: 24}
"""Bytes moved per parameter and step, by those of the moments: the norm reads the gradient, AdamW reads weight, moments
and gradient and writes weight and moments; torch's writes the clipped gradient, too."""

CLIPPED: Final = 4
"""Bytes more where a pass before torch's AdamW clips."""

EMBEDDED: Final = 32
"""Bytes per element of the residual stream that the embedding moves: 8 to look up float32 rows and 6 to round them,
backward 6 to make the gradient float32 and 12 to add it to rows."""
LAST_NORM: Final = 10
"""Bytes per element of the residual stream of the norm before the head, both ways."""
LOSS_OF_HIDDEN: Final = 8
"""Bytes per element of the residual stream that the loss moves: 4 to put a chunk's gradient in its place, 4 to scale
it."""


def of_block(weight: ModelWeight, load: Workload, mesh: Mesh) -> float:
    """Bytes per step of a weight of a block; norms and biases count for nothing."""
    plan, m, gathered = weight.plan, mesh.microbatches, mesh.shard > 1
    if plan is None or not weight.is_multiplied or plan.table.torch_dtype == torch.float32:
        return 0.0
    plain, kernels = not plan.quantised, plan.layer_backend is not None
    compiled = plain and load.compiled
    alone = m == 1 and mesh.data == 1
    wgrad = plan.wgrad
    in_operator = load.compiled and wgrad.operands.quantised  # whose dw autograd adds
    adds = kernels or (BACKENDS[wgrad.backend].adds and not in_operator)
    by_product = load.fused and not compiled and adds
    by_product = by_product and not (gathered and mesh.own_units)
    moved = 0.0 if by_product else float(ADDED * (m - 1))
    if mesh.own_units:
        return moved * weight.of_rank(mesh)
    if plain and not gathered:
        moved += ROUNDED * (m * (1 + load.recomputed) if alone or compiled else 1)
    elif plain and weight.wire(mesh).dtype == torch.float32:
        moved += ROUNDED * m * (2 + load.recomputed)
    if alone or compiled or not (plain or kernels or BACKENDS[wgrad.backend].writes_float32(wgrad.operands.first)):
        moved += WIDENED * m
    elif kernels:
        moved += ZEROS * (1 if by_product else m)
    return moved * weight.of_rank(mesh)


def of_ends(load: Workload, mesh: Mesh, *, first: bool, last: bool) -> float:
    """Bytes per step of the weights of embedding and head on the first and the last stage."""
    if mesh.own_units:
        return 0.0
    m, found = mesh.microbatches, 0.0
    if first:
        embedded = sum(weight.of_rank(mesh) for weight in load.before if len(weight.shape) > 1)
        found += embedded * (ZEROS * m + ADDED * (m - 1))
    if last:
        head = load.vocabulary * load.width / mesh.tensor
        summed = m if load.tied and first else m - 1
        found += head * ((ROUNDED + SCALED) * m + ADDED * summed)
    return found


def of_optimizer(load: Workload) -> int:
    """Bytes per parameter and step of the norm, clipping and AdamW."""
    clipped = CLIPPED if load.moment_bytes == 8 and not load.fused else 0
    return OPTIMIZER_BYTES[load.moment_bytes] + clipped
