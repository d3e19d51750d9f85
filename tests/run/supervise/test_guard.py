"""A number that is not finite stops the run, names the layer, and leaves a checkpoint from before
it.
"""

from pathlib import Path
from typing import Any

import torch
from command_line import Before, Cli, events, losses, marked

from fp4train import checkpoint

STEADY = ("phases=none", "schedule=constant")


def bad_output(name: str) -> Any:
    """Make one layer's output infinite from now on."""

    def act(run: Any) -> None:
        run.model.get_submodule(name).register_forward_hook(
            lambda module, args, output: output * torch.inf
        )

    return act


def bad_gradient(name: str) -> Any:
    """Make the gradient of one weight NaN."""

    def act(run: Any) -> None:
        weight = run.model.get_parameter(name)
        handle = weight.register_hook(lambda grad: (handle.remove(), grad * torch.nan)[1])

    return act


def test_an_infinite_output_names_its_layer_and_the_run_can_go_on(cli: Cli, before: Before) -> None:
    cli.trained("run.name=whole", *STEADY)
    before(3, bad_output("blocks.1.mlp.up"))
    ended = cli("run.name=a", "checkpoint.every=0", *STEADY)
    assert ended.code == 1
    assert (
        "step 3: loss is nan in NVFP4; first non-finite: output of blocks.1.mlp.up. A checkpoint"
        in ended.message
    )
    assert "resume=runs/a recipe=… optim.lr=…" in ended.message
    assert "blocks.1.mlp.up" in events("runs/a", "non-finite")[0]["message"]
    assert checkpoint.steps(Path("runs/a/checkpoints")) == [3]
    assert marked("runs/a")[3].startswith("the next step failed: step 3: loss is nan")
    resumed = cli("resume=runs/a")
    assert resumed.code == 0 and "is doubtful: the next step failed" in resumed.err
    assert losses("runs/a") == losses("runs/whole")


def test_a_bad_gradient_names_its_weight_although_the_norm_of_all_is_bad(
    cli: Cli, before: Before
) -> None:
    before(2, bad_gradient("blocks.0.attention.wv.weight"))
    said = cli("run.name=a", *STEADY).message
    assert (
        "step 2: gradient norm is nan in NVFP4; first non-finite: gradient of "
        "blocks.0.attention.wv.weight" in said
    )
    assert cli("resume=runs/a", "recipe=bf16").code == 0


def test_delayed_scales_forget_the_step_that_failed(cli: Cli, before: Before) -> None:
    options = ("recipe=fp8_delayed", "policy=all", *STEADY)
    assert cli("run.name=whole", *options).code == 0
    before(3, bad_output("blocks.0.attention.wo"))
    assert cli("run.name=a", *options).code == 1
    assert cli("resume=runs/a").code == 0
    assert losses("runs/a") == losses("runs/whole")


def test_weights_that_are_not_finite_replace_no_good_checkpoint(cli: Cli, before: Before) -> None:
    def act(run: Any) -> None:
        with torch.no_grad():
            run.model.get_parameter("blocks.0.mlp.down.weight")[0, 0] = torch.nan

    before(3, act)
    ended = cli("run.name=a", "checkpoint.every=2", "checkpoint.keep=1", *STEADY)
    assert ended.code == 1 and "first non-finite: weight blocks.0.mlp.down.weight" in ended.message
    assert "The weights are not finite themselves" in ended.message
    assert checkpoint.steps(Path("runs/a/checkpoints")) == [2]
    assert cli("resume=runs/a").code == 0


def test_a_learning_rate_that_is_far_too_high_ends_with_an_explanation(cli: Cli) -> None:
    ended = cli("run.name=a", "optim.lr=1e38", *STEADY)
    assert ended.code == 1 and "first non-finite" in ended.message and "lower rate" in ended.message
    assert "there is no checkpoint" in ended.message and "resume=" not in ended.message
    advised = ended.message.partition("lower rate: ")[2].split()
    assert advised == ["run.overwrite=true", "recipe=…", "optim.lr=…"]
    assert cli("run.name=a", "optim.lr=1e-3", "train.steps=1", advised[0], *STEADY).code == 0


def test_a_gradient_that_no_loss_scale_mends_stops_the_run(cli: Cli, before: Before) -> None:
    def act(run: Any) -> None:
        run.model.get_parameter("blocks.0.mlp.up.weight").register_hook(
            lambda grad: grad * torch.nan
        )

    before(1, act)
    scaling = ("recipe.scaling.initial=1", "recipe.scaling.backoff=0.0001")
    said = cli("run.name=a", "recipe=fp16", *scaling, *STEADY).message
    assert "step 3: gradient norm is nan" in said and "gradient of blocks.0.mlp.up.weight" in said


def test_fp16_skips_overflowing_steps_and_lowers_its_loss_scale(cli: Cli) -> None:
    scaling = (
        "recipe.scaling.initial=1e9",
        "recipe.scaling.interval=2",
        "recipe.scaling.backoff=0.001",
    )
    assert cli("run.name=a", "recipe=fp16", *scaling, *STEADY).code == 0
    found = losses("runs/a")
    scales = [values[3] for values in found.values()]
    norms = [values[1] for values in found.values()]
    assert scales[0] == 1e9 and norms[0] in (None, float("inf")), (
        "the first step overflows and is skipped"
    )
    assert scales[1] == 1e6 and scales[-1] < 1e9
    assert found[1][0] != found[2][0], "another batch"
    assert found[6][0] < found[1][0]
