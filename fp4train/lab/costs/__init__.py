"""The estimated cost of a plan on a named GPU.

What counts a workload by running it (`workload`, and with it `cluster`, `memory`, `blocks` and
`mesh_plan`) loads Triton, and is imported from its files.
"""

from fp4train.lab.costs.estimate import (
    CostEstimate as CostEstimate,
    StretchCost as StretchCost,
    break_even as break_even,
    estimate as estimate,
)
from fp4train.lab.costs.links import (
    NETWORK_SHARE as NETWORK_SHARE,
    NVLINK_SHARE as NVLINK_SHARE,
    Collectives as Collectives,
)
from fp4train.lab.costs.roofline import (
    COPY as COPY,
    LAUNCH as LAUNCH,
    gemm_seconds as gemm_seconds,
    half_size as half_size,
    move_seconds as move_seconds,
)
from fp4train.lab.costs.rows import (
    GemmCost as GemmCost,
    decode_seconds as decode_seconds,
    layer_costs as layer_costs,
    quantise_seconds as quantise_seconds,
)
from fp4train.lab.costs.weights import (
    ModelWeight as ModelWeight,
    on_rank as on_rank,
    tensor_traffic as tensor_traffic,
)
