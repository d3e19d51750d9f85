"""Weights that shards gather as codes, as TE's tensors.

TE's layer asks a quantiser for the codes of its weight, in forward, and where it runs under FSDP2
in backward again (module/linear.py: `quantize_weight`, and `weight_quantizer(saved_weight)` where
no workspace was saved). In a call whose weight is gathered as codes `GivenWeight` stands in the
place of that quantiser: it reads no values, and gives in each pass the one form that the pass
multiplies, as TE's own kind of tensor (tensor/storage):

    NVFP4            codes [N, K] or of wᵀ, two in a byte; scales in tiles, each row of a square block with its scale
    MXFP8            codes [N, K] in both forms; scales in tiles
    FP8 per tensor   codes [N, K], or those of wᵀ where the GPU multiplies x·wᵀ only; one float32 scale
    FP8 in blocks    codes [N, K] or of wᵀ; float32 scales, rows filled up to 4, those of 1×128 blocks transposed
    high precision   values, in passes of a recipe of single quantisers
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends.protocol import Prepared
from fp4train.backends.te.quantizers import element_dtype, family
from fp4train.quantize import Decoded, Quantized, tiled_scales


def in_tiles(form: Quantized, *, column: bool) -> dict[str, Any]:
    """One form of NVFP4 or MXFP8 by TE's names. Scales are uint8 [rows, blocks of a row], filled up
    to tiles, in whose order they lie; MXFP8's codes lie [N, K] in both forms, and its scales have
    the shape of that.
    """
    way = "columnwise" if column else "rowwise"
    spec = form.spec
    scales = tiled_scales(form).view(torch.uint8).view(-(-form.shape[0] // 128) * 128, -1)
    layouts: dict[str, Any] = {
        f"{way}_data": form.codes.view(torch.uint8).contiguous(),
        f"{way}_scale_inv": scales,
    }
    if spec.format.packed:
        assert form.amax is not None
        layouts |= {
            f"amax_{way}": form.amax.reshape(1),
            "nvfp4_use_4over6": spec.four_over_six is not None,
        }
        layouts |= {"nvfp4_e4m3_max": int(spec.global_bound)}
    elif column:
        layouts[f"{way}_scale_inv"] = scales.view(scales.shape[1], scales.shape[0])
    name = "fp4_dtype" if spec.format.packed else "fp8_dtype"
    return layouts | {name: element_dtype(spec), "with_gemm_swizzled_scales": True}


def weight_codes(form: Prepared, *, column: bool) -> Any:
    """One form of a weight as TE's products take it: of w [N, K], or of wᵀ [K, N] where
    `column`.
    """
    from transformer_engine.pytorch import tensor
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    if isinstance(form, Decoded):
        return tensor.IdentityTensorStorage(hp_data=form.values.T if column else form.values)
    # FP8 is not filled up to blocks
    kind = family(form.spec)
    codes = form.codes.view(torch.uint8)[:, : form.shape[1]]
    options: dict[str, Any] = {"fp8_dtype": element_dtype(form.spec), "quantizer": None}
    if kind == "fp8_current":
        if column and is_non_tn_fp8_gemm_supported():
            codes = codes.T
            column = False
        options |= {"data": None, "data_transpose" if column else "data": codes.contiguous()}
        return tensor.Float8TensorStorage(fp8_scale_inv=form.scales.reshape(1), **options)
    options |= dict.fromkeys(
        f"{way}_{part}" for way in ("rowwise", "columnwise") for part in ("data", "scale_inv")
    )
    if kind == "fp8_block":
        way = "columnwise" if column else "rowwise"
        square_blocks = form.spec.block[0] != 1
        scales = form.scales if square_blocks else form.scales.T
        options[f"{way}_data"] = codes.contiguous()
        options[f"{way}_scale_inv"] = F.pad(scales, (0, -scales.shape[1] % 4)).contiguous()
        return tensor.Float8BlockwiseQTensorStorage(is_2D_scaled=square_blocks, **options)
    if kind == "mxfp8":
        if column:
            form = form._replace(codes=form.codes.T)
        return tensor.MXFP8TensorStorage(**options | in_tiles(form, column=column))
    del options["fp8_dtype"]
    options |= {"amax_rowwise": None, "amax_columnwise": None} | in_tiles(form, column=column)
    return tensor.NVFP4TensorStorage(**options)


def given_weight(codes: Callable[[bool], Prepared], *, row_wise: bool = False) -> Any:
    """`GivenWeight` for one call, forward and backward; `row_wise`: backward, too, takes the codes
    of fprop, whose values it multiplies.
    """
    return _given_weight()(codes, row_wise)


@cache
def _given_weight() -> Any:
    from transformer_engine.pytorch.quantized_tensor import Quantizer

    class GivenWeight(Quantizer):  # type: ignore[misc]
        """A quantiser that gives the codes that `codes` does, for fprop; where TE asks for the
        column-wise form, which it does in backward only, those for dgrad. TE's own activation
        checkpoints ask in forward: they are not used.
        """

        def __init__(self, codes: Callable[[bool], Prepared], row_wise: bool) -> None:
            super().__init__(rowwise=True, columnwise=False)
            self.codes = codes
            self.row_wise = row_wise

        def quantize(self, tensor: Tensor, **_: Any) -> Any:
            column = self.columnwise_usage and not self.row_wise
            return weight_codes(self.codes(column), column=column)

    return GivenWeight
