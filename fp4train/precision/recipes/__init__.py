"""Published recipes, one family per file: dataclasses whose fields are the options of a paper or of
TE.

`print(NVFP4())` shows the table of six operands that a recipe defines.
"""

from fp4train.precision.recipes.fp8 import (
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
)
from fp4train.precision.recipes.high import BF16, FP16, FP32
from fp4train.precision.recipes.mixed import Custom, Mixed
from fp4train.precision.recipes.mx import MXFP4, MXFP6, MXFP8
from fp4train.precision.recipes.nvfp4 import NVFP4
from fp4train.precision.recipes.quartet import QuartetII
from fp4train.precision.recipes.tetrajet import TetraJetV2
