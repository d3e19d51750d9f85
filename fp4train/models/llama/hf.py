"""Llama, Qwen2 and Qwen3 as Hugging Face's `transformers` has them: names of parameters, and
`config.json` both ways.

| `model_type` | its model here |
|---|---|
| `llama` | neither biases nor norms of heads |
| `qwen2` | `qkv_bias` |
| `qwen3` | `qk_norm` |

A key of a `config.json` is read, must have the one value that the model here has, or is known to
change nothing that is computed; any other is refused, since it may stand for something that the
model here lacks. A missing key has the value that the class in `transformers` gives it. Weights
need no permutation: both rotate halves of a head.
"""

from collections.abc import Mapping
from typing import Any

from fp4train.models.common.hf import (
    ROTARY_KEYS,
    ROTARY_VALUES,
    brief,
    check_attention,
    check_keys,
    count,
    flag,
    is_frequency,
    read_rotary,
    write_rotary,
)
from fp4train.models.families import Family
from fp4train.models.llama.model import Llama

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LENGTHS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
_QWEN3_HEAD = 128
_ONE_VALUE = ROTARY_VALUES | {"use_mrope": (False, None), "rope_interleaved": (False, None)}


def shape_of(config: Mapping[str, Any]) -> Llama:
    """The model that a `config.json` describes, with the head dimension, vocabulary and longest
    sequence that it names.

    Raises:
        ValueError: a key or value that the model here does not have; the message names both.
    """
    kind = config["model_type"]
    _check(config, kind)
    if kind != "llama" and "num_key_value_heads" not in config:
        raise ValueError("num_key_value_heads is missing")
    if kind == "qwen3":
        default = _QWEN3_HEAD
    else:
        default = count(config, "hidden_size") // count(config, "num_attention_heads")
    return Llama(
        **read_rotary(config, longest=_LENGTHS[kind]),
        head_dim=count(config, "head_dim", default),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def config_of(shape: Llama, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids.

    Raises:
        ValueError: the model has both biases and norms of heads.
    """
    if shape.qkv_bias and shape.qk_norm:
        raise ValueError(
            "model.qkv_bias=true with model.qk_norm=true has no form in transformers: Qwen2 "
            "has the biases of queries, "
            "keys and values, Qwen3 the norms of queries and keys"
        )
    kind = "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_norm else "llama"
    family_keys = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen3": {"attention_bias": False},
    }
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **write_rotary(shape, vocab_size=vocab_size, seq_len=seq_len),
        "intermediate_size": shape.mlp_width,
        **family_keys.get(kind, {"use_sliding_window": False}),
    }


# -- reading a configuration -----------------------------------------------------------------------


def _check(config: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError where a key or value means something that the model here does not have."""
    check_keys(config, kind, ROTARY_KEYS, _ONE_VALUE, _CLASSES[kind])
    check_attention(config)
    if kind == "llama" and config.get("sliding_window") is not None:
        raise ValueError(
            f"sliding_window={brief(config['sliding_window'])} is not supported: "
            "transformers' Llama has no window, "
            "but vLLM takes it. Take it out of a copy of config.json if the model was "
            "trained without one"
        )
    if kind != "llama" and config.get("layer_types") is None and flag(config, "use_sliding_window"):
        window = config.get("sliding_window", 4096)
        first_windowed = count(config, "max_window_layers", 28)
        if window is not None and first_windowed < count(config, "num_hidden_layers"):
            raise ValueError(
                f"use_sliding_window=True is not supported: sliding_window={brief(window)} "
                f"from layer {first_windowed} on"
            )


FAMILY = Family(
    shape=Llama,
    model_types=tuple(_CLASSES),
    shape_of=shape_of,
    config_of=config_of,
    small=Llama(width=64, layers=9, heads=8, kv_heads=4, hidden=64),
    free=("recompute", "max_positions", "rope_base", "rope_scaling"),
    computed=is_frequency,
)
