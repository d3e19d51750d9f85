"""Evo 2's names of parameters and its configuration, both ways.

`transformers` has no StripedHyena 2. The form of such a model is that of vortex, the software of
Evo 2: `config.json` holds the keys of its configuration, beside a `model_type` of ours, and the
tensors have the names and shapes of its state dict. The published checkpoints are pickles (.pt),
which are never loaded here, since a pickle can run code: whoever trusts one saves its tensors under
the same names as safetensors first.

Shared filters stay shared, poles are logarithms, the rows of a projection alternate, and those of
attention go head by head (`column_split`): no weight is permuted.
"""

from collections.abc import Mapping
from typing import Any

from fp4train.models.common.hf import brief, check_keys, count, flag, number
from fp4train.models.families import Family
from fp4train.models.hyena.mixer import FilterShape
from fp4train.models.hyena.model import Hyena

_KIND = "stripedhyena2"
_LOADED = """import json
from safetensors.torch import load_file
from vortex.model.model import StripedHyena
from vortex.model.utils import dotdict

model = StripedHyena(dotdict(json.load(open("FOLDER/config.json"))))
model.custom_load_state_dict(load_file("FOLDER/model.safetensors"), strict=False)"""
"""Python that loads a folder, since transformers does not."""

_LISTS = {
    "S": "hcs_layer_idxs",
    "D": "hcm_layer_idxs",
    "H": "hcl_layer_idxs",
    "*": "attn_layer_idxs",
}
_BY_LENGTH = 128
"""Taps from which on vortex multiplies the token itself by a filter's first tap and adds `D`;
below, by the last.
"""
_READ = {
    "model_type",
    "architectures",
    "model_name",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_filters",
    "hcl_filter_groups",
    "hcm_filter_groups",
    "hcs_filter_groups",
    "hcm_filter_length",
    "hcs_filter_length",
    "short_filter_length",
    "state_size",
    "eps",
    "rotary_emb_base",
    "inner_mlp_size",
    "evo2_style_activations",
    "tie_embeddings",
    "max_seqlen",
    "max_position_embeddings",
    *_LISTS.values(),
    # of first weights, and of how it is run
    "mlp_init_method",
    "mlp_output_init_method",
    "make_vocab_size_divisible_by",
    "inner_size_multiple_of",
    "log_intermediate_values",
    "hyena_filter_groups",
    "model_parallel_size",
    "pipe_parallel_size",
    "use_fp8_input_projections",
    "max_batch_size",
    "use_flash_attn",
    "use_flash_rmsnorm",
    "use_flash_depthwise",
    "use_flashfft",
    "use_laughing_hyena",
    "inference_mode",
    "tokenizer_type",
    "prefill_style",
    "print_activations",
    # the last of these counts only where positions are interpolated, which is refused
    "use_hcs_kernel",
    "use_hcm_kernel",
    "use_hcl_kernel",
    "rotary_emb_scaling_factor",
}
_ONE_VALUE: dict[str, tuple[object, ...]] = {
    "short_filter_bias": (False,),
    "column_split": (True,),
    "column_split_hyena": (False,),
    "proj_groups": (1,),
    "interleave": (True,),
    "mha_out_proj_bias": (True,),
    "hyena_out_proj_bias": (True,),
    "hyena_flip_x1x2": (False,),
    "qkv_proj_bias": (False,),
    "final_norm": (True,),
    "mlp_activation": ("gelu",),
    "smeared_gqa": (False,),
    "use_interpolated_rotary_pos_emb": (False,),
    "long_fir_threshold": (None,),
}


def shape_of(config: Mapping[str, Any]) -> Hyena:
    """The model that a `config.json` describes, with the vocabulary and longest sequence that it
    names.

    Raises:
        ValueError: a key or value that the model here does not have; the message names both.
    """
    check_keys(config, _KIND, _READ, _ONE_VALUE)
    width = count(config, "hidden_size")
    heads = count(config, "num_attention_heads")
    pattern = _pattern(config)
    for key in ("num_filters", "hcl_filter_groups"):
        if count(config, key, width) != width:
            raise ValueError(
                f"{key}={config[key]} is not supported: long filters are one per channel, {width}"
            )
    short = count(config, "hcs_filter_length", 7)
    medium = count(config, "hcm_filter_length", _BY_LENGTH)
    _check_lengths(short, medium, "hcs_filter_length", "hcm_filter_length")
    shared = {
        count(config, f"{kind}_filter_groups")
        for kind, letter in (("hcs", "S"), ("hcm", "D"))
        if letter in pattern
    }
    if len(shared) > 1:
        raise ValueError(
            f"hcs_filter_groups={config['hcs_filter_groups']} and "
            f"hcm_filter_groups={config['hcm_filter_groups']} must "
            "be equal"
        )
    return Hyena(
        width=width,
        pattern=pattern,
        filters=FilterShape(
            featuriser=count(config, "short_filter_length", 3),
            short=short,
            medium=medium,
            groups=shared.pop() if shared else 1,
            poles=count(config, "state_size", 16),
        ),
        heads=heads,
        kv_heads=heads,
        head_dim=None,
        hidden=count(config, "inner_mlp_size"),
        gelu="first" if flag(config, "evo2_style_activations") else "all",
        rope_base=number(config, "rotary_emb_base", 1000000.0),
        tied=flag(config, "tie_embeddings"),
        max_positions=count(config, "max_seqlen", 8192),
        norm_eps=number(config, "eps", 1e-6),
        vocab_size=count(config, "vocab_size"),
    )


