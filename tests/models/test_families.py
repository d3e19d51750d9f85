"""Models of Hugging Face's `transformers` and ours: the same function, configuration both ways,
refusals by key.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_folders import MODELS, SCALED, SMALL, random_model
from torch import Tensor, nn

from fp4train.models.common import RopeScaling, stage_cut, tensor_cut, why_not_deferred
from fp4train.models.families import Family, families, family_for, family_of
from fp4train.models.llama import Llama

FORWARD = 1e-5


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, nn.Module]]:
    """A model of transformers and ours, of its configuration and with its weights."""
    theirs = random_model(request.param)
    yield theirs, ours_of(theirs)


def ours_of(theirs: Any, time: int = 256) -> nn.Module:
    config = json.loads(theirs.config.to_json_string(use_diff=False))
    family = family_for(config)
    shape = family.shape_of(config)
    model: nn.Module = shape.build(vocab_size=257, seq_len=time)
    stored = theirs.state_dict()
    model.load_state_dict({own: stored[name] for own, name in family.names_of(shape).items()})
    return model


def tokens(time: int = 256) -> Tensor:
    return torch.randint(
        0, SMALL["vocab_size"], (2, time), generator=torch.Generator().manual_seed(0)
    )


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_logits_equal_those_of_transformers(pair: tuple[Any, nn.Module]) -> None:
    theirs, ours = pair
    with torch.no_grad():
        expected = theirs(input_ids=tokens()).logits
        torch.testing.assert_close(ours(tokens()), expected, rtol=0, atol=FORWARD)
    assert expected.abs().max() > 1


def test_gradients_equal_those_of_transformers(pair: tuple[Any, nn.Module]) -> None:
    theirs, ours = pair
    x = tokens()
    F.cross_entropy(theirs(input_ids=x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    ours(x[:, :-1], x[:, 1:]).backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    names = family_of(ours.shape).names_of(ours.shape)
    found = {names[name]: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert relative(grad, expected[name]) < 1e-5, name


def test_the_parameters_are_counted(pair: tuple[Any, nn.Module]) -> None:
    theirs, ours = pair
    count = sum(p.numel() for p in theirs.parameters())
    assert sum(p.numel() for p in ours.parameters()) == count


def test_a_configuration_comes_back_as_it_was(pair: tuple[Any, nn.Module]) -> None:
    """Written by us it is read as the same model by us and by transformers."""
    import transformers

    theirs, ours = pair
    family = family_of(ours.shape)
    written = json.loads(json.dumps(family.config_of(ours.shape, vocab_size=320, seq_len=64)))
    assert family.shape_of(written) == ours.shape
    again = transformers.AutoConfig.for_model(**written)
    assert type(again) is type(theirs.config)
    for key in (*SMALL, "head_dim", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(again, key, None) == getattr(theirs.config, key, 16), key
    assert again.rope_parameters == theirs.config.rope_parameters


def test_older_configurations_name_the_rotation_apart() -> None:
    scaling = {
        key: value for key, value in SCALED.items() if key not in ("rope_theta", "rope_type")
    }
    older = {
        **SMALL,
        "model_type": "llama",
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **scaling},
    }
    newer = {**SMALL, "model_type": "llama", "rope_parameters": SCALED}
    expected = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=32
    )
    for config in (older, newer):
        shape = family_for(config).shape_of(config)
        assert (shape.rope_base, shape.rope_scaling) == (5e5, expected)


def test_what_a_configuration_leaves_out_is_as_in_transformers() -> None:
    import transformers

    for kind in ("llama", "qwen2", "qwen3", "olmo2"):
        small = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"}
        shape = family_for({"model_type": kind}).shape_of({**small, "model_type": kind})
        config = transformers.AutoConfig.for_model(kind, **small)
        assert shape.max_positions == config.max_position_embeddings
        assert shape.norm_eps == config.rms_norm_eps
        assert shape.tied is config.tie_word_embeddings
        assert shape.rope_base == config.rope_parameters["rope_theta"]
        assert shape.head_width == getattr(config, "head_dim", 16)


COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
}
WINDOWS = {"use_sliding_window": False, "sliding_window": 32768}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64,
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
            "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "SmolLM2-135M": (
        134_515_008,
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
            "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 100000, "rope_scaling": None,
            "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
            "is_llama_config": True, "rope_interleaved": False,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 896,
            "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "tie_word_embeddings": True, "max_window_layers": 24, "use_mrope": False, **WINDOWS,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
            "tie_word_embeddings": True, "attention_bias": False, "rope_scaling": None, "max_window_layers": 28,
            "use_sliding_window": False, "sliding_window": None,
        },
    ),
    "OLMo-2-0425-1B": (
        1_484_916_736,
        {
            "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 100352, "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "rope_scaling": None,
            "tie_word_embeddings": False, "attention_bias": False,
        },
    ),
    "OLMo-2-1124-13B": (
        13_716_198_400,
        {
            "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 100352, "hidden_size": 5120,
            "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "rope_scaling": None,
            "tie_word_embeddings": False, "attention_bias": False,
        },
    ),
}  # fmt: skip
"""Parameters and config.json as published on the Hugging Face hub."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    count, own = PUBLISHED[name]
    shape = family_for(own).shape_of({**COMMON, **own})
    with torch.device("meta"):
        model = shape.build(vocab_size=100, seq_len=8)
    assert sum(p.numel() for p in model.parameters()) == count
    assert set(family_of(shape).names_of(shape)) == set(model.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3' is not supported; supported are "
                                   ".*llama, qwen2, qwen3"),
        ({"architectures": ["LlamaModel"]}, r"architectures=\['LlamaModel'\] is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu' is"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported: there is no "
                                     "dropout here"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type='yarn' is "
                                                     "not supported"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor=2.0 is not supported"),
        ({"rope_parameters": {**SCALED, "factor": "8"}}, "factor='8' must be a number"),
        ({"rope_parameters": {**SCALED, "low_freq_factor": 4.0}}, "low_freq_factor=4.0 must be above 0 and below"),
        ({"rope_parameters": 3}, "rope_parameters=3 must be a table"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.* start "
                                                           "from the folder that they"),
        ({"quantization_config": {"ignore": ["lm_head"] * 500}}, r"^.{0,170}….{0,130}$"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map=.* code in the folder is "
                                                       "not run, and `architectures"),
        ({"logit_scale": 2.0}, "logit_scale=2.0 is an unknown key of a llama model"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 63}, "width=63 is not divisible by model.heads=4|head_dim=15"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be a whole number"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.*'sliding_attention'.* is "
                                                     "not supported"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window=True"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv=8.0 is an unknown key of a olmo2 model"),
    ],
)  # fmt: skip
def test_what_the_model_here_lacks_is_refused_by_key_and_value(
    changes: dict[str, Any], message: str
) -> None:
    config = {"model_type": "llama", **SMALL, **changes}
    with pytest.raises(ValueError, match=message):
        family_for(config).shape_of(config)


