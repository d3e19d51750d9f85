"""Recipes of papers that are a table of operands: what they quantise, and that a run with them
resumes bit for bit.
"""

from pathlib import Path

import pytest
import torch
from command_line import Cli, losses
from safetensors.torch import load_file

STEADY = ("phases=none", "schedule=constant", "schedule.warmup=0", "policy=all")
PLANNED = {
    "ufp4_e1m2": "E1M2·E1M2",
    "ufp4_int4": "INT4·INT4",
    "mxfp4_backward": "E2M1·E2M1",
    "hifloat4": "E1M2·E1M2",
    "if4": "E2M1·E2M1",
}
"""What the plan of each says of dgrad."""


def weights(run: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(run).glob("checkpoints/*3/**/*.safetensors")):
        tensors |= {f"{path.name} {name}": value for name, value in load_file(path).items()}
    assert tensors
    return tensors


@pytest.mark.parametrize("recipe", PLANNED)
def test_a_run_with_the_recipe_of_a_paper_resumes_bit_for_bit(cli: Cli, recipe: str) -> None:
    words = (f"recipe={recipe}", *STEADY)
    for start in (("run.name=a", "train.steps=3"), ("run.name=b", "train.steps=2")):
        started = cli(*words, *start)
        assert started.code == 0, started.err
    resumed = cli("resume=runs/b", "train.steps=3")
    assert resumed.code == 0, resumed.err
    assert losses("runs/b")[3] == losses("runs/a")[3]
    ours, theirs = weights("runs/b"), weights("runs/a")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert PLANNED[recipe] in Path("runs/a/plan.txt").read_text(encoding="utf-8")
