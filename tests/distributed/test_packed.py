"""A run of several ranks is exported as that of one: the same bytes."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fp4train.exchange import Measures, export_quantised, verify

pytestmark = pytest.mark.long

Ranks = Any
WIDE = ("model.width=64", "model.hidden=128", "model.kv_heads=2", "train.steps=3")


MOE = (
    "model=moe_tiny",
    "model.width=32",
    "model.layers=2",
    "model.hidden=64",
    "train.steps=3",
    "model.experts.count=4",
    "model.experts.hidden=32",
    "policy=all",
)
"""Two ranks have two of the experts each."""


@pytest.mark.parametrize(
    "options",
    [
        (*WIDE, "recipe.fused_scales=false"),
        (*WIDE, "recipe.fused_scales=true"),
        MOE,
    ],
    ids=["apart", "fused", "experts"],
)
def test_two_ranks_export_the_codes_of_one(
    ranks: Ranks, tmp_path: Path, options: tuple[str, ...]
) -> None:
    ranks.train(1, "one", "train.microbatch=2", *options)
    ranks.train(2, "two", *options)
    for layout in ("modelopt", "compressed-tensors"):
        for name in ("one", "two"):
            export_quantised(
                ranks.run(name), tmp_path / layout / name, layout, measures=Measures(losses=False)
            )
            assert verify(tmp_path / layout / name, ranks.run("one")).equal
        for file in ("model.safetensors", "config.json", "fp4train.json"):
            one, two = (tmp_path / layout / name / file for name in ("one", "two"))
            assert one.read_bytes() == two.read_bytes(), file


def test_what_tensor_parallelism_kept_in_high_precision_has_no_codes(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Two ranks cut 48 features in halves, which are not whole blocks: the journal says so, and the
    folder too.
    """
    ranks.train(
        2,
        "cut",
        "model.kv_heads=2",
        "model.hidden=48",
        "train.steps=3",
        "parallel.tp=2",
        "policy=all",
    )
    export_quantised(ranks.run("cut"), tmp_path / "a", "modelopt", measures=Measures(losses=False))
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert "model.layers.0.self_attn.o_proj.weight_scale_2" in found
    for kept in ("up_proj", "down_proj"):
        assert f"model.layers.0.mlp.{kept}.weight_scale_2" not in found
        assert f"model.layers.0.mlp.{kept}" in (tmp_path / "a" / "hf_quant_config.json").read_text()
