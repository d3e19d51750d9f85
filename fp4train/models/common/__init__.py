"""Parts that model families share: attention, rotary positions, norm, loss, and how a model is cut.

Parts of some families alone, which others need not load, are in files of their own: `scan`,
`convolution`, `experts`; so are operators of a CPU (`on_cpu`) and what families say of the folders
of other software (`hf`).
"""

from fp4train.models.common.cache import (
    Cached,
    DecodeCache,
    KeyValues,
    seen_mask,
)
from fp4train.models.common.cut import (
    HoldsParts,
    Pipelined,
    Stage,
    StageCut,
    TensorCut,
    TensorParallel,
    TokenRanks,
    multiplications,
    multiplied,
    share_blocks,
    stage_cut,
    tensor_cut,
)
from fp4train.models.common.decoder import (
    Decoder,
    FamilyDecoder,
    document_mask,
)
from fp4train.models.common.distillation import (
    TeacherStates,
    chunked_distillation,
)
from fp4train.models.common.initialise import (
    fill_normal,
    materialise,
    why_not_deferred,
)
from fp4train.models.common.layers import (
    Attention,
    FeaturesNorm,
    RMSNorm,
    RopeScaling,
    SharedNorm,
    attention_parameters,
    rope_angles,
)
from fp4train.models.common.liger import Liger, use_liger
from fp4train.models.common.loss import (
    chunked_cross_entropy,
)
from fp4train.models.common.operators import (
    OF_TORCH,
    Fusible,
    Operation,
    rotate,
)
from fp4train.models.common.rotary import (
    AttentionDecoder,
    PreNormBlock,
    PreNormShape,
    RotaryBlock,
    RotaryDecoder,
    RotaryShape,
    SwiGLU,
    gated_mlp_parameters,
    pre_norm_parameters,
    rotary_ends,
)
from fp4train.models.common.router import (
    DROPPED,
    Balance,
    ExpertShape,
    Routers,
)
from fp4train.models.common.shape import (
    DecoderShape,
    check_pattern,
)
