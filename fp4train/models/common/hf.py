"""Reading a `config.json` of Hugging Face's `transformers`, key by key: what families share.

A key is read, must have the one value that the model here has, or is known to change nothing that
is computed; any other is refused, since it may stand for something that the model here lacks.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from fp4train.models.common.layers import RopeScaling
from fp4train.text import shortened

_ONE_VALUE: dict[str, tuple[object, ...]] = {
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None,),
}
ROTARY_KEYS = {
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "max_position_embeddings",
    "layer_types",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
}
"""Keys that the families of rotary blocks read."""
ROTARY_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
}
"""Key → the values that the families of rotary blocks have."""
_SHOWN = 160
"""Characters of a value in a message."""
_MOST = 1 << 20
MOST = {
    "vocab_size": 1 << 24,
    "head_dim": 1 << 10,
    "attention_head_dim": 1 << 10,
    "mamba_head_dim": 1 << 12,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "num_experts": 1 << 13,
    "num_local_experts": 1 << 13,
    "n_routed_experts": 1 << 13,
    "n_shared_experts": 1 << 8,
    "max_position_embeddings": 1 << 30,
    "original_max_position_embeddings": 1 << 30,
    "conv_kernel": 1 << 8,
    "max_window_layers": 1 << 30,
    "sliding_window": 1 << 30,
    "max_seqlen": 1 << 30,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "hcs_filter_length": 1 << 10,
    "hcm_filter_length": 1 << 12,
    "short_filter_length": 1 << 8,
}
"""Key → the largest number that is read, some times that of the largest published model: what is
built of a number is allocated or named one by one, before a weight contradicts it. Other keys have
`_MOST`.
"""
_LARGEST = 1e30
_EXPERTS = 1 << 18
_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_REASONS = {
    "quantization_config": "quantised weights are not read: start from the folder that they "
    "were made from",
    "compression_config": "quantised weights are not read: start from the folder that they "
    "were made from",
    "auto_map": "code in the folder is not run, and `architectures` names no class of "
    "transformers that is read here",
    "attention_dropout": "there is no dropout here; set it to 0.0 in a copy to train without it",
}
_NOT_COMPUTED = re.compile(
    r"_.*|unsloth_.*|dtype|torch_dtype|transformers_version|use_cache|initializer_range|.*token_id|tokenizer_class|prefix"
    r"|id2label|label2id|num_labels|problem_type|return_dict|output_.*|use_return_dict|torchscript|task_specific_params"
    r"|finetuning_task|is_decoder|tie_encoder_decoder|cross_attention_hidden_size|sep_token_id|bad_words_ids"
    r"|max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_[kp]"
    r"|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|suppress_tokens"
    r"|begin_suppress_tokens|num_return_sequences|exponential_decay_length_penalty|remove_invalid_values|use_bfloat16"
    r"|tf_legacy_loss|is_llama_config|transformers\.js_config|model_max_length|max_sequence_length"
)


def brief(value: object) -> str:
    """A value in a message: no longer than a line or two."""
    return shortened(repr(value), _SHOWN)


def check_keys(
    config: Mapping[str, Any],
    kind: str,
    read: Collection[str],
    one_value: Mapping[str, tuple[object, ...]],
    known: str | None = None,
) -> None:
    """Raises ValueError where a key or value means something that the model here does not have; it
    names both.

    Args:
        kind: the configuration's `model_type`.
        read: keys that the family reads.
        one_value: keys whose values must be among the given ones, beside those of all families.
        known: the class that transformers has for that `model_type`; None: it has none. Where the
            configuration names it, the Python files of the folder that `auto_map` names change
            nothing: without `trust_remote_code` transformers takes its own class, too.
    """
    named = config.get("architectures")
    if known is not None and named not in (None, [known]):
        raise ValueError(
            f"architectures={brief(named)} is not supported with model_type={brief(kind)}; it "
            f"must be {known}"
        )
    for key, value in config.items():
        if key == "auto_map" and known is not None and named is not None:
            continue
        shown = f"{key}={brief(value)}"
        if (allowed := one_value.get(key, _ONE_VALUE.get(key))) is not None:
            if not any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool)
                for choice in allowed
            ):
                reason = _REASONS.get(key, f"only {allowed[0]!r} is")
                raise ValueError(f"{shown} is not supported: {reason}")
        elif key not in read and value is not None and not _NOT_COMPUTED.fullmatch(key):
            raise ValueError(
                f"{shown} is an unknown key of a {kind} model; if it changes nothing that the "
                "model computes, "
                "take it out of a copy of config.json"
            )


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The whole number of a key, from 1 to `MOST` of it.

    Raises:
        ValueError: it is missing and has no default, or is none; the message names key and value.
    """
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{key} is missing")
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={brief(value)} must be a whole number from 1 on")
    if value > (most := MOST.get(key, _MOST)):
        raise ValueError(f"{key}={brief(value)} is more than {most:,}, the most that is read")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """The finite number of a key.

    Raises:
        ValueError: it is none; the message names key and value.
    """
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}={brief(value)} must be a number")
    if not abs(value) < _LARGEST:
        raise ValueError(f"{key}={brief(value)} must be a finite number below {_LARGEST:g}")
    return float(value)


