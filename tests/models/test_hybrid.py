"""Hybrids of Mamba-2, attention and MLP blocks: shapes, first weights, documents, a cache, and what
they refuse.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_models import FamilyChecks, check_drawn, parameters
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.families import family_for
from fp4train.models.hybrid import Hybrid, HybridModel, ScanShape

SCAN = ScanShape(heads=4, head_dim=8, state=16, groups=2, chunk=16)
SMALL: dict[str, Any] = {
    "width": 32,
    "pattern": "M-*M",
    "heads": 4,
    "kv_heads": 2,
    "hidden": 48,
    "scan": SCAN,
}
LONG = 40
THEIRS: dict[str, Any] = {
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
}
"""Some of its time steps are below the least one."""
MAMBA2: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    **{
        "n_groups": 2,
        "chunk_size": 32,
        "tie_word_embeddings": True,
        "time_step_limit": [0.2, float("inf")],
    },
}

UNREAD: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "rope_theta": 5e4,
        "partial_rotary_factor": 0.5,
        "norm_eps": 1e-5,
        "num_query_groups": 2,
    },
    "mamba2": {"norm_before_gate": True, "time_step_init_scheme": "random", "time_step_scale": 1.0},
}
"""Keys of published configurations from which transformers computes nothing."""
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "nvidia/Nemotron-H-8B-Base-8K": (
        8_100_852_736,
        {
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "vocab_size": 131072,
            "auto_map": {
                "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
                "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
            },
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_head_dim": 128,
            "hidden_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "chunk_size": 128,
            "conv_kernel": 4,
            "expand": 2,
            "hidden_size": 4096,
            "num_hidden_layers": 52,
            "intermediate_size": 21504,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "rms_norm_eps": 1e-5,
            "n_groups": 8,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "mamba_num_heads": 128,
            "mamba_proj_bias": False,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "ssm_state_size": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_logits_to_keep": 1,
            "use_bias": False,
            "rescale_prenorm_residual": True,
            "residual_in_fp32": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.48.0.dev0",
            "use_cache": True,
            "use_conv_bias": True,
            "use_mamba_kernels": True,
        },
    ),
    "mistralai/Mamba-Codestral-7B-v0.1": (
        7_285_403_648,
        {
            "model_type": "mamba2",
            "architectures": ["Mamba2ForCausalLM"],
            "_name_or_path": "codestral-hf-good",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "chunk_size": 256,
            "conv_kernel": 4,
            "expand": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.1,
            "intermediate_size": 8192,
            "layer_norm_epsilon": 1e-5,
            "n_groups": 8,
            "norm_before_gate": True,
            "num_heads": 128,
            "num_hidden_layers": 64,
            "rescale_prenorm_residual": False,
            "residual_in_fp32": True,
            "rms_norm": True,
            "state_size": 128,
            "tie_word_embeddings": False,
            "time_step_floor": 0.0001,
            "time_step_init_scheme": "random",
            "time_step_limit": [0.0, float("inf")],
            "time_step_max": 0.1,
            "time_step_min": 0.001,
            "time_step_rank": 256,
            "time_step_scale": 1.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.44.0.dev0",
            "use_bias": False,
            "use_cache": True,
            "use_conv_bias": True,
            "vocab_size": 32768,
        },
    ),
}
"""Parameters and config.json as published on the Hugging Face hub."""


def model(**changes: Any) -> HybridModel:
    torch.manual_seed(0)
    converted = f4.convert(Hybrid(**{**SMALL, **changes}).build(vocab_size=60, seq_len=LONG))
    assert isinstance(converted, HybridModel)
    return converted.eval()


def tokens(batch: int = 3, time: int = LONG) -> Tensor:
    return torch.randint(0, 60, (batch, time), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["nemotron_h", "mamba2"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, nn.Module]]:
    """A model of transformers and ours, of its configuration and with its weights."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = {"nemotron_h": THEIRS, "mamba2": MAMBA2}[request.param] | UNREAD[request.param]
        config = transformers.AutoConfig.for_model(request.param, **given)
        theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    described = json.loads(theirs.config.to_json_string(use_diff=False))
    family = family_for(described)
    ours = family.shape_of(described).build(vocab_size=257, seq_len=256)
    stored = published(theirs.state_dict())
    ours.load_state_dict({own: stored[name] for own, name in family.names_of(ours.shape).items()})
    yield theirs, ours


def published(named: dict[str, Any]) -> dict[str, Any]:
    """By the names under which transformers saves the weights."""
    return {
        f"backbone.{name.removeprefix('model.')}" if "model." in name else name: each
        for name, each in named.items()
    }


