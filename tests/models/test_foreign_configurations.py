"""Any value of any key of a `config.json`: a model that can be built, or one line, in bounded time
and memory.
"""

import json
import time
from typing import Any

import pytest
from families import MODEL_TYPES
from hf_folders import CONFIGURATIONS
from lengths import long_but
from memory import most_memory

from fp4train.errors import UserError
from fp4train.models.families import family_for
from fp4train.models.weightless import build_weightless

VALUES: tuple[Any, ...] = (
    *(2**62, 10**9, 10**400, -1, 0, 1.5, 1e308, float("nan"), float("inf")),
    *(True, "4", "x" * 10**6, [], [1], [[1]], {}, {"a": []}, [None] * 1000),
)
SECONDS = 10.0
BYTES = 64 * 10**6
MORE = {
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "mlp_only_layers",
    "model_type",
    "architectures",
    "auto_map",
    "quantization_config",
    "first_k_dense_replace",
    "norm_topk_prob",
    "hybrid_override_pattern",
    "layers_block_type",
    "time_step_limit",
    "tie_word_embeddings",
    "rms_norm_eps",
}


def test_every_kind_of_folder_that_a_family_reads_is_tried() -> None:
    assert sorted(CONFIGURATIONS) == MODEL_TYPES


@pytest.mark.parametrize("kind", long_but(("llama", "mixtral"), CONFIGURATIONS))
def test_each_value_of_each_key_is_a_model_or_one_line(kind: str) -> None:
    config = {"model_type": kind, **CONFIGURATIONS[kind]}
    family = family_for(config)
    assert build_weightless(family.shape_of(config), vocab_size=1, seq_len=1) is not None
    refused = []

    def build_all() -> None:
        for key in sorted(config.keys() | MORE):
            for value in VALUES:
                began = time.process_time()
                changed = config | {key: value}
                try:
                    build_weightless(family_for(changed).shape_of(changed), vocab_size=1, seq_len=1)
                except (ValueError, UserError) as error:
                    refused.append(key)
                    assert len(str(error)) < 500, f"{key}: {len(str(error))} characters"
                seconds = time.process_time() - began
                assert seconds < SECONDS, f"{key}={json.dumps(value)[:40]} took {seconds:.1f} s"

    assert most_memory(build_all) < BYTES
    assert len(refused) > 100


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta=10000.0 and rope_param",
        ),
        (
            "llama",
            {
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling=.* and rope_parameters=.* contradict each other",
        ),
        (
            "qwen3_moe",
            {"num_local_experts": 8},
            "num_experts=6 and num_local_experts=8 contradict each other",
        ),
        ("dots1", {"num_experts": 8}, "n_routed_experts=6 and num_experts=8 contradict each other"),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported: only 1 is",
        ),
        ("glm4_moe", {"n_group": 2}, "n_group=2 is not supported"),
        ("glm4_moe", {"sliding_window": 64}, "sliding_window=64 is no key of GLM-4-MoE"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [[0]]},
            "mlp_only_layers=.* only the first blocks may have no experts",
        ),
        (
            "mixtral",
            {"num_hidden_layers": 1000, "num_local_experts": 8000},
            "are more than 262,144 experts",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_and_both_named(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    config = {"model_type": kind, **CONFIGURATIONS[kind], **changes}
    with pytest.raises(ValueError, match=message):
        family_for(config).shape_of(config)


def test_glm_without_a_word_about_its_rotations_rotates_half_of_each_head_and_is_refused() -> None:
    config = {"model_type": "glm4_moe", **CONFIGURATIONS["glm4_moe"]}
    del config["partial_rotary_factor"]
    with pytest.raises(ValueError, match=r"partial_rotary_factor is missing, which means 0\.5"):
        family_for(config).shape_of(config)
