"""What tensor-parallel ranks send each other: x once for the layers that read it, and partial sums in
BF16 within their bound.
"""

from typing import Any

Ranks = Any

SUMS = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from fp4train.backends import BACKENDS
from fp4train.nn import Ranks
from fp4train.nn.executors.cut import SummedProduct
from fp4train.nn.layer_shard import LayerShard
from fp4train.quantize import Decoded

ranks = Ranks.of(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
generator = torch.Generator().manual_seed(0)
a, b = torch.randn(2, world, 64, 96, generator=generator).bfloat16()
terms = a.double() @ b.double().mT
place = slice(32 * ranks.rank, 32 * ranks.rank + 32)
exact, magnitude = terms.sum(0)[place], terms.abs().sum(0)[place]
for rounds_sums in (False, True):
    shard = LayerShard(tensor=ranks, cut="in", sequence=True, rounds_sums=rounds_sums)
    product = SummedProduct(BACKENDS["emulate"], shard)
    own = Decoded(a[ranks.rank], torch.tensor(1.0)), Decoded(b[ranks.rank], None)
    y = product.product(*own, out_dtype=torch.float32)
    report(float(((y - exact).abs() / (2.0**-8 * magnitude)).max()))
"""
GATHERS = """
from collections import Counter
import fp4train as f4
import llama_steps
from torch.distributed.device_mesh import init_device_mesh
from fp4train.nn import Ranks
from fp4train.parallel.tensor import cut_tensors

mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
gather_rows = Ranks.gather_rows
for recipe in arguments:
    sent = Counter()

    def count(self, x):
        sent[passes] += 1
        return gather_rows(self, x)

    model = llama_steps.model(layers=1)
    cut_tensors(model, mesh, rounds_sums=True)
    Ranks.gather_rows = count
    tokens, targets = llama_steps.batch(0, 4)
    with f4.autocast(llama_steps.RECIPES[recipe](), step=0):
        passes = "forward"
        loss = model(tokens, targets)
    passes = "backward"
    loss.backward()
    Ranks.gather_rows = gather_rows
    report(dict(sent))
"""


def test_partial_sums_in_bf16_are_within_a_rounding_of_each_term(ranks: Ranks) -> None:
    for exact, rounded in ranks.program(SUMS, 2):
        assert exact < 0.01 and 0.3 < rounded <= 1 + exact


def test_queries_keys_and_values_gather_x_once_in_backward_and_gate_and_up(ranks: Ranks) -> None:
    """Beside x of two groups: dy of the two other layers, in two forms or one; and that of the
    head's input, each way.
    """
    for coded, plain in ranks.program(GATHERS, 2, "nvfp4", "bf16"):
        assert coded["backward"] == plain["backward"] + 2
        assert plain["forward"] == coded["forward"]
        assert plain["backward"] - plain["forward"] == 2
