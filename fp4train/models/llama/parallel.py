"""How tensor parallelism cuts a Llama.

| parameter | cut along |
|---|---|
| embed, head | the vocabulary |
| wq, wk, wv and their biases | heads (out features) |
| wo | heads (in features) |
| gate, up | the hidden width (out features) |
| down | the hidden width (in features) |
| norms | not cut; those of queries and keys normalise this rank's heads |
"""

from collections.abc import Sequence

from fp4train.models.common.cut import TensorCut


def tensor_cut(
    layers: int, *, qk_norm: bool, mlps: Sequence[str] | None = None, experts: tuple[str, ...] = ()
) -> TensorCut:
    """The cut of `layers` blocks, of the embedding and of the head.

    Args:
        qk_norm: whether the blocks normalise queries and keys.
        mlps: names of the MLPs; None: each block has one.
        experts: names of the groups of experts.
    """
    blocks = [f"blocks.{index}" for index in range(layers)]

    def each(*names: str) -> tuple[str, ...]:
        return tuple(f"{block}.{name}" for block in blocks for name in names)

    mlps = each("mlp") if mlps is None else mlps
    return TensorCut(
        out=(
            *each("attention.wq", "attention.wk", "attention.wv"),
            *(f"{m}.{n}" for m in mlps for n in ("gate", "up")),
        ),
        in_=(*each("attention.wo"), *(f"{mlp}.down" for mlp in mlps)),
        experts=experts,
        vocabulary=("embed", "head"),
        tokens=(*each("attention_norm", "mlp_norm"), "norm"),
        heads=each("attention.q_norm", "attention.k_norm") if qk_norm else (),
        counts=tuple(
            (name, count, f"model.{count}")
            for name in each("attention")
            for count in ("heads", "kv_heads")
        ),
    )
