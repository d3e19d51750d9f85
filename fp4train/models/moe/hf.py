"""Mixtral, Qwen3-MoE and dots.llm1 as Hugging Face's `transformers` has them: names of parameters, and `config.json`
both ways.

| `model_type` | its model here |
|---|---|
| `mixtral` | softmax, normalised weights |
| `qwen3_moe` | softmax, `qk_norm`, `dense` first blocks |
| `dots1` | sigmoid, a bias, `qk_norm`, shared experts, `dense` first blocks: the experts of DeepSeek-V3 |

A folder has a matrix per expert. `transformers` joins them as it loads them, gate above up, as they are here.
"""

from collections.abc import Mapping
from typing import Any

from fp4train.models.common.experts import Balance, ExpertShape
from fp4train.models.common.hf import (
    ROTARY_KEYS,
    ROTARY_VALUES,
    Stored,
    check_attention,
    check_keys,
    count,
    flag,
    is_frequency,
    number,
    read_rotary,
    rotary_names,
    tied_head,
    write_rotary,
)
from fp4train.models.moe.model import MixtureOfExperts

ARCHITECTURE = MixtureOfExperts
MODEL_TYPES = ("mixtral", "qwen3_moe", "dots1")
EXACT = ("e_score_correction_bias",)
FREE = ("recompute", "max_positions", "rope_base", "rope_scaling", "balance")
computed, copies_of = is_frequency, tied_head
_CLASSES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "dots1": "Dots1ForCausalLM"}
_LENGTHS = {"mixtral": 131072, "qwen3_moe": 32768, "dots1": 2048}
_ROPE_BASES = {"mixtral": 1e6, "qwen3_moe": 1e4, "dots1": 1e4}
_READ = ROTARY_KEYS | {
    *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("n_shared_experts", "norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "mlp_only_layers"),
    # of the loss of balance, which the forward pass does not have
    *("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
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
    """The model that a `config.json` describes, with the vocabulary and longest sequence that it names.

    Raises:
        ValueError: a key or value that the model here does not have; the message names both.
    """
    kind = config["model_type"]
    check_keys(config, kind, _READ, _ONE_VALUE, _CLASSES[kind])
    check_attention(config)
    _check_window(config, kind)
    mixtral, dots = kind == "mixtral", kind == "dots1"
    key = "n_routed_experts" if dots else "num_experts" if "num_experts" in config else "num_local_experts"
    experts = ExpertShape(
        count=count(config, key),
        top=count(config, "num_experts_per_tok", 2 if mixtral else None if dots else 8),
        hidden=count(config, "intermediate_size" if mixtral else "moe_intermediate_size"),
        shared=count(config, "n_shared_experts") if dots else 0,
        scores="sigmoid" if dots else "softmax",
        normalised=mixtral or flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor", 1.0) if dots else 1.0,
        bias=dots,
    )
    rotary = read_rotary(config, eps=1e-5 if mixtral else 1e-6, longest=_LENGTHS[kind], rope_base=_ROPE_BASES[kind])
    return MixtureOfExperts(
        **rotary,
        dense=_dense(config, kind, rotary["layers"]),
        head_dim=count(config, "head_dim", rotary["width"] // rotary["heads"]),
        qk_norm=not mixtral,
        experts=experts,
        balance=Balance(loss=1e-4, speed=1e-3) if dots else Balance(),
    )


def config_of(shape: MixtureOfExperts, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids.

    Raises:
        ValueError: no model of transformers has these options together.
    """
    kind, experts = _kind(shape), shape.experts
    own: dict[str, dict[str, Any]] = {
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
        "dots1": {
            "n_routed_experts": experts.count,
            "n_shared_experts": experts.shared,
            "moe_intermediate_size": experts.hidden,
            "norm_topk_prob": experts.normalised,
            "routed_scaling_factor": experts.scale,
            "scoring_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": shape.dense,
            "attention_bias": False,
            "sliding_window": None,
        },
    }
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **write_rotary(shape, vocab_size=vocab_size, seq_len=seq_len),
        "intermediate_size": experts.hidden if kind == "mixtral" else shape.hidden,
        "num_experts_per_tok": experts.top,
        **own[kind],
    }


def names_of(shape: MixtureOfExperts) -> dict[str, Stored]:
    """Names of the state dict → Hugging Face's; a tied head has the embedding's."""
    kind = _kind(shape)
    outside, block = rotary_names(tied=shape.tied, qk_norm=shape.qk_norm)
    names: dict[str, Stored] = {**outside}
    inside = "block_sparse_moe" if kind == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for index in range(shape.layers):
        own, theirs = f"blocks.{index}", f"model.layers.{index}"
        names |= {f"{own}.{ours}": f"{theirs}.{other}" for ours, other in block.items()}
        if index < shape.dense:
            names |= {f"{own}.mlp.{each}.weight": f"{theirs}.mlp.{each}_proj.weight" for each in ("gate", "up", "down")}
            continue
        expert = [f"{theirs}.{inside}.experts.{number}" for number in range(shape.experts.count)]
        names[f"{own}.mlp.router.weight"] = f"{theirs}.{inside}.gate.weight"
        names[f"{own}.mlp.gate_up.weight"] = tuple((f"{e}.{gate}.weight", f"{e}.{up}.weight") for e in expert)
        names[f"{own}.mlp.down.weight"] = tuple((f"{e}.{down}.weight",) for e in expert)
        if shape.experts.bias:
            names[f"{own}.mlp.router.bias"] = f"{theirs}.mlp.gate.e_score_correction_bias"
        if shape.experts.shared:
            names |= {
                f"{own}.mlp.shared.{each}.weight": f"{theirs}.mlp.shared_experts.{each}_proj.weight"
                for each in ("gate", "up", "down")
            }
    return names


def _kind(shape: MixtureOfExperts) -> str:
    """The `model_type` of a model. Raises ValueError where transformers has none."""
    experts = shape.experts
    if experts.scores == "sigmoid":
        have = {"model.experts.bias=true": experts.bias, "model.qk_norm=true": shape.qk_norm}
        have["model.experts.shared of at least 1"] = experts.shared > 0
        kind = "dots1"
    else:
        have = {"model.experts.bias=false": not experts.bias, "model.experts.shared=0": not experts.shared}
        have["model.experts.scale=1"] = experts.scale == 1
        if not shape.qk_norm:
            have |= {"model.experts.normalised=true": experts.normalised, "model.dense=0": not shape.dense}
        kind = "qwen3_moe" if shape.qk_norm else "mixtral"
    if lost := [key for key, has in have.items() if not has]:
        chosen = f"model.experts.scores={experts.scores} and model.qk_norm={str(shape.qk_norm).lower()}"
        raise ValueError(f"transformers has no model with {chosen} without {lost[0]}; {_CLASSES[kind]} has it")
    return kind


def _dense(config: Mapping[str, Any], kind: str, layers: int) -> int:
    """The number of first blocks without experts."""
    if kind == "mixtral":
        return 0
    if kind == "dots1":
        dense = config.get("first_k_dense_replace") or 0
        if type(dense) is not int or dense < 0:
            raise ValueError(f"first_k_dense_replace={dense!r} must be a whole number from 0 on")
        return dense
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or {*listed} != {*range(len(listed))}:
        raise ValueError(f"mlp_only_layers={listed!r} is not supported: only the first blocks may have no experts")
    return len(listed)


def _check_window(config: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError where a layer attends to a window alone; a list of all layers says that none does."""
    window = config.get("sliding_window", 4096 if kind == "dots1" else None)
    if window is None or config.get("layer_types") is not None:
        return
    if kind == "qwen3_moe" and not flag(config, "use_sliding_window"):
        return
    if kind == "dots1" and count(config, "max_window_layers", 62) >= count(config, "num_hidden_layers"):
        return
    raise ValueError(f"sliding_window={window!r} is not supported: attention has no window")
