"""Studies of other families than Llama: experts, whose layers have several weights, and bases of
DNA.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from finished_runs import FinishedRuns
from subjects import subject_of

from fp4train.lab.studies import GradientMeter, RecipeParts
from fp4train.precision import MXFP8

MOE = (
    "model=moe_tiny",
    "model.width=32",
    "model.layers=2",
    "model.hidden=64",
    "model.experts.count=4",
    "model.experts.hidden=32",
    "model.balance.loss=0.01",
    "model.balance.speed=0.05",
)
HYENA = (
    "model=hyena_tiny",
    "model.width=32",
    "model.pattern=SDH",
    "model.hidden=64",
    "model.filters.groups=8",
    "model.filters.poles=4",
    "model.vocab_size=320",
    "data=dna",
)
QUICK = ("steps=2", "forks=1", "batches=1", "policy.last=0")


@pytest.fixture
def experts(finished: FinishedRuns) -> Path:
    return finished(*MOE, "train.steps=2")


def result(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def losses(folder: str) -> dict[str, float]:
    """The loss of each candidate of a ranking, in its recipe."""
    return {
        each["name"]: each["forks"][0]["recipe"]
        for each in result(f"{folder}/rank.json")["candidates"]
    }


@pytest.mark.usefixtures("sketched")
@pytest.mark.long
def test_policies_for_experts_are_ranked_and_no_fork_leaves_a_bias_to_the_next(
    cli: Cli, experts: Path
) -> None:
    Path("experts.yaml").write_text(
        '_target_: fp4train.precision.LayerPolicy\nlast: 0\nkeep: ["class:*Attention", '
        '"class:SwiGLU"]\n'
    )
    command = ("rank", str(experts), *QUICK)
    said = cli.raw(
        *command, "recipe=bf16,nvfp4", "policy=all,mxfp8_attention,experts.yaml", "out=a"
    )
    assert said.code == 0, said.err
    assert "bf16 policy=all stands for bf16 policy=mxfp8_attention, bf16 policy=experts" in said.out
    found = losses("a")
    names = [
        "bf16 policy=all",
        *(f"nvfp4 policy={name}" for name in ("all", "mxfp8_attention", "experts")),
        "FP32",
    ]
    assert set(found) == set(names) and len(set(found.values())) == 5
    # in another order each fork follows another one
    assert cli.raw(*command, "recipe=nvfp4,bf16", "policy=experts.yaml,all", "out=b").code == 0
    other = losses("b")
    assert {name: other[name] for name in (names[1], names[3])} == {
        name: found[name] for name in (names[1], names[3])
    }


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_the_cost_of_keeping_experts_is_that_of_the_ones_a_token_is_routed_to(
    cli: Cli, experts: Path
) -> None:
    said = cli.raw(
        "sensitivity", str(experts), "recipe=mxfp8", "batches=1", "repeats=1", "keep=1.0", "out=a"
    )
    assert said.code == 0, said.err
    found = result("a/sensitivity.json")
    assert (
        found["parts"]["layer/blocks.1.mlp.gate_up"]["nmse"]["mean"]
        > found["parts"]["nothing"]["nmse"]["mean"]
    )
    shares: dict[str, float] = {}
    for point in found["pareto"]:
        (new,) = {each["layer"] for each in point["kept"]} - set(shares) or {None}
        if new is not None:
            shares[new] = point["macs"] - sum(shares.values())
    # two of four experts, gate and up in one
    assert shares["blocks.1.mlp.gate_up"] == pytest.approx(
        2 * 2 * shares["blocks.1.mlp.shared.gate"]
    )
    assert sum(shares.values()) <= 1 + 1e-9


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_the_loss_of_balance_weighs_the_same_whatever_the_loss_scale_of_the_run(
    experts: Path,
) -> None:
    norms = []
    for scale in (1.0, 1024.0):
        subject = subject_of(experts)
        subject.run.loss_scale = replace(subject.run.loss_scale, value=scale)
        parts = RecipeParts(subject, MXFP8(), repeats=1)
        gradients = GradientMeter(subject, parts.reference, list(parts.layers))
        norms.append(gradients.of_reference(range(1))["norm"])
        gradients.end()
        assert subject.run.loss_scale.value == scale
    assert norms[0] == norms[1]


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_recipes_are_ranked_on_dna(cli: Cli) -> None:
    draw = random.Random(0)
    bases = "".join(draw.choice("ACGT") for _ in range(8000))
    Path("a.fa").write_text(f">one\n{bases[:5000]}\n>two\n{bases[5000:]}\n")
    assert cli(*HYENA, "data.path=a.fa", "run.name=a", "train.steps=2").code == 0
    said = cli.raw("rank", "runs/a", *QUICK, "policy=all", "recipe=bf16,nvfp4", "out=a")
    assert said.code == 0, said.err
    found = losses("a")
    assert set(found) == {"bf16", "nvfp4", "FP32"} and found["nvfp4"] != found["bf16"]
    assert "gap to bf16, nats per token" in said.out
