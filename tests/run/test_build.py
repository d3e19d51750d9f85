"""What becomes of a configuration before the first step."""

import inspect

import pytest
import torch
from torch import nn

from fp4train.models.llama import Llama
from fp4train.precision.layers import find_blocks
from fp4train.run import build

OPTIONS_OF_TORCH_2_11 = {"fullgraph", "dynamic", "backend", "mode", "options", "disable"}
"""Of `torch.compile` in torch/__init__.py."""


def test_blocks_are_compiled_with_options_that_the_oldest_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[set[str]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, *args, **kwargs: options.append(set(kwargs)))
    with torch.device("meta"):
        model = Llama(width=32, layers=2, heads=2, kv_heads=1, hidden=64).build(vocab_size=60, seq_len=16)
    build._compile(model, torch.device("cuda"))
    assert len(options) == len(find_blocks(model))
    assert set.union(*options) <= OPTIONS_OF_TORCH_2_11 & set(inspect.signature(torch.compile).parameters)
    assert torch._dynamo.config.recompile_limit >= build.COMPILED_VARIANTS
