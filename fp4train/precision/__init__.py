"""Precision as an object: recipes, the layer policy, phases, the plan, and the autocast context."""

from fp4train.backends import GEMMS as GEMMS, Operands as Operands, Table as Table
from fp4train.precision.context import (
    Context as Context,
    activation_dtype as activation_dtype,
    autocast as autocast,
    backward_pass as backward_pass,
    current as current,
    use as use,
)
from fp4train.precision.gather import (
    WireForm as WireForm,
    gather_mode as gather_mode,
    wire_form as wire_form,
)
from fp4train.precision.layer_plan import (
    LayerPlan as LayerPlan,
    fused_note as fused_note,
    resolve as resolve,
)
from fp4train.precision.layers import (
    Layer as Layer,
    find_blocks as find_blocks,
    find_layers as find_layers,
)
from fp4train.precision.loss_scaling import LossScaling as LossScaling
from fp4train.precision.phases import Phase as Phase, Swap as Swap, Timeline as Timeline
from fp4train.precision.plan import (
    Plan as Plan,
    PlannedStretch as PlannedStretch,
    make_plan as make_plan,
)
from fp4train.precision.policy import (
    LayerPolicy as LayerPolicy,
    LayerRecipe as LayerRecipe,
    matches as matches,
)
from fp4train.precision.recipe import (
    OutlierChannels as OutlierChannels,
    Recipe as Recipe,
    by_tensor as by_tensor,
)
from fp4train.precision.recipes import (
    BF16 as BF16,
    FP16 as FP16,
    FP32 as FP32,
    MXFP4 as MXFP4,
    MXFP6 as MXFP6,
    MXFP8 as MXFP8,
    NVFP4 as NVFP4,
    Custom as Custom,
    FP8Block as FP8Block,
    FP8Current as FP8Current,
    FP8Delayed as FP8Delayed,
    FP8Row as FP8Row,
    Mixed as Mixed,
    QuartetII as QuartetII,
    TetraJetV2 as TetraJetV2,
)
from fp4train.precision.recipes.tetrajet import TetraJetV2Outliers as TetraJetV2Outliers
from fp4train.precision.recomputation import recompute_contexts as recompute_contexts
from fp4train.precision.recompute import recompute as recompute
from fp4train.precision.terms import Residual as Residual
