"""Few recipes that together have every part that a file of recipes/ has: tests of what all recipes
share, such as a model's layers, take them; tests/run/test_every_recipe.py ranks them all.
"""

from collections.abc import Hashable, Iterator
from dataclasses import fields

from fp4train.precision import Recipe

COVERING = (
    "alto_mxfp4_macro",
    "averis",
    "bf16_forward_nvfp4_backward",
    "chon",
    "flux_residual",
    "fp16",
    "fp32",
    "fp8_block",
    "fp8_delayed",
    "fp8_row",
    "hifloat4",
    "if4",
    "mfu_operands",
    "mxfp4_backward",
    "mxfp6",
    "nvfp4_dequantised",
    "nvfp4_per_token",
    "nvfp4_tiles",
    "nvfp4_ue5m3",
    "quartet_ii",
    "tetrajet_v2_outliers",
    "ue5m3_fp4",
    "w4a16_qat",
)


def parts(recipe: Recipe) -> Iterator[Hashable]:
    """The value of each field of its operands, whichever GEMM they are of; the GEMMs in high
    precision; and its fields that all recipes have.
    """
    for gemm, operands in recipe.table().items():
        for spec in operands.both:
            if spec is None:
                yield gemm, "high precision"
            else:
                yield from ((field.name, getattr(spec, field.name)) for field in fields(spec))
    yield from ((field.name, getattr(recipe, field.name)) for field in fields(Recipe))
