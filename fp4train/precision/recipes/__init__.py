"""Published recipes, one family per file: dataclasses whose fields are the options of a paper or of
TE.

`print(NVFP4())` shows the table of six operands that a recipe defines.
"""

from fp4train.precision.recipes.fp8 import (
    FP8Block as FP8Block,
    FP8Current as FP8Current,
    FP8Delayed as FP8Delayed,
    FP8Row as FP8Row,
)
from fp4train.precision.recipes.high import BF16 as BF16, FP16 as FP16, FP32 as FP32
from fp4train.precision.recipes.mixed import Custom as Custom, Mixed as Mixed
from fp4train.precision.recipes.mx import MXFP4 as MXFP4, MXFP6 as MXFP6, MXFP8 as MXFP8
from fp4train.precision.recipes.nvfp4 import NVFP4 as NVFP4
from fp4train.precision.recipes.quartet import QuartetII as QuartetII
from fp4train.precision.recipes.tetrajet import TetraJetV2 as TetraJetV2