def test_python_files_of_a_folder_are_left_alone_where_it_names_a_class_of_transformers() -> None:
    own = {"model_type": "llama", **SMALL, "architectures": ["LlamaForCausalLM"]}
    files = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"}}
    family = family_for(own)
    assert family.shape_of(own | files) == family.shape_of(own)


def test_windows_that_no_layer_has_are_no_windows() -> None:
    config = {
        "model_type": "qwen2",
        **SMALL,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
    }
    assert family_for(config).shape_of(config).qkv_bias


def test_a_model_that_transformers_lacks_is_refused() -> None:
    shape = Llama(qkv_bias=True, qk_norm=True)
    with pytest.raises(
        ValueError, match=r"qkv_bias=true with model.qk_norm=true has no form in transformers"
    ):
        family_of(shape).config_of(shape, vocab_size=320, seq_len=64)


class Other(Llama):
    """A model of a user's own: it may be more than the Llama that it is made from."""


def test_a_family_without_a_form_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"Other has no form in transformers; these have one: .*Llama, ",
    ):
        family_of(Other())


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_the_table_of_a_family_says_everything_of_its_parameters(family: Family) -> None:
    """What a new family forgets to say is named here: initial values, a name in a folder, the cut
    and the stage of each parameter.
    """
    with torch.device("meta"):
        model = family.small.build(vocab_size=64, seq_len=32)
    names = family.names_of(family.small)
    assert names.keys() == model.state_dict().keys()
    stored = [name for name in names.values() if isinstance(name, str)]
    assert len(set(stored)) == len(stored) - family.small.tied
    assert why_not_deferred(model) is None
    cut, stages = tensor_cut(model), stage_cut(model)
    assert cut.out and cut.in_ and cut.vocabulary == ("embed", "head") and cut.counts
    assert stages is not None and (stages.first, stages.last) == (("embed",), ("norm", "head"))
