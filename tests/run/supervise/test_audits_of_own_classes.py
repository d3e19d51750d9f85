"""Audits accuse no optimizer and no model of one's own that does what it should."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli, events
from lengths import long_but

LAB = """
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp4train.companion import Companion
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

@dataclass(frozen=True, kw_only=True)
class Shared(Llama):
    def build(self, *, vocab_size, seq_len):
        model = super().build(vocab_size=vocab_size, seq_len=seq_len)
        model.blocks[1].mlp.down.weight = model.blocks[0].mlp.down.weight
        model.norm.to(torch.bfloat16)
        for block in model.blocks:
            block.register_buffer("passes", torch.zeros(2))
            block.register_buffer("mean", torch.zeros(2))
            block.register_forward_pre_hook(writes)
        return model

@torch.no_grad()
def writes(block, _):
    block.passes.add_(1)
    block.mean.data = block.mean + 1
    block.register_buffer("made", block.mean.clone(), persistent=False)
    if block.training:
        block.mlp.up.weight.clamp_(-0.02, 0.02)

@torch.no_grad()
def decay(run):
    for parameter in run.model.parameters():
        parameter.mul_(0.999)
    for state in run.optimizer.state.values():
        state["exp_avg"].zero_()

@dataclass(kw_only=True)
class Writes(Companion):
    def begin(self, run):
        weight = run.planned_layers[0].weight
        weight.register_hook(lambda gradient: gradient.clamp(-1e-6, 1e-6))
        run.optimizer.register_step_post_hook(lambda *_: decay(run))
        frozen = run.planned_layers[1].weight
        held = frozen.detach().clone()
        run.optimizer.register_step_post_hook(lambda *_: frozen.detach().copy_(held))

    def around_step(self, run, recipe):
        decay(run)
        return super().around_step(run, recipe)

    def after_step(self, run, step):
        decay(run)

    before_step = on_save = lambda self, run: decay(run)

@dataclass(kw_only=True)
class Clips(Companion):
    def begin(self, run):
        def clip(optimizer, *_):
            for parameter in run.model.parameters():
                parameter.grad.clamp_(-1e-6, 1e-6)
        self.handle = self.register(run)(clip)

    def register(self, run):
        return run.optimizer.register_step_pre_hook

@dataclass(kw_only=True)
class ClipsAll(Clips):
    def register(self, run):
        return register_optimizer_step_pre_hook

    def close(self, run, error):
        self.handle.remove()
"""


def own(*words: str) -> tuple[str, ...]:
    """The words of a run whose classes are in `mine`, audited in every step."""
    sizes = "width: 32\nlayers: 2\nheads: 2\nkv_heads: 1\nhidden: 64\n"
    files = {
        "depthlab.py": LAB,
        "model/depth.yaml": f"_target_: depthlab.Depth\n{sizes}",
        "model/shared.yaml": f"_target_: depthlab.Shared\n{sizes}",
        "optim/layerwise.yaml": "_target_: depthlab.Layerwise\n",
    }
    for path, text in files.items():
        Path("mine", path).parent.mkdir(parents=True, exist_ok=True)
        Path("mine", path).write_text(text)
    audits = ("audit.every=1", "audit.sums=1", "audit.action=stop")
    begin = ("--config-dir", "mine", "plugins=[depthlab]", "run.name=a", "policy=all")
    return (*begin, "train.microbatch=2", *audits, *words)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    sys.modules.pop("depthlab", None)


@pytest.mark.parametrize("hook", long_but(("Writes",), ("Writes", "Clips", "ClipsAll")))
def test_what_hooks_and_models_write_and_weights_of_two_layers_are_no_faults(
    cli: Cli, hook: str
) -> None:
    words = own("model=shared", f"hooks=[{{_target_: depthlab.{hook}}}]", "train.steps=6")
    ended = cli(*words, "checkpoint.every=3", "eval.every=2")
    assert ended.code == 0, ended.err
    assert events("runs/a", "audit failed") == events("runs/a", "checkpoint failed") == []


@pytest.mark.long
def test_rates_by_layer_updates_now_and_then_and_skipped_blocks_are_no_faults(cli: Cli) -> None:
    ended = cli(*own("model=depth", "optim=layerwise", "train.steps=12"))
    assert ended.code == 0, ended.err
    assert events("runs/a", "audit failed") == []
    assert "(the step did not call it)" in ended.err
