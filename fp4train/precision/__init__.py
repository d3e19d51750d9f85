"""Precision as an object: recipes, the layer policy, phases, the plan, and the autocast context."""

from fp4train.backends import GEMMS, Operands, Table
from fp4train.precision.context import (
    Context,
    activation_dtype,
    autocast,
    backward_pass,
    current,
    use,
)
from fp4train.precision.gather import (
    WireForm,
    gather_mode,
    wire_form,
)
from fp4train.precision.layer_plan import (
    LayerPlan,
    fused_note,
    resolve,
)
from fp4train.precision.layers import (
    Layer,
    find_blocks,
    find_layers,
)
from fp4train.precision.loss_scaling import LossScaling
from fp4train.precision.phases import Phase, Swap, Timeline
from fp4train.precision.plan import (
    Plan,
    PlannedStretch,
    make_plan,
)
from fp4train.precision.policy import (
    LayerPolicy,
    LayerRecipe,
    matches,
)
from fp4train.precision.recipe import (
    OutlierChannels,
    Recipe,
    by_tensor,
)
from fp4train.precision.recipes import (
    BF16,
    FP16,
    FP32,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Custom,
    FP8Block,
    FP8Current,
    FP8Delayed,
    FP8Row,
    Mixed,
    QuartetII,
    TetraJetV2,
)
from fp4train.precision.recipes.tetrajet import TetraJetV2Outliers
from fp4train.precision.recomputation import recompute_contexts
from fp4train.precision.recompute import recompute
from fp4train.precision.terms import Residual
