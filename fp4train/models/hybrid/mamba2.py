"""Mamba-2 as Hugging Face's `transformers` has it: a hybrid whose blocks are all Mamba-2. `hf.py`
has its names.

Its smallest time step is the lower end of `time_step_limit`; `time_step_min`, `_max` and `_floor`
are of first weights. The residual stream has the dtype of activations here, also where
`residual_in_fp32` says float32: in float32 they are one.
"""

import math
from collections.abc import Mapping
from typing import Any

from fp4train.models.common.hf import brief, check_keys, count, flag, number
from fp4train.models.common.scan import ScanShape
from fp4train.models.hybrid.model import Hybrid

KIND = "mamba2"
_CLASS = "Mamba2ForCausalLM"
_READ = {
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "layer_norm_epsilon",
    "expand",
    "num_heads",
    "head_dim",
    "state_size",
    "n_groups",
    "conv_kernel",
    "chunk_size",
    "time_step_limit",
    "tie_word_embeddings",
    "residual_in_fp32",
    "layer_types",
    "intermediate_size",
    # of first weights
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_rank",
    "rescale_prenorm_residual",
    "time_step_init_scheme",
    "time_step_scale",
    # transformers multiplies by the gate before its norm, also where a published configuration says
    # the contrary
    "norm_before_gate",
}
_ONE_VALUE: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_bias": (False,),
    "use_conv_bias": (True,),
    "rms_norm": (True,),
}


def has_form(shape: Hybrid) -> bool:
    """Whether all blocks are Mamba-2, with an inner width that is a multiple of the width."""
    inner = shape.scan.heads * shape.scan.head_dim
    return set(shape.pattern) == {"M"} and inner % shape.width == 0


def shape_of(config: Mapping[str, Any]) -> Hybrid:
    """See `hf.shape_of`."""
    check_keys(config, KIND, _READ, _ONE_VALUE, _CLASS)
    width = count(config, "hidden_size", 4096)
    expand = count(config, "expand", 2)
    heads = count(config, "num_heads", 128)
    head_dim = count(config, "head_dim", 64)
    if width * expand != heads * head_dim:
        raise ValueError(
            f"hidden_size={width} × expand={expand} is not num_heads={heads} × head_dim={head_dim}"
        )
    if config.get("intermediate_size", heads * head_dim) != heads * head_dim:
        raise ValueError(
            f"intermediate_size={brief(config['intermediate_size'])} is not hidden_size times "
            "expand"
        )
    layers = count(config, "num_hidden_layers", 64)
    if (types := config.get("layer_types")) not in (None, ["linear_attention"] * layers):
        raise ValueError(
            f"layer_types={brief(types)} is not supported: every layer is 'linear_attention'"
        )
    return Hybrid(
        width=width,
        pattern="M" * layers,
        scan=ScanShape(
            heads=heads,
            head_dim=head_dim,
            state=count(config, "state_size", 128),
            groups=count(config, "n_groups", 8),
            kernel=count(config, "conv_kernel", 4),
            chunk=count(config, "chunk_size", 256),
            least_step=_least_step(config.get("time_step_limit")),
        ),
        heads=1,
        tied=flag(config, "tie_word_embeddings"),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        vocab_size=count(config, "vocab_size", 32768),
    )


def config_of(shape: Hybrid, *, vocab_size: int) -> dict[str, Any]:
    """See `hf.config_of`."""
    scan = shape.scan
    return {
        "architectures": [_CLASS],
        "model_type": KIND,
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": len(shape.pattern),
        "expand": scan.heads * scan.head_dim // shape.width,
        "num_heads": scan.heads,
        "head_dim": scan.head_dim,
        "state_size": scan.state,
        "n_groups": scan.groups,
        "conv_kernel": scan.kernel,
        "chunk_size": scan.chunk,
        "time_step_limit": [scan.least_step, {"__float__": "Infinity"}],
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": False,
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
    }


def _least_step(limit: object) -> float:
    """The lower end of `time_step_limit`, which has no upper one; transformers writes infinity as a
    table.
    """
    if limit is None:
        return 0.0
    pair = (
        isinstance(limit, list | tuple)
        and len(limit) == 2
        and limit[1] in (math.inf, {"__float__": "Infinity"})
    )
    if not pair or isinstance(limit[0], bool) or not isinstance(limit[0], int | float):  # type: ignore[index]
        raise ValueError(
            f"time_step_limit={brief(limit)} is not supported: it must be a smallest step, "
            "and infinity"
        )
    return float(limit[0])  # type: ignore[index]
