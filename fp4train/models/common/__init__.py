"""Parts that model families share: attention, rotary positions, norm, loss, and how a model is cut.

Parts of some families alone, which others need not load, are in files of their own: `scan`,
`convolution`, `experts`; so are operators of a CPU (`on_cpu`) and what families say of the folders
of other software (`hf`).
"""

from fp4train.models.common.cache import (
    Cached as Cached,
    DecodeCache as DecodeCache,
    KeyValues as KeyValues,
    seen_mask as seen_mask,
)
from fp4train.models.common.cut import (
    HoldsParts as HoldsParts,
    Pipelined as Pipelined,
    Stage as Stage,
    StageCut as StageCut,
    TensorCut as TensorCut,
    TensorParallel as TensorParallel,
    TokenRanks as TokenRanks,
    multiplications as multiplications,
    multiplied as multiplied,
    share_blocks as share_blocks,
    stage_cut as stage_cut,
    tensor_cut as tensor_cut,
)
from fp4train.models.common.decoder import (
    Decoder as Decoder,
    FamilyDecoder as FamilyDecoder,
    document_mask as document_mask,
)
from fp4train.models.common.distillation import (
    TeacherStates as TeacherStates,
    chunked_distillation as chunked_distillation,
)
from fp4train.models.common.initialise import (
    fill_normal as fill_normal,
    materialise as materialise,
    why_not_deferred as why_not_deferred,
)
from fp4train.models.common.layers import (
    Attention as Attention,
    FeaturesNorm as FeaturesNorm,
    RMSNorm as RMSNorm,
    RopeScaling as RopeScaling,
    SharedNorm as SharedNorm,
    attention_parameters as attention_parameters,
    rope_angles as rope_angles,
)
from fp4train.models.common.liger import Liger as Liger, use_liger as use_liger
from fp4train.models.common.loss import (
    chunked_cross_entropy as chunked_cross_entropy,
)
from fp4train.models.common.operators import (
    OF_TORCH as OF_TORCH,
    Fusible as Fusible,
    Operation as Operation,
    rotate as rotate,
)
from fp4train.models.common.rotary import (
    AttentionDecoder as AttentionDecoder,
    PreNormBlock as PreNormBlock,
    PreNormShape as PreNormShape,
    RotaryBlock as RotaryBlock,
    RotaryDecoder as RotaryDecoder,
    RotaryShape as RotaryShape,
    SwiGLU as SwiGLU,
    gated_mlp_parameters as gated_mlp_parameters,
    pre_norm_parameters as pre_norm_parameters,
    rotary_ends as rotary_ends,
)
from fp4train.models.common.router import (
    DROPPED as DROPPED,
    Balance as Balance,
    ExpertShape as ExpertShape,
    Routers as Routers,
)
from fp4train.models.common.shape import (
    DecoderShape as DecoderShape,
    check_pattern as check_pattern,
)
