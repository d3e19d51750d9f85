"""How tensor parallelism cuts a mixture of experts.

| parameter | cut along |
|---|---|
| attention, norms, embed, head | as of a Llama (`models/llama/parallel.py`) |
| gate, up, down of dense blocks and of the shared expert | the hidden width |
| gate_up, down of routed experts | experts: a rank has whole ones |
| router | not cut: every rank routes all tokens |

A rank quantises whole weights and all rows of its experts, as one rank does, so no block is divided
however narrow an expert is. Only the sum over a token's experts has another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4train.models.common.cut import TensorCut
from fp4train.models.llama import parallel as llama

if TYPE_CHECKING:
    from fp4train.models.moe.model import MixtureOfExperts


def tensor_cut(shape: MixtureOfExperts) -> TensorCut:
    """The cut of all blocks, of the embedding and of the head."""
    dense, routed = (
        [f"blocks.{i}.mlp" for i in each]
        for each in (range(shape.dense), range(shape.dense, shape.layers))
    )
    if shape.experts.shared:
        shared = [f"{path}.shared" for path in routed]
    else:
        shared = []
    groups = tuple(f"{path}.{name}" for path in routed for name in ("gate_up", "down"))
    return llama.tensor_cut(
        shape.layers, qk_norm=shape.qk_norm, mlps=[*dense, *shared], experts=groups
    )
