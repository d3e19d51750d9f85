"""train.cuda_graph=block: a run whose blocks are recorded and replayed equals one that queues every kernel, in every
bit. The graphs are emulated (`recorder_on_cpu`), the loop around them is the real one.

What the emulation cannot show, since none of its memory is used twice: that graphs of one pool are replayed in the
order of their recording (torch/cuda/graphs.py, make_graphed_callables: "the safest approach is to capture all passes
in the same order they'll run"). A test of its own checks the order.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Before, Cli, events, losses, steps
from compiled_layers import COMPILER, graphs, needs_graphs, traced_blocks
from recorder_on_cpu import RecorderOnCpu
from torch import nn

from fp4train.errors import UserError
from fp4train.hardware import Device
from fp4train.nn import compile as compiled_layers
from fp4train.nn import convert
from fp4train.precision import FP16, NVFP4, FP8Delayed, LayerPolicy, Timeline
from fp4train.precision.layers import Layer
from fp4train.precision.plan import make_plan
from fp4train.run.block_graph import RecordedBlocks
from fp4train.run.graphs import check_blocks, check_plan
from fp4train.run.record.change import swap_recipe
from fp4train.run.step_graph import WARM_UP

Turn = Callable[[bool | str], list[RecorderOnCpu]]

SMALL = ("model.layers=2", "policy=all", "train.steps=8", "train.microbatch=2", "train.seq_len=16", "phases=none")
PASSES = 2 * 2 * 2
"""Graphs of a step: forward and backward of two blocks in two microbatches."""


def saved(run: str) -> list[bytes]:
    """The last checkpoint's weights and moments."""
    folder = max(Path(run, "checkpoints").glob("step_*"))
    return [(folder / name).read_bytes() for name in ("weights.safetensors", "tensors.safetensors")]


@pytest.mark.parametrize(
    "options",
    [
        ("recipe=nvfp4", "model.recompute=true", "eval.every=3", "eval.errors_every=6", "checkpoint.every=5"),
        ("recipe=bf16", "optim=muon"),
        ("recipe=mxfp8", "train.joint_products=true"),
        ("recipe=fp8_delayed", "checkpoint.every=5", "eval.every=3", "eval.errors_every=6"),
        pytest.param(("recipe=fp16", "train.document_mask=true"), marks=pytest.mark.long),
        pytest.param(("recipe=mxfp8", "model=hybrid_tiny", "train.steps=5"), marks=pytest.mark.long),
    ],
    ids=lambda options: options[0],
)
def test_a_run_of_recorded_blocks_equals_an_eager_one_in_every_bit(
    cli: Cli, recorded: Turn, options: tuple[str, ...]
) -> None:
    """With a learning rate of its own in each step, which is no float32 number, and with any optimizer."""
    of_llama = "model=hybrid_tiny" not in options
    options = (*(each for each in SMALL if of_llama or not each.startswith("model.")), *options)
    for name, wanted in (("eager", False), ("blocks", "block")):
        recorders = recorded(wanted)
        assert cli(f"run.name={name}", *options).code == 0
    assert losses("runs/blocks") == losses("runs/eager")
    assert saved("runs/blocks") == saved("runs/eager")
    (pool,) = recorders
    measured = "eval.errors_every=6" in options
    assert {each.replays for each in pool.others} == {len(losses("runs/eager")) - WARM_UP - measured}


