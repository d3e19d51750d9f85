"""What kernels that quantise do for other launches of a step: factors of products, which they write
beside S_dec, and the amaxes of all weights at once.
"""

from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from needs_triton import needs_triton

from fp4train.precision import NVFP4
from fp4train.quantize import PairQuantizer, RandomKey, TritonQuantizer
from fp4train.quantize.triton_amaxes import amaxes

FACTORS = """
import torch
from gpu_cases import content
from gpu_kernels import difference
from fp4train.precision import NVFP4
from fp4train.quantize import PairQuantizer, RandomKey, quantizer
table = NVFP4().table()
keys = [RandomKey(seed=5, step=1, layer=7, operand=i) for i in (1, 2)]
kernels = [quantizer(table[g].first, "cpu", "triton") for g in ("dgrad", "wgrad")]
both = PairQuantizer(*kernels, row_codes=False, column_codes=False)
weights = quantizer(table["fprop"].second, "cpu", "triton")
assert both.writes_factors and weights.writes_factors
scales = [torch.tensor(x) for x in (0.1234567, 2.0**-126, 2.0**-140, 2.0**127, torch.nan)]

def factor(scale, other):
    product = scale * other
    normal = torch.finfo(torch.float32).tiny <= product < torch.inf or product.isnan()
    return torch.stack([product if normal else torch.tensor(0.0), torch.tensor(0.0)])

zero = 0
for kind in ("wide", "nan"):
    x = content(kind, 33, 40, 1).bfloat16()
    for number, other in enumerate(scales):
        others = other, scales[number - 1]
        plain = both(x, keys[0], None, keys[1], None)
        forms = both(x, keys[0], None, keys[1], None, None, others)
        made = [*zip(forms, plain, others), (weights.values(x, None, None, other), weights.values(x), other)]
        for form, expected, scale in made:
            assert difference(form.values, expected.values) is None, (kind, other)
            assert difference(form.scale, expected.scale) is None, (kind, other)
            assert form.factors[0] is scale
            numbers = factor(form.scale, scale)
            assert difference(form.factors[1], numbers) is None, (kind, other, form.factors[1], numbers)
            zero += not numbers.any()
assert zero >= 3
print("equal")
"""


@pytest.mark.long
@needs_triton
def test_kernels_of_values_write_the_factor_of_a_product_and_zero_where_there_is_none() -> None:
    run = interpreted("-c", FACTORS)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


STEPS = """
import copy, torch
import fp4train as f4
from prepared import sharing
from cublas_on_cpu import HANDLE, CublasOnCpu
from fp4train.backends import scaled
from fp4train.kernels.cublas import Cublas
from fp4train.nn import engine
from fp4train.precision import NVFP4, autocast
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import cpu, triton, triton_launch
from fp4train.quantize.quantizer import quantizer

torch.manual_seed(0)
model = f4.convert(torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 32, bias=False)))
theirs = copy.deepcopy(model)
x = torch.randn(64, 64).bfloat16()

def step(model, number, constant):
    model.zero_grad()
    with autocast(NVFP4(), seed=1, step=number), sharing(constant):
        y = model(x)
        y.float().square().sum().backward()
    found = [y.detach(), *(w.grad for w in model.parameters())]
    with torch.no_grad():
        for w in model.parameters():
            w -= 0.01 * w.grad.clamp(-1, 1)
    return found

expected = [step(theirs, number, ConstantWeights()) for number in range(3)]

launched, launch = [], triton_launch.Launch.__call__
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted
cpu.why_not, cpu.make, cpu.pair = lambda spec, device: triton.why_not_spec(spec), triton.make, triton.pair
engine.ADDING = frozenset({"cpu"})
scaled.ScaledProducts._cublas_on = lambda self, device: Cublas(CublasOnCpu().library, lambda: HANDLE)
quantizer.cache_clear()
for number in range(3):
    launched.clear()
    for ours, reference in zip(step(model, number, ConstantWeights()), expected[number]):
        assert torch.equal(ours, reference), (number, (ours - reference).abs().max())
    print(*map(launched.count, ("amax_tensors", "amax_tensor", "two_product_factors", "two_scaled_products")))
with torch.no_grad():
    model[0].weight[0, 0] = 1000.0
    theirs[0].weight[0, 0] = 1000.0
print(*map(torch.equal, step(model, 3, ConstantWeights()), step(theirs, 3, ConstantWeights())))
"""


@pytest.mark.long
@needs_triton
def test_steps_measure_their_weights_at_once_and_have_the_bits_of_a_cpus() -> None:
    """From the second step on; a weight that is written between two is measured anew."""
    run = interpreted("-c", STEPS)
    lines = run.stdout.splitlines()
    assert lines == ["1 1 0 1", "1 0 0 1", "1 0 0 1", "True True True"], run.stdout + run.stderr


def with_factors() -> None:
    table = NVFP4().table()
    kernels = [TritonQuantizer(table[gemm].first) for gemm in ("dgrad", "wgrad")]
    both = PairQuantizer(*kernels, row_codes=False, column_codes=False)
    key = RandomKey(seed=1, step=7, layer=5, operand=3)
    scales = torch.ones(2).unbind()
    both(torch.zeros(256, 1024).bfloat16(), key, None, key, None, None, scales)
    TritonQuantizer(table["fprop"].second).values(torch.zeros(256, 1024), None, None, scales[0])
    amaxes([torch.nn.Parameter(torch.zeros(256, 300)), torch.nn.Parameter(torch.zeros(7))])


@pytest.mark.long
@needs_triton
def test_kernels_with_factors_and_of_all_amaxes_compile_for_hopper_without_spills(
    triton_cache: Path,
) -> None:
    from compile_triton import compile_launch, launches_of, resources

    compiled = set()
    for launch in launches_of(with_factors):
        used = resources(compile_launch(launch, 90).asm["cubin"], triton_cache)
        assert used["STACK"] == used["LOCAL"] == 0, (launch.launch.kernel.__name__, used)
        compiled.add(launch.launch.kernel.__name__)
    assert compiled >= {"quantize_both", "quantize", "amax_tensors"}