def test_logits_and_gradients_equal_those_of_transformers(pair: tuple[Any, nn.Module]) -> None:
    theirs, ours = pair
    x = torch.randint(0, 320, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=x).logits
        assert (ours(x) - expected).abs().max() / expected.abs().max() < 1e-6
    F.cross_entropy(theirs(input_ids=x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    ours(x[:, :-1], x[:, 1:]).backward()
    grads = published({name: parameter.grad for name, parameter in theirs.named_parameters()})
    names = family_for({"model_type": theirs.config.model_type}).names_of(ours.shape)
    assert {names[name] for name, _ in ours.named_parameters()} == grads.keys()
    for name, parameter in ours.named_parameters():
        expected = grads[names[name]]
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() / expected.norm() < 1e-5, name


def test_a_configuration_comes_back_as_it_was(pair: tuple[Any, nn.Module], tmp_path: Path) -> None:
    import transformers

    theirs, ours = pair
    family = family_for({"model_type": theirs.config.model_type})
    written = json.loads(json.dumps(family.config_of(ours.shape, vocab_size=320, seq_len=64)))
    assert family.shape_of(written) == ours.shape
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(theirs.config)
    for key in THEIRS if type(again).model_type == "nemotron_h" else MAMBA2:
        assert getattr(again, key) == getattr(theirs.config, key), key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers_block_type": ["linear_attention", "moe"]},
            "layers_block_type has 'moe'; supported are linear_att",
        ),
        (
            {"hybrid_override_pattern": "M-M-"},
            "layers_block_type='M-M*' and hybrid_override_pattern='M-M-' contradict each other",
        ),
        (
            {"layer_types": ["mlp", "mlp", "linear_attention", "full_attention"]},
            "layers_block_type='M-M*' and layer_types='--M*' contradict each other",
        ),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3 contradicts the 4 blocks that are named"),
        ({"layer_types": [["mlp"]] * 4}, r"layer_types has \['mlp'\]; supported are"),
        ({"attention_head_dim": 64}, "head_dim=32 and attention_head_dim=64 contradict each other"),
        ({"layers_block_type": None}, "layers_block_type is missing"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M*E"}, "letter 3 is 'E'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported: only 'relu2' is"),
        ({"use_conv_bias": False}, "use_conv_bias=False is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ({"sliding_window": 128}, "sliding_window=128 is not supported"),
        ({"logit_scale": 2.0}, "logit_scale=2.0 is an unknown key of a nemotron_h model"),
        (
            {"rms_norm_eps": 1e-6},
            "rms_norm_eps=1e-06 is not layer_norm_epsilon=None, which the model has",
        ),
        ({"mamba_num_groups": 4}, "mamba_num_groups=4 is not n_groups=2, which the model has"),
    ],
)
def test_what_the_model_here_lacks_is_refused_by_key_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        family_for({"model_type": "nemotron_h"}).shape_of(
            {"model_type": "nemotron_h", **THEIRS, **changes}
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm": False}, "rms_norm=False is not supported"),
        ({"use_bias": True}, "use_bias=True is not supported"),
        (
            {"time_step_limit": (0.0, 0.1)},
            r"time_step_limit=\(0.0, 0.1\) is not supported: it must be a smallest",
        ),
        ({"expand": 3}, "hidden_size=64 × expand=3 is not num_heads=8 × head_dim=16"),
        (
            {"layer_types": ["linear_attention", "mlp"]},
            "layer_types=.* every layer is 'linear_attention'",
        ),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx=\[1\] is an unknown key of a mamba2 model"),
    ],
)
def test_what_mamba_2_lacks_here_is_refused_by_key_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        family_for({"model_type": "mamba2"}).shape_of({"model_type": "mamba2", **MAMBA2, **changes})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    count, config = PUBLISHED[name]
    family = family_for(config)
    shape = family.shape_of(config)
    assert parameters(shape, 1) == count
    with torch.device("meta"):
        assert (
            family.names_of(shape).keys()
            == shape.build(vocab_size=1, seq_len=8).state_dict().keys()
        )


def test_a_tied_head_has_no_form_in_transformers() -> None:
    shape = Hybrid(**SMALL)
    with pytest.raises(ValueError, match=r"model.tied=true has no form in transformers"):
        family_for({"model_type": "nemotron_h"}).config_of(shape, vocab_size=320, seq_len=64)


def test_the_published_12b_has_its_parameters_and_blocks() -> None:
    """arXiv:2508.14444, table 1: 62 layers, of which 6 of attention, 28 of MLP and 28 of
    Mamba-2.
    """
    shape = Hybrid(
        width=5120, pattern="M-M-M-M*-" * 6 + "M-M-M-M-", heads=40, kv_heads=8, head_dim=128, hidden=20480, tied=False,
        scan=ScanShape(heads=128, head_dim=80, state=128, groups=8),
    )  # fmt: skip
    assert [shape.pattern.count(kind) for kind in "*-M"] == [6, 28, 28]
    assert parameters(shape, 131072) == pytest.approx(12.31e9, rel=1e-3)


class TestTheHybrid(FamilyChecks):
    model = staticmethod(model)
    tokens = staticmethod(tokens)


def test_first_weights_are_those_of_mamba_2_and_of_every_way_to_draw_them() -> None:
    built = model()
    mixer = built.blocks[0].mixer
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 5.0))
    steps = F.softplus(mixer.dt_bias)
    assert ((steps > 1e-3) & (steps < 0.1)).all() and len(set(steps.tolist())) == 4
    assert mixer.conv1d.weight.abs().max() < 0.5 and mixer.conv1d.weight.std() > 0.2
    check_drawn(Hybrid(**SMALL), built, LONG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pattern": "MX"},
            r"model.pattern=MX: letter 2 is 'X'; known are M \(Mamba-2\), \* \(attention\), - "
            r"\(MLP\)",
        ),
        ({"pattern": ""}, "model.pattern has 0 blocks"),
        ({"hidden": 0}, "model.hidden=0 must be at least 1"),
        ({"heads": 3}, "model.width=32 is not divisible by model.heads=3"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be finite and above 0"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hybrid(**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 3}, "model.scan.heads=4 is not divisible by model.scan.groups=3"),
        ({"kernel": 1}, "model.scan.kernel=1 must be at least 2"),
        ({"chunk": 0}, "model.scan.chunk=0 must be at least 1"),
        (
            {"chunk": 5000},
            "model.scan.chunk=5000 must be at most 4096: memory grows with its square",
        ),
        ({"least_step": -1.0}, "model.scan.least_step=-1.0 must be finite and not negative"),
    ],
)
def test_impossible_scans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScanShape(**changes)
