"""Linear layers that follow the autocast context, and model conversion."""

from fp4train.nn.call import GradientDtypes, LayerCall
from fp4train.nn.conversion import (
    Conversion,
    WeightGroup,
    weight_groups,
)
from fp4train.nn.convert import convert
from fp4train.nn.engine import Executor, LayerFunction
from fp4train.nn.experts import Experts
from fp4train.nn.gathered import Gathered
from fp4train.nn.held_amaxes import HeldAmax, HeldAmaxes
from fp4train.nn.layer_shard import Cut, LayerShard
from fp4train.nn.linear import Linear
from fp4train.nn.operands import TensorForms
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks
from fp4train.nn.scaling import DelayedScaling
from fp4train.nn.weight_form import WeightForm
from fp4train.nn.weights import PreparedWeights
