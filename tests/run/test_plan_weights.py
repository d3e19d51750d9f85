"""The plan accounts for every parameter of a model: those that its GEMMs multiply, and the others
with the reason.
"""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from command_line import Cli
from configured import config_of
from lengths import long_but
from torch import nn

import fp4train as f4
from fp4train.nn import WeightGroup, weight_groups
from fp4train.precision import find_layers
from fp4train.run.build import build_model

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs/model").glob("*.yaml"))
SHORT = ("hybrid_12b", *(name for name in MODELS if name.endswith("_tiny")))
ROWS = 512


def planned(name: str) -> nn.Module:
    config = config_of(f"model={name}", "train.seq_len=64")
    return build_model(config, ROWS, torch.device("meta"))


@pytest.mark.parametrize("name", long_but(SHORT, MODELS))
def test_the_groups_of_a_model_hold_each_of_its_parameters_once(name: str) -> None:
    model = planned(name)
    groups = weight_groups(model)
    layers = find_layers(model).values()
    assert sum(each.parameters for each in groups) == sum(p.numel() for p in model.parameters())
    assert sum(each.tensors for each in groups) == len(list(model.parameters()))
    # The GEMMs of a plan are those of these layers.
    multiplied = Counter[str]()
    for layer in layers:
        multiplied[
            "outside" if layer.block is None else "experts" if layer.experts else "linear"
        ] += layer.weights
    found = {
        each.kind.split()[0] if "outside" not in each.kind else "outside": each
        for each in groups
        if not each.why
    }
    assert {kind: each.parameters for kind, each in found.items()} == multiplied
    # What they leave belongs to modules of the class that its group names.
    for each in groups:
        if each.why and not each.kind.startswith("biases"):
            kind, key = each.kind.split(".")
            own = [
                getattr(m, key)
                for m in model.modules()
                if type(m).__name__ == kind and hasattr(m, key)
            ]
            assert sum(p.numel() for p in own if p is not None) == each.parameters


def test_weights_that_could_be_multiplied_are_no_norms_and_experts_count_by_those_that_a_token_meets() -> (
    None
):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.empty(8, 4))
            self.experts = f4.nn.Experts(6, 4, 8, bias=True, per_token=3)
            self.head = nn.Linear(4, 16)

    found = {each.kind: each for each in weight_groups(f4.convert(Own()))}
    assert found["Own.matrix"].why == "Own is not an nn.Linear"
    assert found["experts of the blocks"] == WeightGroup(
        "experts of the blocks", 1, 6 * 4 * 8, 3 * 4 * 8, None
    )
    biases = found["biases, experts of the blocks"]
    assert (biases.parameters, biases.active, biases.why) == (6 * 8, 3 * 8, "added to products")


@pytest.mark.long
def test_the_command_lists_the_groups_as_text_and_as_data(cli: Cli) -> None:
    words = ("plan", "model=moe_tiny", "recipe=nvfp4")
    groups = [WeightGroup(**each) for each in json.loads(cli(*words, "--json").out)["weights"]]
    shown = cli(*words).out
    table = shown[shown.index("parameters ") :].partition("\n\n")[0].splitlines()
    assert "head, tied to embed" in shown and len(table) == len(groups) + 3
    counts = [
        tuple(
            sum(getattr(each, key) for each in groups)
            for key in ("tensors", "parameters", "active")
        )
    ]
    assert table[-1].split() == ["together", *(f"{count:,}" for count in counts[0])]
    assert counts[0][1] > 3 * counts[0][2]
    mesh = json.loads(cli(*words, "--json", "gpu=H100", "gpus=2").out)
    assert [WeightGroup(**each) for each in mesh["weights"]] == groups
    first = mesh["stretches"][0]
    assert (first["parameters"], first["active_parameters"]) == counts[0][1:]
    assert math.isclose(first["parameters"], 3.63e6, rel_tol=0.01)
