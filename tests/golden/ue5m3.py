"""Make ue5m3.safetensors: `PYTHONPATH=ue5m3-fp4/src python tests/golden/ue5m3.py`, beside gfloat
0.5.2.

Codes of scales come from gfloat (Graphcore, MIT), quantised blocks from the package of the paper
(github.com/MrHuff/ue5m3-fp4, Apache-2.0, commit 59868e7).
"""

from pathlib import Path

import gfloat
import numpy as np
import torch
from safetensors.torch import save_file
from ue5m3_fp4.formats import UE5M3, quantize_dequantize_blocks_with_metadata

RESERVED = {"ue5m3": 1, "ue5m3_ieee": 8}
"""Codebook → its codes, from the largest down, that are NaN."""


def codebook(name: str) -> gfloat.FormatInfo:
    return gfloat.FormatInfo(
        name,
        8,
        4,
        bias=15,
        is_signed=False,
        domain=gfloat.Domain.Finite,
        has_nz=False,
        num_high_nans=RESERVED[name],
        has_subnormals=True,
        is_twos_complement=False,
    )


def scales() -> np.ndarray:
    """All values of the larger codebook, what lies halfway between two, its neighbours, and others
    of 50 binades.
    """
    fmt = codebook("ue5m3")
    values = np.array([gfloat.decode_float(fmt, code).fval for code in range(255)], np.float32)
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, np.float32(end)) for end in (0, np.inf)]
    drawn = np.exp2(np.random.default_rng(0).uniform(-30, 20, 500)).astype(np.float32)
    extremes = np.array([61441, 65535, 65536, 114689, 1e30, 1e-40], np.float32)
    return np.concatenate([values, middles, *near, drawn, extremes])


def blocks() -> torch.Tensor:
    """[24, 40], rows of many magnitudes, blocks of zeros, values 10⁻⁹ of the largest."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 40, generator=generator)
    x *= torch.logspace(-6, 3, 24)[torch.randperm(24, generator=generator), None]
    x[:16, 16:32] = 0
    x[10:20, 32:] *= 1e-9
    return x


def main() -> None:
    x = scales()
    tensors = {"scales.x": torch.from_numpy(x)}
    for name in RESERVED:
        fmt = codebook(name)
        rounded = [gfloat.round_float(fmt, float(value), sat=True) for value in x]
        codes = [gfloat.encode_float(fmt, value) for value in rounded]
        tensors[f"scales.{name}"] = torch.tensor(codes, dtype=torch.uint8)
    tensors["blocks.x"] = blocks()
    for two_dimensional in (False, True):
        for target, share in ((448, 1.0), (2048, 1.0), (448, 0.1)):
            values, _ = quantize_dequantize_blocks_with_metadata(
                tensors["blocks.x"],
                block_size=16,
                scale_format=UE5M3,
                scale_target=float(target),
                rounding="ties_to_even",
                tensor_reference=share * tensors["blocks.x"].abs().amax(),
                two_dimensional=two_dimensional,
            )
            form = "2d" if two_dimensional else "1d"
            tensors[f"blocks.{form}.{target}.{share:g}"] = values
    file = Path(__file__).with_suffix(".safetensors")
    save_file(tensors, file)
    file.chmod(0o644)


if __name__ == "__main__":
    main()
