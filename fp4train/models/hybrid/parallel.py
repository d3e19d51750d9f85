"""How tensor parallelism cuts a hybrid.

| parameter | cut along |
|---|---|
| embed, head | the vocabulary |
| in_proj | heads and groups, in each of its segments z, x, B, C and dt (out features) |
| convolution | heads and groups, in each of its segments x, B and C (channels) |
| A_log, dt_bias, D, the gated norm | heads |
| out_proj | heads (in features) |
| wq, wk, wv; wo | heads (out features; in features) |
| up; down | the hidden width (out features; in features) |
| norms of blocks | not cut |

A rank has whole groups of the scan with their heads. So it normalises whole groups, and the scan
sends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4train.models.common.cut import TensorCut
from fp4train.models.common.scan import Mamba2

if TYPE_CHECKING:
    from fp4train.models.hybrid.model import HybridModel

_OUT = {"*": ("wq", "wk", "wv"), "-": ("up",), "M": ("in_proj",)}
_IN = {"*": ("wo",), "-": ("down",), "M": ("out_proj",)}
_ROWS = ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight")
_COUNTS = {
    "*": (("heads", "model.heads"), ("kv_heads", "model.kv_heads")),
    "M": (("groups", "model.scan.groups"), ("heads", "model.scan.heads")),
    "-": (),
}


def tensor_cut(model: HybridModel) -> TensorCut:
    """The cut of the blocks that `model` has, of the embedding and of the head."""
    blocks = [
        (f"blocks.{index}", model.shape.pattern[int(index)])
        for index, _ in model.blocks.named_children()
    ]
    segments: dict[str, tuple[int, ...]] = {}
    for path, kind in blocks:
        if kind == "M":
            mixer = model.get_submodule(f"{path}.mixer")
            assert isinstance(mixer, Mamba2)
            segments[f"{path}.mixer.in_proj"] = mixer.segments
            segments |= {
                f"{path}.mixer.conv1d.{name}": tuple(mixer.mixed_sizes)
                for name in ("weight", "bias")
            }
    return TensorCut(
        out=tuple(f"{path}.mixer.{name}" for path, kind in blocks for name in _OUT[kind]),
        in_=tuple(f"{path}.mixer.{name}" for path, kind in blocks for name in _IN[kind]),
        vocabulary=("embed", "head"),
        tokens=(*(f"{path}.norm" for path, _ in blocks), "norm"),
        rows=tuple(
            f"{path}.mixer.{name}" for path, kind in blocks if kind == "M" for name in _ROWS
        ),
        segments=segments,
        counts=tuple((f"{path}.mixer", *each) for path, kind in blocks for each in _COUNTS[kind]),
    )
