"""Audits accuse no optimizer and no model of one's own that does what it should."""

import sys
from pathlib import Path

import pytest
from command_line import Cli, events

LAB = """
from dataclasses import dataclass

import torch

from fp4train.models.llama import Llama
from fp4train.optim.adamw import AdamW

class Sometimes(torch.optim.AdamW):
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        for number, group in enumerate(self.param_groups):
            group["lr"] *= 0.1 ** (number + 1)
        if self.calls % 2:
            super().step()

@dataclass(frozen=True, kw_only=True)
class Layerwise(AdamW):
    def build(self, model):
        return Sometimes(self.groups(model.parameters()), lr=self.lr)

def skipping(self, x, *arguments, **options):
    self.calls = getattr(self, "calls", 0) + self.training
    if self.training and self.calls % 3 == 2:
        return x
    return super(type(self), self).forward(x, *arguments, **options)

@dataclass(frozen=True, kw_only=True)
class Depth(Llama):
    def build(self, *, vocab_size, seq_len):
        model = super().build(vocab_size=vocab_size, seq_len=seq_len)
        for block in model.blocks:
            block.__class__ = type("Block", (type(block),), {"forward": skipping})
        return model
"""


@pytest.mark.long
def test_rates_by_layer_updates_now_and_then_and_skipped_blocks_are_no_faults(cli: Cli) -> None:
    model = "_target_: depthlab.Depth\nwidth: 32\nlayers: 2\nheads: 2\nkv_heads: 1\nhidden: 64\n"
    optim = "_target_: depthlab.Layerwise\n"
    files = {"depthlab.py": LAB, "model/depth.yaml": model, "optim/layerwise.yaml": optim}
    for path, text in files.items():
        Path("mine", path).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", path).write_text(text)
    try:
        own = ("--config-dir", "mine", "plugins=[depthlab]", "model=depth", "optim=layerwise")
        audits = ("audit.every=1", "audit.sums=1", "audit.action=stop")
        ended = cli(
            *own, "run.name=a", "policy=all", "train.steps=12", "train.microbatch=2", *audits
        )
    finally:
        sys.modules.pop("depthlab", None)
    assert ended.code == 0, ended.err
    assert events("runs/a", "audit failed") == []
    assert "(the step did not call it)" in ended.err