def test_graphs_are_replayed_in_the_order_of_their_recording(
    cli: Cli, recorded: Turn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the memory that one frees is another's."""
    order: list[int] = []
    replay = RecorderOnCpu.replay
    monkeypatch.setattr(RecorderOnCpu, "replay", lambda self: (order.append(id(self)), replay(self))[1])
    recorders = recorded("block")
    assert cli("run.name=a", *SMALL, "recipe=bf16").code == 0
    (pool,) = recorders
    recorded_in = [id(each) for each in pool.others]
    assert len(recorded_in) == PASSES
    assert order == recorded_in * (8 - WARM_UP)


def test_blocks_are_recorded_again_where_the_recipe_changes(cli: Cli, recorded: Turn, before: Before) -> None:
    mxfp8 = {"_target_": "fp4train.precision.MXFP8"}
    for name, wanted in (("eager", False), ("blocks", "block")):
        recorders = recorded(wanted)
        before(5, lambda run: swap_recipe(run, 6, mxfp8, "mxfp8"))
        assert cli(f"run.name={name}", *SMALL, "train.steps=11", "recipe=bf16").code == 0
    assert losses("runs/blocks") == losses("runs/eager")
    assert [line["recipe"] for line in events("runs/blocks", "recipe")] == ["BF16", "MXFP8"]
    assert [len(each.others) for each in recorders] == [PASSES, PASSES]


def test_dropout_in_a_recomputed_model_is_refused(cli: Cli, recorded: Turn, before: Before) -> None:
    def drop(run: Any) -> None:
        run.model.blocks[1].mlp.register_forward_hook(lambda module, x, y: nn.functional.dropout(y, 0.1))

    for wanted in (True, "block"):
        before(0, drop)
        recorded(wanted)
        option = "run.overwrite=true"
        message = cli("run.name=a", *SMALL, option, "recipe=bf16", "model.recompute=true").message
        mode = str(wanted).lower()
        assert message.startswith(f"train.cuda_graph={mode} with model.recompute=true: the model draws random numbers")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_block_that_reads_a_number_on_the_host_is_refused_and_the_beginning_kept(
    cli: Cli, recorded: Turn, before: Before, where: str
) -> None:
    def read(x: torch.Tensor) -> None:
        assert float(x.detach().sum()) < 1e9

    def watch(run: Any) -> None:
        def hook(module: nn.Module, given: Any, y: torch.Tensor) -> None:
            if where == "forward":
                read(y)
            elif y.requires_grad:
                y.register_hook(read)

        run.model.blocks[1].mlp.register_forward_hook(hook)

    before(0, watch)
    recorded("block")
    message = cli("run.name=a", *SMALL, "recipe=bf16", "checkpoint.every=0").message
    assert f"train.cuda_graph=block: step {WARM_UP} cannot be recorded: operation not permitted" in message
    assert "_local_scalar_dense" in message and message.endswith("Go on with train.cuda_graph=false")
    assert steps("runs/a") == [WARM_UP]


def test_a_weight_with_a_gradient_from_outside_of_its_block_is_refused_by_name(
    cli: Cli, recorded: Turn, before: Before
) -> None:
    def use(run: Any) -> None:
        weight = run.model.blocks[0].mlp_norm.weight
        run.model.register_forward_hook(lambda module, given, loss: loss + 0 * weight.sum())

    before(0, use)
    recorded("block")
    message = cli("run.name=a", *SMALL, "recipe=bf16").message
    assert "RMSNorm.weight has a gradient from outside of its block as well" in message


def routed() -> nn.Module:
    """Two blocks of experts that name nothing to be recorded."""
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    convert(model)
    for block in model:
        block[0].layer = replace(block[0].layer, experts=4)
    return model


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": torch.device("cpu")}, "it records the work of a GPU, and the run is on device=cpu"),
        ({"model": nn.Linear(4, 4)}, "the model has no blocks"),
        ({"model": routed()}, "the host reads how many rows each expert has"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_its_reason(changes: dict[str, Any], said: str) -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    run = {"device": torch.device("cuda"), "model": model, **changes}
    with pytest.raises(UserError, match=f"train.cuda_graph=block: {said}.* Or use train.cuda_graph=false"):
        check_blocks(SimpleNamespace(**run))  # type: ignore[arg-type]


def test_a_plan_is_refused_for_what_its_blocks_run_and_for_nothing_else() -> None:
    layers = [Layer(name=f"{i}.up", in_features=32, out_features=32, block=i, blocks=2) for i in range(2)]

    def check(recipe: Any, policy: LayerPolicy | None = None) -> None:
        timeline = Timeline(recipe=recipe, steps=9)
        check_plan(make_plan(layers, timeline, policy, tokens=32, device=Device(type="cpu")), "block")

    check(NVFP4())
    check(FP16())  # whose loss scale meets the gradients outside of the blocks
    check(FP8Delayed())  # whose histories roll outside of them
    experts = replace(layers[0], experts=4)
    plan = make_plan([experts], Timeline(recipe=NVFP4(), steps=9), None, tokens=32, device=Device(type="cpu"))
    check_plan(plan, "block")  # which leaves them to the host


MIXTURE = (
    *("model=moe_tiny", "model.layers=2", "model.width=64", "model.experts.count=4", "model.experts.hidden=32"),
    *("policy=all", "train.steps=5", "train.microbatch=2", "train.seq_len=16", "phases=none"),
)


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("fp8_delayed", marks=pytest.mark.long)])
def test_of_a_mixture_dense_blocks_and_attention_are_recorded_and_experts_left_to_the_host(
    cli: Cli, recorded: Turn, recipe: str
) -> None:
    """Recomputed halves of a block count the tokens of each expert once."""
    for name, wanted in (("eager", False), ("blocks", "block")):
        recorders = recorded(wanted)
        option = f"model.recompute={str(recipe == 'nvfp4').lower()}"
        assert cli(f"run.name={name}", *MIXTURE, f"recipe={recipe}", option).code == 0
    assert losses("runs/blocks") == losses("runs/eager")
    assert saved("runs/blocks") == saved("runs/eager")
    (pool,) = recorders
    assert len(pool.others) == PASSES and {each.replays for each in pool.others} == {5 - WARM_UP}


