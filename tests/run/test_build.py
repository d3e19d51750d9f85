"""What becomes of a configuration before the first step."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from configured import composed_of, config_of
from torch import nn

from fp4train.errors import UserError
from fp4train.parallel import Mesh
from fp4train.parallel.world import World
from fp4train.run import build, find
from fp4train.run.find import Command


@pytest.mark.parametrize(
    ("model", "device", "waits"),
    [("llama_1b", "cuda", True), ("llama_tiny", "cuda", False), ("llama_1b", "cpu", False)],
)
def test_a_gpu_draws_by_counter_itself(
    model: str, device: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A billion weights take a CPU a minute. `materialise` draws the same bits
    (tests/models/common).
    """
    built: list[str] = []
    monkeypatch.setattr(
        build, "build_model", lambda config, size, on: built.append(on.type) or nn.Linear(2, 2)
    )
    monkeypatch.setattr(build, "why_not_deferred", lambda model: None)
    config = config_of(f"model={model}", "device=cpu")
    world = World(device=torch.device(device))
    _, deferred = build.built_or_deferred(config, 257, world, True)
    assert (built, deferred) == (["meta"] if waits else [device], waits)


def test_a_batch_that_ranks_cannot_share_is_refused_before_weights_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To verify those of a large model takes minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find, "open_init", Mock(side_effect=AssertionError))
    cfg = composed_of("run.name=a", "train.batch_size=3", "train.microbatch=null", "device=cpu")
    world = World(device=torch.device("cpu"), mesh=Mesh(shard=2))
    with pytest.raises(UserError, match=r"train\.batch_size=3 is not divisible by 2 data ranks"):
        find.find_origin(Command.of(cfg), world)
