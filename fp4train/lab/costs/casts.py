"""Bytes that a step moves between float32 weights, their gradients and the products, on one rank,
in passes of their own at the speed of a copy.

ROUNDED   a weight that no GEMM quantises, to the recipe's dtype: once per step; in each pass of
          compiled blocks, of a weight gathered in float32, and of the only microbatch; the head for
          the loss in every microbatch
WIDENED   dw of a product in the recipe's dtype, by autograd: in each microbatch where dw is no term
          of a sum, in compiled blocks, and where a backend writes no float32
ZEROS     Transformer Engine adds dw to them: once per step, in each microbatch where autograd adds
          the result; the embedding adds gradients of rows to them in each microbatch
ADDED     dw to the gradient: in each microbatch after the first, where its product does not add it;
          gradients of a weight that embedding and head share to each other, in each
SCALED    the gradient of the head, after the loss: in each microbatch

Products of operands in the recipe's dtype, emulated ones, and Transformer Engine's add dw in
float32 unless that is left to autograd (`Execution.fused`), and so do those between chunks of the
loss; these bytes overlap with arithmetic and are taken to be hidden.
"""

from typing import Final

import torch

from fp4train.backends import BACKENDS
from fp4train.lab.costs.weights import ModelWeight
from fp4train.lab.costs.workload import Execution, Workload
from fp4train.parallel.config import Mesh

ROUNDED: Final = 4 + 2
WIDENED: Final = 2 + 4
ZEROS: Final = 4
ADDED: Final = 4 + 4 + 4
SCALED: Final = 4 + 4
"""Bytes per weight of each pass."""

OPTIMIZER_BYTES: Final = {8: 36, 4: 24}
"""Bytes moved per parameter and step, by those of the moments: the norm reads the gradient, AdamW
reads weight, moments and gradient and writes weight and moments; torch's writes the clipped
gradient, too."""

CLIPPED: Final = 4
"""Bytes more where a pass before torch's AdamW clips."""

EMBEDDED: Final = 32
"""Bytes per element of the residual stream that the embedding moves: 8 to look up float32 rows and
6 to round them, backward 6 to make the gradient float32 and 12 to add it to rows."""

LAST_NORM: Final = 10
"""Bytes per element of the residual stream of the norm before the head, both ways."""

LOSS_OF_HIDDEN: Final = 8
"""Bytes per element of the residual stream that the loss moves: 4 to put a chunk's gradient in its
place, 4 to scale it."""


def of_block(weight: ModelWeight, execution: Execution, mesh: Mesh) -> float:
    """Bytes per step of a weight of a block; norms and biases count for nothing."""
    plan = weight.multiplied_by
    if plan is None or plan.table.torch_dtype == torch.float32:
        return 0.0
    per_element = _of_quantised if plan.quantised else _of_plain
    return per_element(weight, execution, mesh) * weight.of_rank(mesh)


def _of_quantised(weight: ModelWeight, execution: Execution, mesh: Mesh) -> float:
    """Bytes per element of a weight that some GEMM quantises."""
    assert weight.plan is not None
    wgrad = weight.plan.wgrad
    microbatches = mesh.microbatches
    whole_layer = weight.plan.layer_backend is not None
    if whole_layer:
        product_adds = execution.fused
        writes_float32 = True
    else:
        backend = BACKENDS[wgrad.backend]
        by_autograd = execution.compiled and wgrad.operands.quantised
        product_adds = execution.fused and backend.adds and not by_autograd
        writes_float32 = backend.writes_float32(wgrad.operands.first)
    if product_adds:
        moved = 0.0
    else:
        moved = ADDED * (microbatches - 1.0)
    if _alone(mesh) or not writes_float32:
        return moved + WIDENED * microbatches
    if whole_layer:
        zeroed = 1 if product_adds else microbatches
        return moved + ZEROS * zeroed
    return moved


def _of_plain(weight: ModelWeight, execution: Execution, mesh: Mesh) -> float:
    """Bytes per element of a weight that no GEMM quantises."""
    microbatches = mesh.microbatches
    each_pass = _alone(mesh) or execution.compiled
    product_adds = execution.fused and not execution.compiled
    if product_adds:
        moved = 0.0
    else:
        moved = ADDED * (microbatches - 1.0)
    if mesh.shard == 1:
        rounded = 1.0
        if each_pass:
            rounded = microbatches * (1 + execution.recomputed)
        moved += ROUNDED * rounded
    elif weight.wire(mesh).dtype == torch.float32:
        moved += ROUNDED * microbatches * (2 + execution.recomputed)
    if each_pass:
        moved += WIDENED * microbatches
    return moved


def _alone(mesh: Mesh) -> bool:
    """Whether dw is no term of a sum: there is one microbatch of one rank."""
    return mesh.microbatches == 1 and mesh.data == 1


def of_ends(load: Workload, mesh: Mesh, *, first: bool, last: bool) -> float:
    """Bytes per step of the weights of embedding and head on the first and the last stage."""
    microbatches = mesh.microbatches
    moved = 0.0
    if first:
        embedded = sum(
            weight.of_rank(mesh) for weight in load.before_blocks if len(weight.shape) > 1
        )
        moved += embedded * (ZEROS * microbatches + ADDED * (microbatches - 1))
    if last:
        head = load.vocabulary * load.width / mesh.tensor
        if load.tied and first:
            sums = microbatches
        else:
            sums = microbatches - 1
        moved += head * ((ROUNDED + SCALED) * microbatches + ADDED * sums)
    return moved


def of_optimizer(execution: Execution) -> int:
    """Bytes per parameter and step of the norm, clipping and AdamW."""
    moved = OPTIMIZER_BYTES[execution.moment_bytes]
    if execution.moment_bytes == 8 and not execution.fused:  # a pass before AdamW clips
        moved += CLIPPED
    return moved
