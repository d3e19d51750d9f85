"""Mixtral, Qwen3-MoE, GLM-4-MoE and dots.llm1 as Hugging Face's `transformers` has them: names of
parameters, and `config.json` both ways.

| `model_type` | its model here |
|---|---|
| `mixtral` | softmax, normalised weights |
| `qwen3_moe` | softmax, `qk_norm`, `dense` first blocks |
| `glm4_moe` | sigmoid, a bias, shared experts, `dense` first blocks: the experts of DeepSeek-V3 |
| `dots1` | the same with `qk_norm`; read, and written as `glm4_moe` |

A folder has a matrix per expert. `transformers` joins them as it loads them, gate above up, as they
are here.

dots.llm1 and GLM-4-MoE compute the same, and their weights have the same names. vLLM, SGLang and
TensorRT-LLM serve GLM-4-MoE (GLM-4.5 to 4.7), and of them no current one serves dots.llm1.
GLM-4-MoE rotates half of each head where `partial_rotary_factor` does not say 1. Its classes in
vLLM and SGLang have a head of their own whatever `tie_word_embeddings` says, so a tied one is
written twice.
"""

from collections.abc import Mapping
from typing import Any

from fp4train.models.common import Balance, ExpertShape
from fp4train.models.common.hf import (
    MOST,
    ROTARY_KEYS,
    ROTARY_VALUES,
    agreed,
    brief,
    check_attention,
    check_keys,
    check_matrices,
    count,
    flag,
    is_frequency,
    number,
    read_rotary,
    write_rotary,
)
from fp4train.models.families import Family
from fp4train.models.moe.model import MixtureOfExperts

_CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
}
_SIGMOID = ("glm4_moe", "dots1")
"""The kinds whose routers take the sigmoid of their logits, with a bias."""
_LENGTHS = {"mixtral": 131072, "qwen3_moe": 32768, "glm4_moe": 131072, "dots1": 2048}
_ROPE_BASES = {"mixtral": 1e6, "qwen3_moe": 1e4, "glm4_moe": 1e4, "dots1": 1e4}
_EPS = {"mixtral": 1e-5, "qwen3_moe": 1e-6, "glm4_moe": 1e-5, "dots1": 1e-6}
_TOP = {"mixtral": 2, "qwen3_moe": 8, "glm4_moe": 8, "dots1": None}
_COUNTED = ("n_routed_experts", "num_experts", "num_local_experts")
"""The keys of the number of experts; `transformers` takes each for the others."""
_READ = ROTARY_KEYS | {
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "mlp_only_layers",
    "use_qk_norm",
    # of blocks that predict several tokens, whose weights would be refused
    "num_nextn_predict_layers",
    "num_mtp_layers",
    # of the loss of balance, which the forward pass does not have
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
}
_ONE_VALUE = ROTARY_VALUES | {
    "decoder_sparse_step": (1,),
    "router_jitter_noise": (0,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}


def shape_of(config: Mapping[str, Any]) -> MixtureOfExperts:
    """The model that a `config.json` describes, with the vocabulary and longest sequence that it
    names.

    Raises:
        ValueError: a key or value that the model here does not have; the message names both.
    """
    kind = config["model_type"]
    check_keys(config, kind, _READ, _ONE_VALUE, _CLASSES[kind])
    check_attention(config)
    _check_window(config, kind)
    _check_rotation(config, kind)
    if kind == "glm4_moe" and "num_key_value_heads" not in config:
        raise ValueError("num_key_value_heads is missing")
    experts = _experts(config, kind)
    check_matrices(config, experts.count)
    rotary = read_rotary(
        config, eps=_EPS[kind], longest=_LENGTHS[kind], rope_base=_ROPE_BASES[kind]
    )
    return MixtureOfExperts(
        **rotary,
        dense=_dense(config, kind),
        head_dim=count(config, "head_dim", rotary["width"] // rotary["heads"]),
        qk_norm=flag(config, "use_qk_norm") if kind == "glm4_moe" else kind != "mixtral",
        experts=experts,
        balance=Balance(loss=1e-4, speed=1e-3) if kind in _SIGMOID else Balance(),
    )


def config_of(shape: MixtureOfExperts, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids.

    Raises:
        ValueError: no model of transformers has these options together.
    """
    kind = _kind(shape)
    experts = shape.experts
    rotary = write_rotary(shape, vocab_size=vocab_size, seq_len=seq_len)
    family_keys: dict[str, dict[str, Any]] = {
        "mixtral": {"num_local_experts": experts.count, "sliding_window": None},
        "qwen3_moe": {
            "num_experts": experts.count,
            "moe_intermediate_size": experts.hidden,
            "norm_topk_prob": experts.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(shape.dense)),
            "attention_bias": False,
            "use_sliding_window": False,
        },
        "glm4_moe": {
            "partial_rotary_factor": 1.0,
            "rope_parameters": rotary["rope_parameters"] | {"partial_rotary_factor": 1.0},
            "use_qk_norm": shape.qk_norm,
            "n_routed_experts": experts.count,
            "n_shared_experts": experts.shared,
            "moe_intermediate_size": experts.hidden,
            "norm_topk_prob": experts.normalised,
            "routed_scaling_factor": experts.scale,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": shape.dense,
            "attention_bias": False,
            "num_nextn_predict_layers": 0,
        },
    }
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **rotary,
        "intermediate_size": experts.hidden if kind == "mixtral" else shape.hidden,
        "num_experts_per_tok": experts.top,
        **family_keys[kind],
    }


def _kind(shape: MixtureOfExperts) -> str:
    """The `model_type` of a model. Raises ValueError where transformers has none."""
    experts = shape.experts
    if experts.scores == "sigmoid":
        have = {
            "model.experts.bias=true": experts.bias,
            "model.experts.shared of at least 1": experts.shared > 0,
        }
        kind = "glm4_moe"
    else:
        have = {
            "model.experts.bias=false": not experts.bias,
            "model.experts.shared=0": not experts.shared,
        }
        have["model.experts.scale=1"] = experts.scale == 1
        if not shape.qk_norm:
            have |= {
                "model.experts.normalised=true": experts.normalised,
                "model.dense=0": not shape.dense,
            }
        kind = "qwen3_moe" if shape.qk_norm else "mixtral"
    if lost := [key for key, has in have.items() if not has]:
        chosen = (
            f"model.experts.scores={experts.scores} and model.qk_norm={str(shape.qk_norm).lower()}"
        )
        raise ValueError(
            f"transformers has no model with {chosen} without {lost[0]}; {_CLASSES[kind]} has it"
        )
    return kind


def _experts(config: Mapping[str, Any], kind: str) -> ExpertShape:
    """The layers of experts that a configuration describes."""
    sigmoid = kind in _SIGMOID
    glm = kind == "glm4_moe"
    named = {key: config[key] for key in _COUNTED if config.get(key) is not None}
    agreed(named)
    key = next(iter(named), _COUNTED[0] if sigmoid else _COUNTED[1])
    normalised = config.get("norm_topk_prob")
    return ExpertShape(
        count=count(config, key),
        top=count(config, "num_experts_per_tok", _TOP[kind]),
        hidden=count(config, "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"),
        shared=count(config, "n_shared_experts", 1 if glm else None) if sigmoid else 0,
        scores="sigmoid" if sigmoid else "softmax",
        normalised=kind == "mixtral"
        or (glm and normalised is None)
        or flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor", 1.0) if sigmoid else 1.0,
        bias=sigmoid,
    )


def _dense(config: Mapping[str, Any], kind: str) -> int:
    """The number of first blocks without experts."""
    if kind == "mixtral":
        return 0
    if kind in _SIGMOID:
        dense = config.get("first_k_dense_replace")
        dense = int(kind == "glm4_moe") if dense is None else dense
        if type(dense) is not int or not 0 <= dense <= MOST["num_hidden_layers"]:
            raise ValueError(
                f"first_k_dense_replace={brief(dense)} must be a whole number from 0 on"
            )
        return dense
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or sorted(map(repr, listed)) != sorted(
        map(repr, range(len(listed)))
    ):
        raise ValueError(
            f"mlp_only_layers={brief(listed)} is not supported: only the first blocks may "
            "have no experts"
        )
    return len(listed)


def _check_rotation(config: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError where half of each head is rotated, which is GLM-4-MoE's way where no key
    says another.
    """
    if kind != "glm4_moe":
        return
    tables = [config, *(config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))]
    if not any(isinstance(table, Mapping) and "partial_rotary_factor" in table for table in tables):
        raise ValueError(
            "partial_rotary_factor is missing, which means 0.5, and only 1 is supported"
        )


def _check_window(config: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError where a layer attends to a window alone; a list of all layers says that
    none does.
    """
    window = config.get("sliding_window", 4096 if kind == "dots1" else None)
    if kind == "glm4_moe" and window is not None:
        raise ValueError(
            f"sliding_window={brief(window)} is no key of GLM-4-MoE, whose attention has no window"
        )
    if window is None or config.get("layer_types") is not None:
        return
    if kind == "qwen3_moe" and not flag(config, "use_sliding_window"):
        return
    if kind == "dots1" and count(config, "max_window_layers", 62) >= count(
        config, "num_hidden_layers"
    ):
        return
    raise ValueError(f"sliding_window={brief(window)} is not supported: attention has no window")


FAMILY = Family(
    shape=MixtureOfExperts,
    model_types=tuple(_CLASSES),
    shape_of=shape_of,
    config_of=config_of,
    check=_kind,
    small=MixtureOfExperts(
        width=64,
        layers=9,
        heads=4,
        kv_heads=4,
        dense=3,
        qk_norm=True,
        experts=ExpertShape(count=8, top=2, hidden=64),
    ),
    free=("recompute", "max_positions", "rope_base", "rope_scaling", "balance"),
    computed=is_frequency,
    exact=("e_score_correction_bias",),
)
