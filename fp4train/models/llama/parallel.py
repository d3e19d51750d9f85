"""How a Llama is cut over the ranks of a run.

Tensor parallelism:

| parameter | cut along |
|---|---|
| embed, head | the vocabulary |
| wq, wk, wv | heads (out features) |
| wo | heads (in features) |
| gate, up | the hidden width (out features) |
| down | the hidden width (in features) |
| norms | not cut |

Stages of a pipeline:

| module | stage |
|---|---|
| embed | the first |
| blocks | all, in equal parts |
| norm, head | the last |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4train.models.common.cut import TensorCut
from fp4train.models.common.stages import StageCut

if TYPE_CHECKING:
    from fp4train.models.llama.model import LlamaModel


def tensor_cut(model: LlamaModel) -> TensorCut:
    """The cut of every block, of the embedding and of the head that this model holds."""
    blocks = [f"blocks.{index}" for index in range(len(model.blocks))]
    norms = [f"{block}.{name}" for block in blocks for name in ("attention_norm", "mlp_norm")]
    return TensorCut(
        out=tuple(
            f"{block}.{name}"
            for block in blocks
            for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up")
        ),
        in_=tuple(f"{block}.{name}" for block in blocks for name in ("attention.wo", "mlp.down")),
        vocabulary=("embed", "head"),
        tokens=(*norms, "norm"),
        counts=tuple(
            (f"{block}.attention", name, f"model.{name}") for block in blocks for name in ("heads", "kv_heads")
        ),
    )


def stage_cut(model: LlamaModel) -> StageCut:
    """The modules of each stage. Stages send each other the residual stream."""
    return StageCut(blocks="blocks", first=("embed",), last=("norm", "head"), width=model.shape.width)
