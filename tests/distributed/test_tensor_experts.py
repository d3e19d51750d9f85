"""Experts that tensor-parallel ranks share are, in every bit, those of one rank; of what is around
them see `test_families.py`.
"""

import json
from typing import Any

Ranks = Any
PROGRAM = """
import json

import fp4train as f4
import llama_steps
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from fp4train.parameters import Split, ParameterSpec
from fp4train.models.common.experts import ExpertLayer
from fp4train.models.common.router import Balance, ExpertShape
from fp4train.nn.executors import join_states
from fp4train.nn import Experts
from fp4train.nn import Ranks
from fp4train.nn.ranks import local
from fp4train.parallel.tensor import cut_tensors
from fp4train.precision import Context, use
from fp4train.shards import shard_of
from fp4train.quantize import Position, RunStep

WIDTH, TIME, BATCH = 32, 24, 2

class Layers(nn.Module):  # which the ranks share, and the residual stream with its tokens
    tensor = None

    def __init__(self, top, bias):
        super().__init__()
        balance = Balance(loss=0.5, z_loss=0.1, capacity=None if bias else 1.0)
        self.mlp = ExpertLayer(WIDTH, ExpertShape(count=4, top=top, hidden=24, bias=bool(bias)), balance)
        nn.init.normal_(self.mlp.router.weight)
        if bias:
            self.mlp.router.bias.copy_(torch.tensor(bias))

    def fp4train_parameters(self):
        return [ParameterSpec(name=f"mlp.{name}.weight", cut=Split.EXPERTS) for name in ("gate_up", "down")]

    def forward(self, x):
        return self.mlp(x, TIME)

class All:  # the ranks of a run, for states
    def largest(self, x):
        return ranks.largest(x)

    def summed_over_data(self, x):
        return x

mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
ranks = Ranks.of(mesh)

def step(model, recipe, number, sequence):
    generator = torch.Generator().manual_seed(number)
    x, dy = torch.randn(2, BATCH, TIME, WIDTH, generator=generator).bfloat16()
    if sequence:
        x, dy = (ranks.part(each.flatten(0, 1)).clone() for each in (x, dy))
    x.requires_grad_()
    with use(Context(recipe=recipe, position=Position(RunStep(0, number)), counts="tokens", auxiliary=1.0)):
        for half in (1.0, 0.5):  # microbatches
            y = model(x * half)
            y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    found = {name: ranks.gather_rows(each) for name, each in found.items()} if sequence else found
    found |= {name: llama_steps.whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    return {name: each.flatten(0, -2).clone() for name, each in found.items()}

for case in json.loads(arguments[0]):
    recipe, found = llama_steps.RECIPES[case["recipe"]](), []
    for sequence in (None, False, True):
        torch.manual_seed(0)
        model = f4.convert(Layers(case["top"], case["bias"]))
        groups = [each for each in model.modules() if isinstance(each, Experts)]
        if sequence is not None:
            cut_tensors(model, mesh, sequence=sequence)
        else:
            for each in groups:
                each.joined = True
        steps = []
        for number in range(2):
            steps.append(step(model, recipe, number, sequence))
            if sequence is not None:
                join_states(groups, All())
            states = {f"{number}.{n}": t for n, each in enumerate(groups) for t in [each.scaling_state()]}
        held = [int(local(each.weight).numel()) for each in groups]
        offsets = [shard_of(each.weight).offsets[0] for each in groups]
        found.append((steps, states, model.mlp.router.seen().tolist(), held, offsets))
    (one, states, seen, held, _), *cuts = found
    for steps, own, loads, part, offsets in cuts:
        pairs = [(name, a, b) for s, t in zip(one, steps) for name, a in s.items() for b in [t[name]]]
        differ = sorted({name for name, a, b in pairs if not torch.equal(a, b)})
        joined = all(
            states[key].keys() == own[key].keys() and all(torch.equal(t, own[key][n]) for n, t in states[key].items())
            for key in states
        )
        report({**case, "differ": differ, "joined": joined, "histories": sum(map(len, states.values())),
                "loads": loads == seen, "seen": seen, "held": [b / a for a, b in zip(held, part)], "first": offsets})
"""
CASES = [
    {"recipe": recipe, "top": top, "bias": bias}
    for recipe, top, bias in (
        *((recipe, 2, None) for recipe in ("fp32", "bf16", "nvfp4", "mxfp8", "fp8_delayed")),
        ("nvfp4", 2, [90.0, 80.0, 0.0, 0.0]),
        ("nvfp4", 1, [0.0, 0.0, 0.0, 90.0]),
        ("fp8_delayed", 1, [0.0, 0.0, 0.0, 90.0]),
    )
]


def test_experts_over_two_ranks_are_those_of_one_in_every_bit(ranks: Ranks) -> None:
    """Outputs, all gradients with those of the losses of balance, loads, and histories of amaxes;
    with and without cut tokens; where a rank has no tokens, and where one expert has them all.
    """
    for rank, reported in enumerate(ranks.program(PROGRAM, 2, json.dumps(CASES))):
        assert len(reported) == 2 * len(CASES)
        for each in reported:
            assert each["differ"] == [] and each["loads"], each
            assert each["joined"] and bool(each["histories"]) == (
                each["recipe"] == "fp8_delayed"
            ), each
            assert each["held"] == [0.5, 0.5] and each["first"] == [2 * rank] * 2, each
        assert any(each["seen"][:4] == [0, 0, 0, 4 * 2 * 24] for each in reported), (
            "all to one expert"
        )
        assert all(each["seen"][4] > 0 for each in reported if each["bias"] is None), (
            "some are dropped"
        )