def config_of(shape: Hyena, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids.

    Raises:
        ValueError: Evo 2's software has no such heads or filters.
    """
    if shape.head_width * shape.heads != shape.width:
        raise ValueError(
            f"model.head_dim={shape.head_width} has no form in Evo 2's software: its heads "
            "have width / heads "
            f"elements, {shape.width / shape.heads:g}"
        )
    filters = shape.filters
    _check_lengths(filters.short, filters.medium, "model.filters.short", "model.filters.medium")
    places = {
        kind: [n for n, letter in enumerate(shape.pattern) if letter == kind] for kind in _LISTS
    }
    return {
        "model_type": _KIND,
        "vocab_size": vocab_size,
        "hidden_size": shape.width,
        "num_layers": len(shape.pattern),
        **{name: places[kind] for kind, name in _LISTS.items()},
        "num_filters": shape.width,
        "hcl_filter_groups": shape.width,
        "hcm_filter_groups": filters.groups,
        "hcs_filter_groups": filters.groups,
        "hcm_filter_length": filters.medium,
        "hcs_filter_length": filters.short,
        "short_filter_length": filters.featuriser,
        "state_size": filters.poles,
        "num_attention_heads": shape.heads,
        "rotary_emb_base": shape.rope_base,
        "inner_mlp_size": shape.hidden,
        "mlp_activation": "gelu",
        "evo2_style_activations": shape.gelu == "first",
        "eps": shape.norm_eps,
        "tie_embeddings": shape.tied,
        "max_seqlen": shape.max_positions or seq_len,
        "max_position_embeddings": shape.max_positions or seq_len,
        **{key: values[0] for key, values in _ONE_VALUE.items()},
        # what vortex also asks for
        "model_parallel_size": 1,
        "prefill_style": "fft",
        "use_fp8_input_projections": False,
        "use_flash_attn": False,
        "use_flashfft": False,
    }


def computed(name: str) -> bool:
    """Frequencies of rotations, and what an FP8 recipe keeps."""
    return name.endswith(("rotary_emb.inv_freq", "._extra_state"))


def _check_lengths(short: int, medium: int, short_key: str, medium_key: str) -> None:
    if short >= _BY_LENGTH:
        raise ValueError(
            f"{short_key}={short} is not supported: Evo 2's software has fewer than "
            f"{_BY_LENGTH} taps there"
        )
    if medium < _BY_LENGTH:
        raise ValueError(
            f"{medium_key}={medium} is not supported: Evo 2's software has at least "
            f"{_BY_LENGTH} taps there"
        )


def _pattern(config: Mapping[str, Any]) -> str:
    """A letter per block, from the lists of blocks of each kind."""
    total = count(config, "num_layers")
    letters: dict[int, str] = {}
    for letter, key in _LISTS.items():
        places = config.get(key, [])
        if not isinstance(places, list) or any(type(place) is not int for place in places):
            raise ValueError(f"{key}={brief(places)} must be a list of numbers of blocks")
        for place in places:
            if place in letters or not 0 <= place < total:
                if place in letters:
                    what = f"also in {_LISTS[letters[place]]}"
                else:
                    what = f"not below num_layers={total}"
                raise ValueError(f"{key} names block {place}, which is {what}")
            letters[place] = letter
    if lost := [place for place in range(total) if place not in letters]:
        raise ValueError(f"block {lost[0]} is in none of {', '.join(_LISTS.values())}")
    return "".join(letters[place] for place in range(total))


FAMILY = Family(
    shape=Hyena,
    model_types=(_KIND,),
    shape_of=shape_of,
    config_of=config_of,
    small=Hyena(
        width=64,
        pattern="SDH*SDH*H",
        heads=4,
        kv_heads=4,
        hidden=64,
        filters=FilterShape(groups=32),
    ),
    free=("recompute", "max_positions", "rope_base"),
    computed=computed,
    reads_bytes=True,
    loaded=_LOADED,
)
