"""Makes if4.safetensors: IF4 by its authors' reference (github.com/mit-han-lab/fouroversix, MIT), with
the mean squared error, to nearest, in blocks of 16 and of 16x16.

    python tests/golden/if4.py CHECKOUT

Their codes of integers are two's complement. The vectors were made with commit dadfad6.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def inputs() -> dict[str, torch.Tensor]:
    """Float32 and BF16 tensors: normal, uniform, heavy tails."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(16, 48, generator=generator)
    uniform = torch.rand(16, 48, generator=generator) - 0.5
    return {
        "normal": normal,
        "uniform": uniform,
        "cubes": normal**3,
        "normal_bf16": normal.bfloat16().float(),
    }


def main(checkout: str) -> None:
    sys.path.insert(0, str(Path(checkout) / "src"))
    version = importlib.metadata.version
    # the checkout is not installed
    importlib.metadata.version = lambda name: "0" if name == "fouroversix" else version(name)
    from fouroversix.quantize.pytorch.reference import quantize
    from fouroversix.utils import DataType, ScaleRule

    tensors = {}
    for name, x in inputs().items():
        tensors[f"{name}.x"] = x
        for variant, square in (("rows", False), ("squares", True)):
            codes, scales, amax = quantize(
                x,
                fp4_format=DataType.if4,
                scale_rule=ScaleRule.mse,
                block_scale_2d=square,
                use_blackwell_scale_layout=False,
            )
            key = f"{name}.{variant}"
            tensors[f"{key}.codes"] = codes.contiguous()
            tensors[f"{key}.scales"] = scales.view(torch.uint8).reshape(16, 3).contiguous()
            tensors[f"{key}.amax"] = amax
    save_file(tensors, Path(__file__).with_suffix(".safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
