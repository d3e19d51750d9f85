"""Linear layers that follow the autocast context, and model conversion."""

from fp4train.nn.call import GradientDtypes as GradientDtypes, LayerCall as LayerCall
from fp4train.nn.conversion import (
    Conversion as Conversion,
    WeightGroup as WeightGroup,
    weight_groups as weight_groups,
)
from fp4train.nn.convert import convert as convert
from fp4train.nn.engine import Executor as Executor, LayerFunction as LayerFunction
from fp4train.nn.experts import Experts as Experts
from fp4train.nn.gathered import Gathered as Gathered
from fp4train.nn.held_amaxes import HeldAmax as HeldAmax, HeldAmaxes as HeldAmaxes
from fp4train.nn.layer_shard import Cut as Cut, LayerShard as LayerShard
from fp4train.nn.linear import Linear as Linear
from fp4train.nn.operands import TensorForms as TensorForms
from fp4train.nn.planned import PlannedLayer as PlannedLayer
from fp4train.nn.ranks import Ranks as Ranks
from fp4train.nn.scaling import DelayedScaling as DelayedScaling
from fp4train.nn.weight_form import WeightForm as WeightForm
from fp4train.nn.weights import PreparedWeights as PreparedWeights