def agreed(values: Mapping[str, Any]) -> Any:
    """The value that all keys name which name one; None: none does.

    Args:
        values: values by key, in one spelling; None: the configuration does not have the key.

    Raises:
        ValueError: two keys name different ones. Which of them counts depends on the software that
            reads them.
    """
    named = {key: value for key, value in values.items() if value is not None}
    if not named:
        return None
    key, value = next(iter(named.items()))
    for other, contrary in named.items():
        if contrary != value:
            raise ValueError(
                f"{key}={brief(value)} and {other}={brief(contrary)} contradict each other: "
                "correct what is wrong in "
                "a copy of config.json"
            )
    return value


def check_matrices(config: Mapping[str, Any], experts: int) -> None:
    """Raises ValueError where all layers together have more experts than any model, each of which
    has a name.

    Args:
        experts: number of experts in a layer.
    """
    layers = count(config, "num_hidden_layers")
    if layers * experts > _EXPERTS:
        raise ValueError(
            f"num_hidden_layers={layers} of {experts} experts each are more than {_EXPERTS:,} "
            "experts, the most that "
            "are read"
        )


def flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={brief(value)} must be true or false")
    return value


def read_rope(
    config: Mapping[str, Any], default: float = 10000.0
) -> tuple[float, RopeScaling | None]:
    """θ, `default` where it is not named, and the scaling of the rotations; older configurations
    name them apart from each other.

    Raises:
        ValueError: they are not supported, or two keys contradict each other.
    """
    tables = {key: config.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{key}={brief(table)} must be a table")
    agreed({key: _scaling_of(table) for key, table in tables.items() if table})
    agreed(
        {"rope_theta": config.get("rope_theta")}
        | {f"{key}.rope_theta": table.get("rope_theta") for key, table in tables.items()}
    )
    if tables["rope_scaling"]:
        where = "rope_scaling"
    else:
        where = "rope_parameters"
    rope = tables[where]
    base = number(rope if "rope_theta" in rope else config, "rope_theta", default)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"{where}.rope_type={brief(kind)} is not supported; supported are 'default' and "
            "'llama3'"
        )
    keys = {"rope_type", "type", "rope_theta", *(_ROPE if kind == "llama3" else ())}
    for key, value in rope.items():
        if key not in keys and not (key == "partial_rotary_factor" and value == 1):
            raise ValueError(
                f"{where}.{key}={brief(value)} is not supported with rope_type={brief(kind)}"
            )
    if kind == "default":
        return base, None
    if lost := [key for key in _ROPE if key not in rope]:
        raise ValueError(f"{where}.{lost[0]} is missing")
    factor, low, high = (number(rope, key, 0.0) for key in _ROPE[:3])
    return base, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_length=count(rope, _ROPE[3]),
    )


def _scaling_of(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What a table says of the scaling of the rotations, in one spelling."""
    scaling = {key: value for key, value in rope.items() if key in _ROPE}
    return {"rope_type": rope.get("rope_type", rope.get("type", "default")), **scaling}


def read_rotary(
    config: Mapping[str, Any], *, eps: float = 1e-6, longest: int, rope_base: float = 10000.0
) -> dict[str, Any]:
    """Arguments of a shape that decoders with rotary attention share.

    Args:
        eps, longest, rope_base: values for norms, positions and rotations where the configuration
            does not say.
    """
    heads = count(config, "num_attention_heads")
    base, scaling = read_rope(config, rope_base)
    return {
        "width": count(config, "hidden_size"),
        "layers": count(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": count(config, "num_key_value_heads", heads),
        "hidden": count(config, "intermediate_size"),
        "tied": flag(config, "tie_word_embeddings"),
        "rope_base": base,
        "rope_scaling": scaling,
        "norm_eps": number(config, "rms_norm_eps", eps),
        "max_positions": count(config, "max_position_embeddings", longest),
        "vocab_size": count(config, "vocab_size"),
    }


def write_rotary(shape: Any, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The keys of what `read_rotary` reads and of what decoders with rotary attention have in one
    way.
    """
    return {
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.max_positions or seq_len,
        "rms_norm_eps": shape.norm_eps,
        **write_rope(shape.rope_base, shape.rope_scaling),
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def is_frequency(name: str) -> bool:
    """Whether it names frequencies of the rotation, which old folders hold and which follow from
    the configuration.
    """
    return name.endswith("rotary_emb.inv_freq")


def write_rope(base: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of the rotations, twice: `rope_parameters` for transformers from version 5 on,
    `rope_theta` and `rope_scaling` for older ones, which would take the first for an unknown key.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if scaling is not None:
        numbers = (
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_length,
        )
        rope |= {"rope_type": "llama3", **dict(zip(_ROPE, numbers, strict=True))}
    if scaling is None:
        older = None
    else:
        older = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_parameters": rope, "rope_theta": base, "rope_scaling": older}


def check_attention(config: Mapping[str, Any]) -> None:
    """Raises ValueError where a layer attends to a window alone."""
    types = config.get("layer_types")
    if types is not None and (
        not isinstance(types, list) or any(attention != "full_attention" for attention in types)
    ):
        raise ValueError(
            f"layer_types={brief(types)} is not supported: only 'full_attention' is, in every layer"
        )
