"""How tensor parallelism cuts a StripedHyena 2.

| parameter | cut along |
|---|---|
| embed, head | the vocabulary |
| in_proj, the filters that make q, k and v | channels, three rows each (out features) |
| filters of `S` and `D` | groups of channels |
| poles and residues of `H`, what multiplies the token itself | channels |
| qkv | heads, with the three parts of each (out features) |
| out_proj | channels or heads (in features); its bias is whole |
| gate, up; down | the hidden width (out features; in features) |
| norms | not cut |

A channel is convolved by itself, so a rank has whole channels with their filters, and nothing is
sent between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4train.models.common.cut import TensorCut

if TYPE_CHECKING:
    from fp4train.models.hyena.model import HyenaModel

_ROWS = {
    "S": ("featuriser", "taps"),
    "D": ("featuriser", "taps", "direct"),
    "H": ("featuriser", "log_poles", "residues", "direct"),
    "*": (),
}


def tensor_cut(model: HyenaModel) -> TensorCut:
    """The cut of the blocks that `model` has, of the embedding and of the head."""
    blocks = [
        (f"blocks.{index}", model.shape.pattern[int(index)])
        for index, _ in model.blocks.named_children()
    ]
    makes = {kind: "mixer.qkv" if kind == "*" else "mixer.in_proj" for kind in _ROWS}
    return TensorCut(
        out=tuple(
            f"{path}.{name}"
            for path, kind in blocks
            for name in (makes[kind], "mlp.gate", "mlp.up")
        ),
        in_=tuple(
            f"{path}.{name}" for path, _ in blocks for name in ("mixer.out_proj", "mlp.down")
        ),
        vocabulary=("embed", "head"),
        tokens=(*(f"{path}.{name}" for path, _ in blocks for name in ("norm", "mlp_norm")), "norm"),
        rows=tuple(f"{path}.mixer.{name}" for path, kind in blocks for name in _ROWS[kind]),
        counts=tuple(
            (f"{path}.mixer", "heads", "model.heads") for path, kind in blocks if kind == "*"
        ),
    )
