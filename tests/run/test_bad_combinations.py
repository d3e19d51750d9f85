"""Pieces of recipes that do not go together: the command line names the operand, the reason and what
runs, for recipes of `recipes/` and of a user's folder.
"""

from pathlib import Path

import pytest
from command_line import Cli

HELD_AND_DELAYED = """
_target_: fp4train.precision.Custom
label: both
fprop:
  _target_: fp4train.precision.Operands
  first: {_target_: fp4train.quantize.QuantSpec, held: 50}
  second: {_target_: fp4train.quantize.QuantSpec}
dgrad:
  _target_: fp4train.precision.Operands
  first:
    _target_: fp4train.quantize.QuantSpec
    element: e5m2
    block: [null, null]
    scale: fp32
    global_scale: null
    delayed: {_target_: fp4train.quantize.Delayed}
  second: {_target_: fp4train.quantize.QuantSpec}
wgrad: {_target_: fp4train.precision.Operands}
"""
TWO_RANKS = ("gpu=B200", "gpus=2", "parallel.tp=2", "model.kv_heads=2", "train.batch_size=8")


def test_held_scales_with_delayed_ones_are_refused_by_operand(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "mine" / "recipe" / "both.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(HELD_AND_DELAYED)
    message = cli("plan", "--config-dir", "mine", "recipe=both").message
    assert message.startswith("recipe: fprop, x: held=50, and dgrad has delayed scaling")
    assert "use held=None with FP8Delayed, or FP8Current with held" in message


def test_a_mean_taken_out_of_x_beside_a_residual_of_w_is_refused(cli: Cli) -> None:
    words = ("recipe=chon", "recipe.centred=[x]")
    message = cli("plan", *words).message
    assert message.startswith("recipe: residual: w beside centred: x")
    assert "use recipe.residual.tensors=[x]" in message


@pytest.mark.parametrize(
    ("recipe", "operands", "instead"),
    [
        ("averis", "x and dy centred", "recipe.centred=[]"),
        ("chon", "residual of x and w in E2M1 of 10%", "recipe.residual=null"),
    ],
)
def test_operands_of_two_terms_are_refused_where_a_layer_is_cut_and_on_other_backends(
    cli: Cli, recipe: str, operands: str, instead: str
) -> None:
    words = ("plan", f"recipe={recipe}", "policy=all")
    cut = cli(*words, *TWO_RANKS).message
    assert operands in cut and "parallel.tp cuts blocks.0.attention.wq" in cut
    assert f"use parallel.tp=1, or {instead}" in cut
    for options in (("backend=native",), ("backend=native", "gpu=B200")):
        native = cli(*words, *options).message
        assert f"an operand of two terms ({operands}) is a sum of products" in native
        assert f"({instead} runs without)" in native
        assert "backend=auto would run it by emulate" in native
    assert cli(*words, instead).code == 0
