"""train.cuda_graph: a run whose steps are recorded and replayed has the losses of one that queues
every kernel.

The graph is emulated (`recorder_on_cpu`), the loop around it is the real one.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from command_line import Before, Cli, StopAt, events, losses, steps
from configured import config_of
from recorder_on_cpu import RecorderOnCpu
from torch import nn

from fp4train.config import bind
from fp4train.errors import UserError
from fp4train.hardware import Device
from fp4train.precision import BF16, NVFP4, Layer, Recipe, Timeline, make_plan
from fp4train.run.record.change import swap_recipe
from fp4train.run.step_graph import WARM_UP, check_graph, check_plan, never_replayed

EXACT = (
    "optim.lr=0.0078125",
    "schedule=wsd",
    "schedule.warmup=4",
    "schedule.cooldown=3",
    "schedule.decay=linear",
)
"""Learning rates that are float32 numbers, as a recorded step reads them: those of eager steps are
doubles.
"""
SMALL = (
    "model.layers=1",
    "policy=all",
    "train.steps=8",
    "train.microbatch=2",
    "train.seq_len=16",
    *EXACT,
)

RECIPES = Path(__file__).parents[2] / "recipes"

Recorders = list[RecorderOnCpu]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "moments", "recompute"),
    [("nvfp4", "float32", True), ("bf16", "bfloat16", False), ("fp8_current", "float32", False)],
)
def test_a_recorded_run_equals_an_eager_one_in_every_bit(
    cli: Cli, recorded: Callable[[bool], Recorders], recipe: str, moments: str, recompute: bool
) -> None:
    options = (
        *SMALL,
        f"recipe={recipe}",
        f"model.recompute={str(recompute).lower()}",
        f"optim.moments={moments}",
        "phases=none",
        "eval.every=3",
        "eval.errors_every=6",
        "checkpoint.every=4",
    )
    recorded(False)
    assert cli("run.name=eager", *options).code == 0
    recorders = recorded(True)
    assert cli("run.name=graph", *options).code == 0
    assert losses("runs/graph") == losses("runs/eager")
    assert len(recorders) == 1
    # Step 6 is measured, with hooks on what the model computes: no graph has it.
    assert recorders[0].replays == 8 - WARM_UP - 1


def test_a_graph_is_dropped_where_the_recipe_changes_and_recorded_again(
    cli: Cli, recorded: Callable[[bool], Recorders], before: Before
) -> None:
    mxfp8 = {"_target_": "fp4train.precision.MXFP8"}
    for name, on in (("eager", False), ("graph", True)):
        recorders = recorded(on)
        before(4, lambda run: swap_recipe(run, 6, mxfp8, "mxfp8"))
        options = (*SMALL, "recipe=bf16", "phases=none", "train.steps=12")
        assert cli(f"run.name={name}", *options).code == 0
    assert losses("runs/graph") == losses("runs/eager")
    assert [line["recipe"] for line in events("runs/graph", "recipe")] == ["BF16", "MXFP8"]
    assert [each.replays for each in recorders] == [6 - WARM_UP, 6 - WARM_UP]


@pytest.mark.long
def test_a_recorded_run_goes_on_from_its_checkpoint_as_if_it_had_never_ended(
    cli: Cli, recorded: Callable[[bool], Recorders], stop_at: StopAt
) -> None:
    options = (*SMALL, "recipe=fp8_delayed", "phases=none", "checkpoint.every=5", "eval.every=0")
    recorded(False)
    assert cli("run.name=eager", *options).code == 0
    recorders = recorded(True)
    stop_at(7)
    assert cli("run.name=graph", *options).code == 137
    assert recorders[0].replays == 7 - WARM_UP
    stop_at(-1)
    assert cli("resume=runs/graph").code == 0
    assert losses("runs/graph") == losses("runs/eager")
    saved = [Path(f"runs/{name}/checkpoints/step_00000008") for name in ("eager", "graph")]
    for file in ("weights.safetensors", "tensors.safetensors"):
        assert len({(path / file).read_bytes() for path in saved}) == 1, file
    assert (
        len(
            {
                str(json.loads((path / "state.json").read_text())["state"]["optimizer"])
                for path in saved
            }
        )
        == 1
    )


@pytest.mark.long
def test_a_replayed_step_that_fails_changes_nothing_and_is_blamed_as_an_eager_one(
    cli: Cli, recorded: Callable[[bool], Recorders], before: Before
) -> None:
    def spoil(run: Any) -> None:
        with torch.no_grad():
            run.model.get_submodule("head").weight.fill_(3e38)

    messages = []
    kept = []
    for on in (False, True):
        recorders = recorded(on)
        before(5, spoil)
        options = (*SMALL, "recipe=fp8_delayed", "phases=none", "checkpoint.every=0")
        messages.append(cli("run.name=a", "run.overwrite=true", *options).message)
        saved = Path("runs/a/checkpoints/step_00000005")
        kept.append(
            [(saved / file).read_bytes() for file in ("weights.safetensors", "tensors.safetensors")]
        )
    assert messages[0] == messages[1] and "step 5: gradient norm is nan" in messages[0]
    assert kept[0] == kept[1], "weights, moments and amax histories of before the step"
    assert recorders[0].replays == 7 - WARM_UP, (
        "the step that failed, and the one that was queued after it"
    )


def test_a_step_that_reads_a_number_on_the_host_is_refused_and_its_beginning_kept(
    cli: Cli, recorded: Callable[[bool], Recorders], before: Before
) -> None:
    def read(model: nn.Module, _: Any) -> None:
        assert float(next(model.parameters()).detach().sum()) < 1e9

    before(0, lambda run: run.model.register_forward_pre_hook(read))
    recorded(True)
    message = cli("run.name=a", *SMALL, "recipe=bf16", "phases=none", "checkpoint.every=0").message
    assert "train.cuda_graph=true: step 3 cannot be recorded: operation not permitted" in message
    assert "_local_scalar_dense" in message and "train.cuda_graph=false" in message
    assert steps("runs/a") == [3]


def test_on_a_cpu_it_is_refused_before_the_run_begins(cli: Cli) -> None:
    message = cli("run.name=a", "train.cuda_graph=true").message
    assert message.startswith(
        "train.cuda_graph=true: it records the work of a GPU, and the run is on device=cpu"
    )
    assert not Path("runs/a/config.yaml").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world": SimpleNamespace(size=2)}, "steps of 2 ranks"),
        ({"teacher": nn.Identity()}, "a teacher runs beside the model"),
        ({"scored": [1]}, "divided by the answers of each batch"),
        ({"compile": True}, "train.compile=true"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "decides on the host"),
        ({"optimizer": torch.optim.AdamW([nn.Parameter(torch.ones(1))])}, "decides on the host"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_its_reason(
    changes: dict[str, Any], said: str
) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    run = SimpleNamespace(
        device=torch.device("cuda"),
        world=changes.get("world", SimpleNamespace(size=1)),
        optimizer=changes.get("optimizer", optimizer),
        teacher=changes.get("teacher"),
        data=SimpleNamespace(training=SimpleNamespace(all_scored=changes.get("scored") is None)),
        config=SimpleNamespace(
            train=SimpleNamespace(compile=changes.get("compile", False)),
            optim=None,
        ),
    )
    with pytest.raises(UserError, match=said):
        check_graph(run)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "backend", "said"),
    [
        ("fp16", "emulate", "recipe FP16: the host sets its loss scale"),
        ("quartet_ii", "emulate", "operand dy of dgrad: hadamard.signs='step'"),
        ("fp8_delayed", "te", "operand x of fprop: delayed scaling on backend=te"),
        ("fp8_delayed", "emulate", None),
        ("nvfp4", "te", None),
        ("nvfp4", "emulate", None),
    ],
)
def test_a_recipe_that_depends_on_the_host_is_refused_by_name(
    recipe: str, backend: str, said: str | None
) -> None:
    found = bind(yaml.safe_load(Path(RECIPES, f"{recipe}.yaml").read_text()), Recipe, "recipe")
    assert isinstance(found, Recipe)
    layer = Layer(name="mlp.up", in_features=32, out_features=32, block=0, blocks=1)
    plan = make_plan(
        [layer],
        Timeline(recipe=found, steps=9),
        None,
        tokens=32,
        device=Device(type="cpu"),
        backend="emulate",
    )
    stretch = plan.stretches[0]
    planned = plan.stretches[0].layers["mlp.up"]
    gemms = {gemm.name: replace(gemm, backend=backend) for gemm in planned.gemms}
    plan = replace(
        plan, stretches=(replace(stretch, layers={"mlp.up": replace(planned, **gemms)}),)
    )
    if said is None:
        check_plan(plan)
        return
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        check_plan(plan)
    assert "mlp.up" in str(raised.value) or recipe == "fp16"


@pytest.mark.parametrize("recipe", [NVFP4(), BF16()], ids=lambda recipe: recipe.name)
def test_experts_are_refused_whatever_the_recipe(recipe: Recipe) -> None:
    layer = Layer(name="mlp.up", in_features=32, out_features=32, block=0, blocks=1, experts=4)
    plan = make_plan(
        [layer], Timeline(recipe=recipe, steps=9), None, tokens=32, device=Device(type="cpu")
    )
    said = (
        r"how many rows each of its 4 experts has\. Use train\.cuda_graph=false, or another recipe"
    )
    with pytest.raises(ValueError, match=said):
        check_plan(plan)


def test_a_swap_to_a_recipe_that_cannot_be_recorded_is_refused(
    cli: Cli, recorded: Callable[[bool], Recorders], before: Before
) -> None:
    refused = []

    def ask(run: Any) -> None:
        run.config = replace(run.config, train=replace(run.config.train, cuda_graph=True))
        with pytest.raises(UserError) as raised:
            swap_recipe(run, 3, {"_target_": "fp4train.precision.QuartetII"}, "quartet_ii")
        refused.append(str(raised.value))

    before(1, ask)
    recorded(False)
    assert cli("run.name=a", "recipe=bf16", "train.steps=4", "phases=none", *SMALL[:2]).code == 0
    assert "train.cuda_graph=true cannot record" in refused[0] and "QuartetII" in refused[0]


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("fp8_delayed", marks=pytest.mark.long)])
def test_a_recorded_run_has_the_same_bits_with_audits_which_see_its_steps(
    cli: Cli, recorded: Callable[[bool], Recorders], recipe: str
) -> None:
    options = (*SMALL[:-5], "train.steps=12", f"recipe={recipe}", "phases=none", "eval.every=0")
    silent = ("audit.every=0", "audit.sums=0")
    recorded(True)
    assert cli("run.name=silent", *options, *silent).code == 0
    recorders = recorded(True)
    audits = ("audit.every=5", "audit.sums=1")
    assert cli("run.name=audited", *options, *audits).code == 0
    assert losses("runs/audited") == losses("runs/silent")
    assert len(events("runs/audited", "audit")) == 3
    assert events("runs/audited", "audit fault") == []
    assert events("runs/audited", "audit failed") == []
    assert recorders[0].replays > 0


def test_a_run_whose_audits_let_no_step_be_replayed_is_warned(
    cli: Cli, recorded: Callable[[bool], Recorders]
) -> None:
    recorders = recorded(True)
    options = (*SMALL, "recipe=bf16", "phases=none", "eval.every=0")
    assert cli("run.name=a", *options, "audit.every=2").code == 0
    assert not any(recorder.replays for recorder in recorders)
    for every, warns in ((2, True), (5, False)):
        config = config_of(*options, f"audit.every={every}", "train.cuda_graph=true")
        assert (never_replayed(config, "cuda") is not None) is warns
