"""OLMo 2 as Hugging Face's `transformers` has it (`Olmo2ForCausalLM`): names of parameters, and
`config.json` both ways.

A key of a `config.json` is read, must have the one value that the model here has, or is known to
change nothing that is computed; any other is refused, since it may stand for something that the
model here lacks. A missing key has the value that the class in `transformers` gives it.
"""

from collections.abc import Mapping
from typing import Any

from fp4train.models.common.hf import (
    ROTARY_KEYS,
    ROTARY_VALUES,
    check_attention,
    check_keys,
    count,
    is_frequency,
    read_rotary,
    write_rotary,
)
from fp4train.models.families import Family
from fp4train.models.olmo2.model import Olmo2

_CLASS = "Olmo2ForCausalLM"
_READ = ROTARY_KEYS - {"use_sliding_window", "sliding_window", "max_window_layers"}


def shape_of(config: Mapping[str, Any]) -> Olmo2:
    """The model that a `config.json` describes, with the vocabulary and longest sequence that it
    names.

    Raises:
        ValueError: a key or value that the model here does not have; the message names both.
    """
    check_keys(config, config["model_type"], _READ, ROTARY_VALUES, _CLASS)
    check_attention(config)
    rotary = read_rotary(config, eps=1e-5, longest=2048)
    return Olmo2(
        **rotary,
        head_dim=count(config, "head_dim", rotary["width"] // rotary["heads"]),
    )


def config_of(shape: Olmo2, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids."""
    return {
        "architectures": [_CLASS],
        "model_type": "olmo2",
        **write_rotary(shape, vocab_size=vocab_size, seq_len=seq_len),
        "intermediate_size": shape.hidden,
        "attention_bias": False,
    }


FAMILY = Family(
    shape=Olmo2,
    model_types=("olmo2",),
    shape_of=shape_of,
    config_of=config_of,
    small=Olmo2(width=64, layers=9, heads=8, kv_heads=4, hidden=64),
    free=("recompute", "max_positions", "rope_base", "rope_scaling"),
    computed=is_frequency,
)
