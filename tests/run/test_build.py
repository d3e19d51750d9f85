"""What becomes of a configuration before the first step."""

import inspect
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from configured import composed_of, config_of
from torch import nn

from fp4train.config import TrainSettings
from fp4train.errors import UserError
from fp4train.models.llama import Llama
from fp4train.parallel import Mesh
from fp4train.parallel.world import World
from fp4train.precision import find_blocks
from fp4train.run import build, find, fuse
from fp4train.run.find import Command

OPTIONS_OF_TORCH_2_11 = {"fullgraph", "dynamic", "backend", "mode", "options", "disable"}
"""Of `torch.compile` in torch/__init__.py."""


def test_blocks_are_compiled_with_options_that_the_oldest_torch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: list[set[str]] = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda module, *args, **kwargs: options.append(set(kwargs))
    )
    with torch.device("meta"):
        model = Llama(width=32, layers=2, heads=2, kv_heads=1, hidden=64).build(
            vocab_size=60, seq_len=16
        )
    train = TrainSettings(steps=1, batch_size=1, microbatch=None, seq_len=16, compile=True)
    fuse.compile_blocks(model, train, torch.device("cuda"))
    assert len(options) == len(find_blocks(model))
    assert set.union(*options) <= OPTIONS_OF_TORCH_2_11 & set(
        inspect.signature(torch.compile).parameters
    )
    assert torch._dynamo.config.recompile_limit >= fuse.COMPILED_VARIANTS


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
