"""A family of a user's own, the package and YAML that docs/plugins.md shows: planned, trained,
resumed, exported.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Before, Cli, losses
from safetensors.torch import load_file
from shown import write_shown

from fp4train import checkpoint

OWN = ("--config-dir", "mine", "plugins=[shifted]")
FAMILY = (*OWN, "model=shifted_tiny", "model.width=32", "model.hidden=64")


@pytest.fixture(autouse=True)
def mine(cli: Cli) -> Iterator[None]:
    write_shown(cli.folder)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "shifted"]:
        del sys.modules[name]


def test_it_learns_and_goes_on_in_every_bit(cli: Cli) -> None:
    options = (
        *FAMILY,
        "recipe=nvfp4",
        "phases=none",
        "schedule=constant",
        "model.recompute=true",
        "optim.lr=1e-2",
    )
    assert cli("run.name=whole", *options).code == 0
    assert cli("run.name=a", *options, "train.steps=4").code == 0
    assert cli(*OWN, "resume=runs/a", "train.steps=6").code == 0
    whole = losses("runs/whole")
    resumed = losses("runs/a")
    assert [resumed[step] for step in (5, 6)] == [whole[step] for step in (5, 6)]
    assert whole[6][0] < whole[1][0] - 0.3


def test_its_plan_lists_its_weights_and_a_mesh_that_does_not_divide_them_is_named(cli: Cli) -> None:
    planned = cli("plan", *FAMILY, "policy=all", "recipe=nvfp4")
    assert planned.code == 0 and "not converted" not in planned.err
    assert "blocks 0–2  fprop dgrad wgrad  E2M1·E2M1" in planned.out
    said = cli("plan", *FAMILY, "model.hidden=66", "parallel.tp=4", "gpu=H100").message
    assert ": 66 " in said and "cannot be divided over parallel.tp=4 ranks" in said


def test_what_its_parts_say_of_themselves_is_heard(cli: Cli, before: Before) -> None:
    """Its filter is a matrix for nobody: weight decay spares it. What it multiplies besides is
    counted.
    """
    runs: list[Any] = []
    before(0, runs.append)
    assert (
        cli("run.name=a", *FAMILY, "recipe=nvfp4", "train.steps=1", "optim.weight_decay=0.2").code
        == 0
    )
    (run,) = runs
    decays = {
        id(p): group["weight_decay"]
        for group in run.optimizer.param_groups
        for p in group["params"]
    }
    spared = {name for name, p in run.model.named_parameters() if not decays[id(p)] and p.dim() > 1}
    assert spared == {f"blocks.{index}.mix" for index in range(3)}
    matrices = sum(p.numel() for p in run.model.parameters() if p.dim() > 1)
    assert run.multiplied == matrices + 3 * 64
    planned = json.loads(cli("plan", *FAMILY, "gpu=H100", "gpus=1", "--json").out)
    assert planned["stretches"][0]["flops_per_token"] == 6 * run.multiplied


@pytest.mark.long
def test_it_goes_to_a_folder_and_comes_back_in_every_bit(cli: Cli) -> None:
    assert cli("run.name=a", *FAMILY, "recipe=bf16", "train.steps=2").code == 0
    assert cli.raw("export", *OWN, "runs/a", "to=hf", "out=hf").code == 0
    assert json.loads(Path("hf/config.json").read_text())["model_type"] == "shifted"
    begun = (
        "run.name=b",
        "init=hf",
        "recipe=fp32",
        "train.steps=1",
        "optim.lr=1e-30",
        "train.seq_len=32",
    )
    ended = cli.raw(
        *OWN, *begun, "train.batch_size=2", "data=text", "track=jsonl", "phases=none", *cli.paths
    )
    assert ended.code == 0, ended.err
    stored = checkpoint.load(Path("runs/b/checkpoints")).tensors
    theirs = load_file("hf/model.safetensors")
    assert torch.equal(stored["model/blocks.1.mix"], theirs["model.layers.1.mix"])
    assert cli.raw("export", *OWN, "runs/b", "to=hf", "out=back").code == 0
    back = load_file("back/model.safetensors")
    assert back.keys() == theirs.keys() and all(
        torch.equal(back[name], theirs[name]) for name in back
    )
    lost = cli.raw(*begun, "run.name=c", "data=text", *cli.paths).message
    assert "model_type='shifted' is not supported" in lost
    Path("mine/shifted/hf.py").write_text("import absent\n")
    sys.modules.pop("shifted.hf")
    for words in (
        ("export", *OWN, "runs/a", "to=hf", "out=more"),
        (*OWN, *begun, "run.name=d", "data=text", *cli.paths),
    ):
        assert "shifted.hf cannot be imported: ModuleNotFoundError" in cli.raw(*words).message
