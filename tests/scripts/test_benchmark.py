"""benchmarks/NAME.md is the table of NAME.json, and pages that name its figures have them from there."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from configured import shape_of

from fp4train.nn import PlannedLayer
from fp4train.precision import BF16

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "epyc_2_cores.json"
OVER_BF16 = "an NVFP4 step over a BF16 step"
FIGURES = {
    "README.md": {
        f"default run: {OVER_BF16}": "| one training step of the default run (1.2 M "
        "parameters) | {:.2f}× |",
        f"llama_125m, 2048 tokens: {OVER_BF16}": "| one training step of `llama_125m`, 2048 "
        "tokens | {:.2f}× |",
        "NVFP4 linear forward + backward, 2048 tokens, 2048→2048, over BF16 nn.Linear": (
            "| one linear layer, 2048 tokens, 2048→2048, forward and backward | {:.2f}× |"
        ),
    },
    "docs/hybrid.md": {
        f"hybrid of width 768, 2048 tokens: {OVER_BF16}": "width 768 with 2048 tokens in emulated "
        "NVFP4 takes {:.2f} times one in BF16",
    },
    "docs/moe.md": {
        f"moe_tiny: {OVER_BF16}": "A step of `moe_tiny` in emulated NVFP4 takes {:.2f} times one "
        "in BF16"
    },
}
"""Row of the measurement → what a page says of it."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "benchmark_report", ROOT / "scripts" / "benchmark_report.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # where dataclasses look for the names of types
    monkeypatch.setitem(sys.modules, "benchmark_report", module)
    spec.loader.exec_module(module)
    return module


def test_the_bare_loop_of_a_mixture_multiplies_layers_of_torch_alone(script: ModuleType) -> None:
    """With the weights of the experts, and in float32 their loss, in every bit."""
    steps = importlib.import_module("benchmark_steps")
    sizes = ("model.width=32", "model.layers=2", "model.experts.count=4", "model.experts.hidden=16")
    shape = shape_of("moe_tiny", *sizes)
    model = shape.build(vocab_size=60, seq_len=16)
    tokens = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = model(tokens, tokens)
    expected.backward()
    gradient = model.embed.weight.grad
    model.embed.weight.grad = None
    bare = steps.with_torchs_experts(model)
    assert not [name for name, each in bare.named_modules() if isinstance(each, PlannedLayer)]
    loss = bare(tokens, tokens)
    loss.backward()
    assert torch.equal(loss, expected) and torch.equal(bare.embed.weight.grad, gradient)


def test_the_bare_loop_goes_on_with_the_state_of_the_run_and_balances_its_experts(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run does: a bare loop whose routing collapses multiplies for a few experts alone."""
    steps = importlib.import_module("benchmark_steps")
    made = list[Any]()
    convert = steps.with_torchs_experts
    monkeypatch.setattr(
        steps, "with_torchs_experts", lambda model: made.append(convert(model)) or made[-1]
    )
    sizes = ("model.width=32", "model.layers=2", "model.experts.count=4", "model.experts.hidden=16")
    small = ["model=moe_tiny", *sizes, "train.batch_size=2", "train.seq_len=32", "backend=emulate"]
    with steps.built_run(torch.device("cpu"), small) as (run, step):
        for _ in range(3):
            step(BF16())
        bare = steps.bare_loop(run, torch.device("cpu"))
        (model,), state = made, run.model.state_dict()
        router = model.blocks[1].mlp.router
        experts = model.blocks[1].mlp.gate_up
        before = router.bias.clone()
        assert before.any() and torch.equal(before, state["blocks.1.mlp.router.bias"])
        assert torch.equal(model.embed.weight, state["embed.weight"])
        for layer, weight in zip(experts.layers, state["blocks.1.mlp.gate_up.weight"], strict=True):
            assert torch.equal(layer.weight, weight)
        bare()
        moved = (router.bias - before).abs()
        assert moved.any() and torch.all(
            (moved < 1e-6) | ((moved - router.balance.speed).abs() < 1e-6)
        )
        assert not model.fp4train_routers().seen(torch.device("cpu")).any(), (
            "the load of a step counts once"
        )
        assert torch.equal(state["blocks.1.mlp.router.bias"], before), (
            "the run has biases of its own"
        )


def rows() -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(MEASURED.read_text())["rows"]}


def test_the_table_is_that_of_the_figures(script: ModuleType) -> None:
    found = json.loads(MEASURED.read_text())
    report = script.Report(rows=found["rows"])
    assert MEASURED.with_suffix(".md").read_text(encoding="utf-8") == report.markdown(
        found["machine"]
    )


@pytest.mark.parametrize(
    ("page", "row"), [(page, row) for page, said in FIGURES.items() for row in said]
)
def test_a_page_says_what_was_measured(page: str, row: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert FIGURES[page][row].format(rows()[row]["value"]) in text


def test_a_part_that_is_measured_again_leaves_the_others(
    script: ModuleType, tmp_path: Path
) -> None:
    machine = {"machine": "a"}
    first = script.Report(out=tmp_path / "a")
    first.add("one", [1.0, 3.0, 2.0], 1.0)
    first.add("two", 2.0)
    first.write(machine)
    again = script.Report(out=tmp_path / "a")
    again.go_on(machine)
    again.add("one", 0.5, 1.0)
    again.add("three", 3.0)
    found = {row["what"]: (row["value"], row["met"]) for row in again.rows}
    assert list(found.items()) == [
        ("one", (0.5, True)),
        ("two", (2.0, None)),
        ("three", (3.0, None)),
    ]
    with pytest.raises(ValueError, match="is of machine b, and this is a"):
        first.write({"machine": "b"})
        again.go_on(machine)
