"""Makes hif4.safetensors: HiF4 by its authors' code (github.com/global-computing-consortium/HiFloat4,
Apache-2.0), `quant_hifx` in float32, on BF16 and float32 tensors.

    python tests/golden/hif4.py CHECKOUT

The vectors were made with commit 6d937b6.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def inputs() -> dict[str, torch.Tensor]:
    """Tensors of 64 or 128 columns: usual values, outliers, many magnitudes, zeros, the ends."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(6, 128, generator=generator)
    outliers = normal * torch.where(torch.rand(6, 128, generator=generator) < 0.03, 60.0, 1.0)
    wide = normal * 2.0 ** torch.randint(-30, 14, (6, 1), generator=generator)
    halves = torch.randint(-28, 29, (6, 128), generator=generator) / 8.0
    zeros = normal * (torch.rand(6, 1, generator=generator) < 0.5)
    tensors = {
        "normal": normal,
        "outliers": outliers,
        "wide": wide,
        "halves": halves,
        "zeros": zeros,
    }
    rounded = {f"{name}_bf16": x.bfloat16().float() for name, x in tensors.items()}
    return {**rounded, "normal_f32": normal, "outliers_f32": outliers}


def main(checkout: str) -> None:
    sys.path.insert(0, str(Path(checkout) / "hif4_gpu"))
    from quant_cy.base.QFuncs.hifx import quant_hifx
    from quant_cy.base.QType import QType

    tensors = {}
    for name, x in inputs().items():
        tensors[f"{name}.x"] = x if name.endswith("f32") else x.bfloat16()
        # exact in BF16
        tensors[f"{name}.y"] = quant_hifx(x.clone(), QType("hifx4"), -1).bfloat16().contiguous()
    save_file(tensors, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
