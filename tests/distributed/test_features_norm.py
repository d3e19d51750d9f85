"""Norms over features that tensor-parallel ranks share: each rank normalises its own by the mean
square of all.
"""

from typing import Any

import pytest

Ranks = Any

PROGRAM = """
import fp4train as f4
import llama_steps
import torch
from torch.distributed.device_mesh import init_device_mesh
from fp4train.models.olmo2 import Olmo2
from fp4train.parallel.tensor import cut_tensors

mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
shape = Olmo2(width=64, layers=1, heads=4, kv_heads=2, hidden=96)
tokens = torch.randint(60, (2, 33), generator=torch.Generator().manual_seed(0))


def gradients(sequence, compiled):
    torch.manual_seed(0)
    model = f4.convert(shape.build(vocab_size=60, seq_len=32))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    if sequence is not None:
        cut_tensors(model, mesh, sequence=sequence)
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    with f4.autocast(f4.precision.FP32(), step=0):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    named = {name: llama_steps.whole(p.grad) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **named}


one = gradients(None, False)
compiled = arguments[0] == "compiled"
for sequence in (True,) if compiled else (False, True):
    cut = gradients(sequence, compiled)
    report({name: float((cut[name] - one[name]).norm() / one[name].norm()) for name in one})
"""


@pytest.mark.long
@pytest.mark.parametrize("blocks", ["eager", "compiled"])
def test_queries_and_keys_are_normalised_over_the_heads_of_all_ranks(
    ranks: Ranks, blocks: str
) -> None:
    """The loss and every gradient, those of the norms' own weights among them, are those of one
    rank, with and without cut tokens; compiled blocks, which are long traced, with them.
    """
    reported = ranks.program(PROGRAM, 2, blocks)[0]
    assert len(reported) == (1 if blocks == "compiled" else 2)
    for differences in reported:
        assert "blocks.0.attention.q_norm.weight" in differences
        for name, difference in differences.items():
            assert difference <= 2e-6, name
