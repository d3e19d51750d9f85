"""How tensor parallelism cuts a Llama.

| parameter | cut along |
|---|---|
| embed, head | the vocabulary |
| wq, wk, wv | heads (out features) |
| wo | heads (in features) |
| gate, up | the hidden width (out features) |
| down | the hidden width (in features) |
| norms | not cut |
"""

from __future__ import annotations

from fp4train.models.common.cut import TensorCut


def tensor_cut(layers: int) -> TensorCut:
    """The cut of `layers` blocks, of the embedding and of the head."""
    blocks = [f"blocks.{index}" for index in range(layers)]

    def each(*names: str) -> tuple[str, ...]:
        return tuple(f"{block}.{name}" for block in blocks for name in names)

    return TensorCut(
        out=each("attention.wq", "attention.wk", "attention.wv", "mlp.gate", "mlp.up"),
        in_=each("attention.wo", "mlp.down"),
        vocabulary=("embed", "head"),
        tokens=(*each("attention_norm", "mlp_norm"), "norm"),
        counts=tuple((name, count, f"model.{count}") for name in each("attention") for count in ("heads", "kv_heads")),
    )
