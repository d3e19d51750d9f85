"""Nemotron-H and Mamba-2 as Hugging Face's `transformers` has them: names of parameters, and
`config.json` both ways.

A model of Mamba-2 blocks alone is `mamba2` (`mamba2.py`), any other `nemotron_h`. The blocks of
Nemotron-H are named `linear_attention` (here `M`), `full_attention` (`*`) and `mlp` (`-`), or by
the same letters. Weights lie under the names of the published models, `backbone.…`, which
transformers renames as it loads them.
"""

from collections.abc import Mapping
from typing import Any

from fp4train.models.common.hf import agreed, brief, check_keys, count, number
from fp4train.models.common.scan import ScanShape
from fp4train.models.families import Family
from fp4train.models.hybrid import mamba2
from fp4train.models.hybrid.model import Hybrid

_CLASS = "NemotronHForCausalLM"
_TYPES = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
_OLD_TYPES = {"mamba": "M", "mamba2": "M", "attention": "*"}
_READ = {
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "layers_block_type",
    "layer_types",
    "hybrid_override_pattern",
    "layer_norm_epsilon",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_head_dim",
    "max_position_embeddings",
    "ssm_state_size",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "conv_kernel",
    "chunk_size",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_limit",
    "expand",
    "sliding_window",
    # of the kernels, of a cache, and of first weights
    "num_logits_to_keep",
    "use_mamba_kernels",
    "mamba_ssm_cache_dtype",
    "rescale_prenorm_residual",
    "time_step_rank",
    # of rotations, which its attention does not have in transformers
    "rope_theta",
    "partial_rotary_factor",
    # of experts and of predicting several tokens, which no block here has
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_overlap",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "mtp_layers_block_type",
}
_REPEATED = {
    "rms_norm_eps": "layer_norm_epsilon",
    "norm_eps": "layer_norm_epsilon",
    "num_query_groups": "num_key_value_heads",
    "mamba_num_groups": "n_groups",
}
"""Keys of published configurations that transformers does not read → the one that has their
value.
"""
_ONE_VALUE: dict[str, tuple[object, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "tie_word_embeddings": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "residual_in_fp32": (False,),
    "hidden_dropout": (0, None),
    "num_nextn_predict_layers": (0,),
}


def shape_of(config: Mapping[str, Any]) -> Hybrid:
    """The model that a `config.json` describes, with the vocabulary and longest sequence that it
    names.

    Raises:
        ValueError: a key or value that the model here does not have; the message names both.
    """
    if config["model_type"] == mamba2.KIND:
        return mamba2.shape_of(config)
    check_keys(config, "nemotron_h", _READ | _REPEATED.keys(), _ONE_VALUE, _CLASS)
    for other, key in _REPEATED.items():
        if config.get(other) not in (None, config.get(key)):
            raise ValueError(
                f"{other}={brief(config[other])} is not {key}={brief(config.get(key))}, which "
                "the model has"
            )
    if config.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window={brief(config['sliding_window'])} is not supported: attention "
            "has no window"
        )
    heads = count(config, "num_attention_heads", 32)
    return Hybrid(
        width=count(config, "hidden_size", 4096),
        pattern=_pattern(config),
        scan=ScanShape(
            heads=count(config, "mamba_num_heads", 128),
            head_dim=count(config, "mamba_head_dim", 64),
            state=count(config, "ssm_state_size", 128),
            groups=count(config, "n_groups", 8),
            kernel=count(config, "conv_kernel", 4),
            chunk=count(config, "chunk_size", 128),
            least_step=number(config, "time_step_min", 0.001),
        ),
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", 8),
        head_dim=count(config, _head_key(config), 128),
        hidden=count(config, "intermediate_size", 21504),
        tied=False,
        max_positions=count(config, "max_position_embeddings", 4096),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        vocab_size=count(config, "vocab_size", 131072),
    )


def config_of(shape: Hybrid, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids.

    Raises:
        ValueError: head and embedding share their weight, which only those of Mamba-2 blocks alone
            may.
    """
    if mamba2.has_form(shape):
        return mamba2.config_of(shape, vocab_size=vocab_size)
    if shape.tied:
        raise ValueError(
            "model.tied=true has no form in transformers: its Nemotron-H has a head of its own"
        )
    scan = shape.scan
    letters = {letter: name for name, letter in _TYPES.items()}
    return {
        "architectures": [_CLASS],
        "model_type": "nemotron_h",
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "layers_block_type": [letters[letter] for letter in shape.pattern],
        "hybrid_override_pattern": shape.pattern,
        "num_hidden_layers": len(shape.pattern),
        "intermediate_size": shape.hidden,
        "mlp_hidden_act": "relu2",
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.max_positions or seq_len,
        "mamba_num_heads": scan.heads,
        "mamba_head_dim": scan.head_dim,
        "ssm_state_size": scan.state,
        "n_groups": scan.groups,
        "conv_kernel": scan.kernel,
        "chunk_size": scan.chunk,
        "time_step_min": scan.least_step,
        "mamba_hidden_act": "silu",
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": False,
    }


def _head_key(config: Mapping[str, Any]) -> str:
    """The key that names the width of a head of attention. Raises ValueError where two contradict
    each other.
    """
    keys = ("head_dim", "attention_head_dim")
    agreed({key: config.get(key) for key in keys})
    return keys[config.get(keys[0]) is None]


def _pattern(config: Mapping[str, Any]) -> str:
    """A letter per block, from the keys that name the blocks; each software reads another of them.

    Raises:
        ValueError: none does, or they contradict each other.
    """
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise ValueError(f"hybrid_override_pattern={brief(pattern)} must be a letter per block")
    letters = agreed(
        {
            "layers_block_type": _letters(config, "layers_block_type"),
            "layer_types": _letters(config, "layer_types"),
            "hybrid_override_pattern": pattern,
        }
    )
    if letters is None:
        raise ValueError("layers_block_type is missing")
    layers = count(config, "num_hidden_layers", len(letters))
    if layers != len(letters):
        raise ValueError(
            f"num_hidden_layers={layers} contradicts the {len(letters):,} blocks that are named"
        )
    return str(letters)


def _letters(config: Mapping[str, Any], key: str) -> str | None:
    """A letter per block of a list of their types; None: there is none of that key."""
    types = config.get(key)
    letters = _TYPES | _OLD_TYPES
    if not types:
        return None
    if not isinstance(types, list):
        raise ValueError(f"{key}={brief(types)} must be a list")
    for kind in types:
        if not isinstance(kind, str) or kind not in letters:
            raise ValueError(f"{key} has {brief(kind)}; supported are {', '.join(_TYPES)}")
    return "".join(letters[kind] for kind in types)


FAMILY = Family(
    shape=Hybrid,
    model_types=("nemotron_h", mamba2.KIND),
    shape_of=shape_of,
    config_of=config_of,
    small=Hybrid(
        width=64,
        pattern="M-M-M*-M*",
        heads=4,
        kv_heads=4,
        hidden=64,
        scan=ScanShape(heads=8, head_dim=8, groups=4, chunk=16),
    ),
    free=("recompute", "max_positions", "scan.chunk", "scan.kernels"),
)
