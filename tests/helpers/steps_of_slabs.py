"""One step of `optim.rounded` on boxes of a tensor. As a program: the Triton kernel against the
reference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4train.optim.rounded import (
    Decays,
    Kernel,
    Keys,
    SlabTensors,
    as_matrix,
    by_c,
    by_triton,
    numbers_of,
    slabs,
    update,
)
from fp4train.quantize import INITIAL, LANES, RandomKey
from fp4train.shards import TensorShard

__all__ = ["BOXES", "by_c", "stepped"]

BOXES = [
    ((7, 19), (0, 0), (7, 19)),
    ((1030,), (13,), (600,)),
    ((5, 6, 40), (1, 2, 3), (3, 3, 21)),
    ((3, 1100), (1, 5), (2, 1090)),
]
"""(shape, offsets, sizes) of boxes: whole, of a vector, of three dimensions, wider than what a
kernel takes at once.
"""


def stepped(
    kernel: Kernel, shape: Sequence[int], offsets: Sequence[int], held: Sequence[int]
) -> list[Tensor]:
    """Weights, gradients and moments of the box after one step of values that depend on the whole
    alone.
    """
    generator = torch.Generator().manual_seed(0)
    normal = [torch.randn(*shape, generator=generator) for _ in range(4)]
    whole = (
        normal[0],
        normal[1] * 1e-2,
        normal[2].bfloat16() * 0.01,
        (normal[3].square() * 1e-4).bfloat16(),
    )
    place = tuple(slice(o, o + h) for o, h in zip(offsets, held, strict=True))
    box = [each[place].contiguous() for each in whole]
    group = {"betas": (0.9, 0.95), "lr": 3e-3, "weight_decay": 0.1}
    numbers = numbers_of(torch.full((2,), 5.0), group, torch.tensor(1.7), torch.zeros(()))
    decays = Decays(beta1=0.9, rest1=1 - 0.9, beta2=0.95, rest2=1 - 0.95, eps=1e-8)
    for slab in slabs(TensorShard(shape=tuple(shape), offsets=tuple(offsets), tensor=box[0])):
        first, second = (
            RandomKey(
                seed=0,
                step=0,
                layer=layer,
                operand=INITIAL,
                row_offset=slab.row,
                col_offset=slab.column // LANES * LANES,
                counters=numbers.counters[1],
            )
            for layer in (1234567, 0xFFFFFFF0)
        )
        parts = SlabTensors(*(as_matrix(each)[slab.rows] for each in box))
        kernel(parts, Keys(first, second, slab.column % LANES), numbers, 1, decays)
    return box


if __name__ == "__main__":
    for box in BOXES:
        print(all(map(torch.equal, stepped(by_triton, *box), stepped(update, *box))))
