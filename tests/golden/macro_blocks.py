"""Make macro_blocks.safetensors: `python tests/golden/macro_blocks.py ALTO`, a checkout of
github.com/AMD-AGI/ALTO (MIT), commit 74e251d.

Its PyTorch implementation of macro-block scaling, and that of MXFP4 of its tests, on float32; the latter also with
elements times 3/4 before they are rounded ("static" clipping).
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

NEEDED = {
    "alto.kernels.fp4.mxfp4.mxfp_quantization": {"BLOCK_SIZE_DEFAULT": 32},
    "alto.kernels.fp4.testing_utils": {"calc_snr": None, "calc_cossim": None},
}
"""What the tests' file imports of modules that need a GPU."""


def module(path: Path) -> ModuleType:
    for name, attributes in NEEDED.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def sample() -> torch.Tensor:
    """[64, 160] BF16: an incomplete macro-block; rows of many magnitudes, outliers, zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 160, generator=generator)
    x *= torch.logspace(-8, 4, 64)[torch.randperm(64, generator=generator), None]
    x[torch.rand(64, 160, generator=generator) < 0.02] *= 100
    x[5] = 0
    x[6, 32:64] = 0
    return x.bfloat16()


def main(alto: Path) -> None:
    macro = module(alto / "alto/kernels/fp4/mxfp4/macro_block_scaling.py")
    mxfp4 = module(alto / "tests/unittest/mxfp4/utils.py")
    tensors = {"x": sample()}
    for square in (False, True):
        form = "2d" if square else "1d"
        y, mantissas = macro._macro_block_scaling_torch_impl(
            tensors["x"].float(), use_2d_block=square
        )
        codes, scales = mxfp4.convert_to_mxfp4_pytorch(y, is_2d_block=square)
        parts = {"mantissas": mantissas, "codes": codes, "scales": scales}
        guarded = mxfp4.convert_to_mxfp4_pytorch(
            tensors["x"].float(), is_2d_block=square, clip_mode="static"
        )
        parts |= {"guarded_codes": guarded[0], "guarded_scales": guarded[1]}
        tensors |= {f"{form}.{name}": part.contiguous() for name, part in parts.items()}
    file = Path(__file__).with_suffix(".safetensors")
    save_file(tensors, file)
    file.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
