"""Makes tensor_cores.json: sums of Blackwell's tensor cores by Microsoft's MMA-Sim (arXiv
2511.10909, MIT licence).

    python tests/golden/tensor_cores.py MMA_SIM_CHECKOUT

Row i of the first operand times row i of the second, codes drawn at random: MXFP8 in blocks of 32,
and NVFP4 in blocks of 16, of which four are summed at once. The vectors were made with commit
c785138.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = 8
WIDTH = 256
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def codes_of(element: str, generator: torch.Generator) -> Tensor:
    """Finite codes, uint8 [ROWS, WIDTH], one per byte."""
    if element == "e2m1":
        return torch.randint(0, 16, (ROWS, WIDTH), generator=generator, dtype=torch.uint8)
    codes = torch.randint(0, 256, (ROWS, WIDTH), generator=generator, dtype=torch.uint8)
    values = codes.view(FLOAT8[element]).float()
    return torch.where(values.isfinite(), codes, torch.zeros_like(codes))


def mxfp8(arithmetic: Any, first: str, second: str, generator: torch.Generator) -> dict[str, Any]:
    """A case of MXFP8: codes, scales, and the bits of the sums."""
    a = codes_of(first, generator)
    b = codes_of(second, generator)
    shape = (ROWS, WIDTH // 32)
    scales = [torch.randint(120, 135, shape, generator=generator, dtype=torch.uint8) for _ in "ab"]
    sums = []
    for row in range(ROWS):
        total = torch.tensor(0.0)
        for block in range(WIDTH // 32):
            place = slice(32 * block, 32 * block + 32)
            factors = [scale[row, block].view(torch.float8_e8m0fnu).float() for scale in scales]
            x = a[row, place].view(FLOAT8[first])
            y = b[row, place].view(FLOAT8[second])
            total = arithmetic.nv_fused_dot_add(x, y, total, 25, "f32", *factors)
        sums.append(total)
    return case(first, second, a, b, scales, sums)


def nvfp4(arithmetic: Any, generator: torch.Generator) -> dict[str, Any]:
    """A case of NVFP4."""
    a = codes_of("e2m1", generator)
    b = codes_of("e2m1", generator)
    shape = (ROWS, WIDTH // 16)
    scales = [torch.randint(1, 127, shape, generator=generator, dtype=torch.uint8) for _ in "ab"]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = torch.cat([table, -table])
    sums = []
    for row in range(ROWS):
        total = torch.tensor(0.0)
        for block in range(WIDTH // 64):
            place = slice(64 * block, 64 * block + 64)
            blocks = slice(4 * block, 4 * block + 4)
            x = signed[a[row, place].long()]
            y = signed[b[row, place].long()]
            factors = [scale[row, blocks].view(torch.float8_e4m3fn) for scale in scales]
            total = arithmetic.nv_fused_dot_add_with_block_scale(x, y, total, *factors, 35)
        sums.append(total)
    return case("e2m1", "e2m1", a, b, scales, sums)


def case(
    first: str, second: str, a: Tensor, b: Tensor, scales: list[Tensor], sums: list[Tensor]
) -> dict[str, Any]:
    """What is kept of a case; codes and scales as hexadecimal digits."""
    tensors = {"a": a, "b": b, "a_scales": scales[0], "b_scales": scales[1]}
    texts = {name: bytes(tensor.flatten().tolist()).hex() for name, tensor in tensors.items()}
    bits = [int(total.view(torch.int32)) for total in sums]
    return {"elements": [first, second], "rows": ROWS, **texts, "sums": bits}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from mmasim.simulator import arithmetic

    generator = torch.Generator().manual_seed(0)
    cases = [
        mxfp8(arithmetic, "e4m3", "e4m3", generator),
        mxfp8(arithmetic, "e5m2", "e4m3", generator),
    ]
    cases.append(nvfp4(arithmetic, generator))
    Path(__file__).with_suffix(".json").write_text(json.dumps(cases, indent=1) + "\n")
