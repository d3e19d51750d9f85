"""How a Llama is cut over the ranks of a run.

Stages of a pipeline:

| module | stage |
|---|---|
| embed | the first |
| blocks | all, in equal parts |
| norm, head | the last |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4train.models.common.stages import StageCut

if TYPE_CHECKING:
    from fp4train.models.llama.model import LlamaModel


def stage_cut(model: LlamaModel) -> StageCut:
    """The modules of each stage. Stages send each other the residual stream."""
    return StageCut(blocks="blocks", first=("embed",), last=("norm", "head"), width=model.shape.width)
