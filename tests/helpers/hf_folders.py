"""Small random models of `transformers`, which tests compare with: Llama with scaled rotations,
Qwen2, Qwen3, OLMo 2; a folder with Evo 2's names.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fp4train.models.families import family_of
from fp4train.models.hyena import FilterShape, Hyena

END = "<|end-of-text|>"
"""A token that only the folder says to be the end of a document."""
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-3": ("Llama", {"head_dim": 32, "rope_parameters": SCALED, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "olmo2": ("Olmo2", {"pad_token_id": None, "eos_token_id": 2}),
    "olmo2-tied": (
        "Olmo2",
        {
            "head_dim": 32,
            "rope_parameters": SCALED,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "pad_token_id": None,
            "eos_token_id": 2,
        },
    ),
}
"""By name: the class of transformers, and what its configuration has besides `SMALL`."""
_MIXTURE: dict[str, Any] = SMALL | {"num_experts_per_tok": 2, "head_dim": 16}
_SIGMOID: dict[str, Any] = _MIXTURE | {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "olmo2": SMALL,
    "mixtral": _MIXTURE | {"num_local_experts": 4},
    "qwen3_moe": _MIXTURE | {"num_experts": 6, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    "glm4_moe": _SIGMOID | {"partial_rotary_factor": 1.0, "use_qk_norm": True},
    "dots1": _SIGMOID | {"sliding_window": None},
    "nemotron_h": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "time_step_min": 0.2,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
    },
    "mamba2": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 32,
        "tie_word_embeddings": True,
    },
    "stripedhyena2": {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "inner_mlp_size": 64,
        **{
            "hcs_layer_idxs": [0],
            "hcm_layer_idxs": [],
            "hcl_layer_idxs": [],
            "attn_layer_idxs": [1],
        },
        "hcs_filter_groups": 8,
        "max_seqlen": 512,
        "rotary_emb_base": 1e4,
        "eps": 1e-6,
    },
}
"""A small configuration by `model_type`."""


def random_model(name: str) -> Any:
    """The model `name` of `MODELS`, in float32; no weight, bias or norm is 0 or 1 alone."""
    import transformers

    kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SMALL, **own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write_folder(
    path: Path, name: str, *, dtype: torch.dtype = torch.float32, shard: str = "5GB"
) -> Any:
    """The folder of the model `name` as transformers writes it, with a tokenizer of bytes; returns
    the model.
    """
    model = random_model(name).to(dtype)
    model.save_pretrained(path, max_shard_size=shard)
    (path / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    return model


def write_evo2(path: Path) -> None:
    """A folder with Evo 2's names, as somebody makes it who trusts a published checkpoint: a
    configuration and tensors, the state of an FP8 recipe among these, and no tokenizer.
    """
    shape = Hyena(
        width=32,
        pattern="SDH*",
        heads=2,
        kv_heads=2,
        hidden=64,
        filters=FilterShape(groups=8, poles=4),
    )
    family = family_of(shape)
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps(family.config_of(shape, vocab_size=512, seq_len=64))
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = shape.build(vocab_size=512, seq_len=64).state_dict()
    tensors = {str(name): weights[own].bfloat16() for own, name in family.names_of(shape).items()}
    tensors["blocks.0.projections._extra_state"] = torch.zeros(5, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors")


def byte_tokenizer(more: int = 0) -> str:
    """`tokenizer.json` of a tokenizer whose ids are the bytes; `END` is 256, and `more` special
    tokens follow.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(rest)
    }
    made = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(each, special=True) for each in (END, *(f"<|{i}|>" for i in range(more)))]
    )
    text: str = made.to_str()
    return text


def change_table(path: Path, **changes: Any) -> None:
    """Set keys of a JSON table in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