def test_torch_compile_has_what_the_graphs_record_and_not_the_block_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function: (compiled.append(function), function)[1])
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    config = SimpleNamespace(train=SimpleNamespace(compile=True))
    world = SimpleNamespace(data_mesh=None)
    run = SimpleNamespace(config=config, model=model, world=world, device=torch.device("cpu"))
    blocks = RecordedBlocks(run, RecorderOnCpu).blocks  # type: ignore[arg-type]
    assert [each.inner for each in blocks] == compiled and len(compiled) == 2
    x = torch.ones(2, 4)
    assert torch.equal(model(x), compiled[1](compiled[0](x)))


def of_compiler(test: Any) -> Any:
    """A test with the marks of those whose blocks are compiled."""
    for mark in COMPILER:
        test = mark(test)
    return test


@of_compiler
@pytest.mark.long
@pytest.mark.parametrize(
    "what", [*(pytest.param(each, marks=needs_graphs) for each in ("llama", "moe")), "layers outside of the graphs"]
)
def test_recorded_passes_of_compiled_blocks_equal_an_eager_run_in_every_bit(
    cli: Cli, recorded: Turn, before: Before, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What the compiler made in the first step is recorded, and replayed without it. Llama's blocks are recomputed,
    evaluated in between, also without the compiler, and get a recipe in which layers have another route: two graphs of
    training and three of evaluation."""
    swapped = what == "llama"
    options, compiled = (
        (*(MIXTURE if what == "moe" else SMALL), "recipe=nvfp4", "train.steps=5", "eval.every=0"),
        list[Any](),
    )
    if swapped:
        options = (*options, "model.recompute=true", "train.steps=10", "eval.every=4", "eval.errors_every=7")
    if what == "layers outside of the graphs":
        monkeypatch.setattr(compiled_layers, "OPERATOR", None)
    other = {"_target_": "fp4train.precision.MXFP8", "high_precision": ["wgrad"]}
    for name, wanted in (("eager", False), ("blocks", "block")):
        recorders = recorded(wanted)
        if swapped:
            before(4, lambda run: swap_recipe(run, 5, other, "mxfp8"))
        for at in (1, 9 if swapped else 3):
            before(at, lambda run: compiled.append((graphs(), len(calls))))
        with traced_blocks() as calls:
            out = cli(f"run.name={name}", *options, f"train.compile={str(wanted == 'block').lower()}")
        assert out.code == 0, out.err
    assert losses("runs/blocks") == losses("runs/eager")
    assert saved("runs/blocks") == saved("runs/eager")
    assert [len(pool.others) for pool in recorders] == [PASSES] * (1 + swapped)
    assert {each.replays for pool in recorders for each in pool.others} == {2}
    (of_one_step, called), (of_all, _) = compiled[2:]
    assert of_all == (5 if swapped else of_one_step)
    assert calls.count(True) == (4 if what == "moe" else called * len(recorders))


@of_compiler
def test_no_graph_is_compiled_while_a_block_is_recorded(cli: Cli, recorded: Turn, before: Before) -> None:
    before(WARM_UP, lambda run: torch._dynamo.reset())
    recorded("block")
    with traced_blocks():
        message = cli("run.name=a", *SMALL, "recipe=nvfp4", "train.compile=true").message
    assert f"train.cuda_graph=block: step {WARM_UP} cannot be recorded: Detected recompile" in message
    assert steps("runs/a") == [WARM_UP]
