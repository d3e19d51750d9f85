"""A model's fusible parts in Liger's kernels (liger_on_cpu.py stands in for the package) against
torch's operators.
"""

import importlib.util
import json
from typing import Any

import liger_on_cpu
import pytest
import torch
from interpreted import interpreted as in_interpreter
from pretended import Machine
from torch import Tensor

import fp4train as f4
from fp4train.models.common import chunked_cross_entropy, liger, use_liger
from fp4train.models.llama import Llama
from fp4train.precision import FP32, NVFP4, Recipe, autocast, find_blocks

THERE = importlib.util.find_spec("liger_kernel") is not None
SHAPE = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96, "tied": False}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    liger_on_cpu.install(monkeypatch)


def model(**shape: Any) -> Any:
    torch.manual_seed(0)
    built = Llama(**{**SHAPE, **shape}).build(vocab_size=60, seq_len=32)
    return f4.convert(built).train()


def gradients(built: Any, recipe: Recipe, *, masked: bool = False) -> dict[str, Tensor]:
    """The loss and all gradients of one pass."""
    tokens = torch.randint(60, (2, 32), generator=torch.Generator().manual_seed(1))
    targets = tokens.flip(1)
    if masked:
        built.masked, targets = True, targets.masked_fill(tokens < 20, -100)
    with autocast(recipe, step=0):
        loss = built(tokens, targets)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad for name, p in built.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [{}, {"qk_norm": True}, {"recompute": True}, {"tied": True}])
def test_loss_and_gradients_are_those_of_torchs_operators(
    shape: dict[str, bool], masked: bool
) -> None:
    """The kernels write over what they were given, and what is saved for backward must not be part
    of that.
    """
    plain = model(**shape)
    fused = model(**shape)
    use_liger(fused)
    wanted, found = (gradients(each, FP32(), masked=masked) for each in (plain, fused))
    assert found.keys() == wanted.keys() and len(found) > 15
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=1e-6, msg=name)


def test_a_recipe_quantises_what_it_does_without_them() -> None:
    """The loss lies as near to that of torch's operators as the last digits of BF16; in the
    gradients of a small model these change codes of four bits.
    """
    plain = model()
    fused = model()
    use_liger(fused)
    wanted = gradients(plain, NVFP4())
    found = gradients(fused, NVFP4())
    assert abs(float(found["loss"] - wanted["loss"])) < 2e-2
    for name, value in wanted.items():
        assert float((found[name] - value).norm()) <= 0.25 * float(value.norm()), name


def test_every_part_of_a_block_and_the_loss_run_in_a_kernel() -> None:
    built = model()
    use_liger(built)
    gradients(built, FP32())
    names = [name for name, _ in liger_on_cpu.calls]
    wanted = {"norm": 5, "product": 2, "rotation": 2}
    assert {name: names.count(name) for name in set(names)} == {
        **wanted,
        **{f"{name} backward": count for name, count in wanted.items()},
        "loss": 1,
    }


def test_compiled_blocks_are_left_to_the_compiler() -> None:
    built = model()
    use_liger(built, spare=find_blocks(built))
    gradients(built, FP32())
    assert [name for name, _ in liger_on_cpu.calls] == ["norm", "loss", "norm backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_without_gradients_is_that_of_training(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(40, 16, generator=generator, dtype=dtype)
    w = torch.randn(60, 16, generator=generator)
    targets = torch.randint(60, (40,), generator=generator)
    kernels = liger.Liger()
    with torch.no_grad():
        alone = chunked_cross_entropy(h, w, targets, liger=kernels)
    trained = chunked_cross_entropy(h, w.requires_grad_(), targets, liger=kernels)
    assert torch.equal(alone, trained.detach())
    torch.testing.assert_close(
        alone, chunked_cross_entropy(h, w, targets).detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("device", "version", "reason"),
    [
        ("cpu", (0, 8, 5), "for GPUs, and the model is on the cpu device"),
        ("cuda", None, "pip install 'fp4train[liger]'"),
        ("cuda", (0, 8, 4), "0.8.4 is installed, and 0.8.5 or newer below 0.9 is needed"),
        ("cuda", (0, 9, 0), "0.9.0 is installed"),
        ("cuda", (0, 8, 7), None),
    ],
)
def test_where_they_do_not_run_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, device: str, version: Any, reason: str | None
) -> None:
    Machine(monkeypatch).has_liger(version)
    found = liger.why_not(device)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_a_package_that_cannot_be_imported_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, error: type
) -> None:
    """It imports peft, and that TE, which raises RuntimeError where its kernels are missing."""

    def broken(name: str) -> None:
        raise error("found an empty package\nand more")

    Machine(monkeypatch).has_liger(liger.OLDEST)
    monkeypatch.setattr(liger, "import_module", broken)
    assert liger.why_not("cuda") == "liger-kernel cannot be imported: found an empty package"


PROGRAM = """
import json, numpy, sys, torch, triton.language as tl
from unittest.mock import patch
from triton.runtime import interpreter
convert = interpreter._implicit_cvt
def with_floats(value):  # compiled kernels have tensors of the numbers that they are called with
    if type(value) is not float:
        return convert(value)
    return tl.tensor(interpreter.TensorHandle(numpy.array([value], dtype=numpy.float32), tl.float32), tl.float32)
interpreter._implicit_cvt = with_floats
from liger_kernel.ops import rms_norm
rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # libdevice's is compiled only
import liger_on_cpu as double
from fp4train.models.common.liger import Liger
torch.manual_seed(0)
a, b, k = torch.randn(6, 40), torch.randn(6, 40), torch.randn(2, 5, 2, 16)
angles = torch.randn(5, 8).repeat(1, 2)
logits, targets = torch.randn(6, 70), torch.tensor([3, -1, 69, 0, -1, 5])
def parts():
    kernels = Liger()
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    z = kernels.silu_product(x * 1, y * 1)
    z.backward(b)
    p, r = torch.ones(2, 5, 4, 16).cumsum(-1).requires_grad_(), k.clone().requires_grad_()
    u, v = kernels.rotate((p * 1).transpose(1, 2), (r * 1).transpose(1, 2), angles.cos(), angles.sin())
    (u.square().sum() + v.square().mean()).backward()
    found = logits.clone()
    losses = kernels.cross_entropy(found, targets, gradient=True)
    kept = kernels.cross_entropy(logits.clone(), targets, gradient=False)
    w, t = torch.linspace(1, 2, 40).requires_grad_(), b.clone().requires_grad_()
    n = kernels.rms_norm(t * 1, w, 1e-5)
    n.backward(a)
    made = [z, x.grad, y.grad, u, v, p.grad, r.grad, found, losses, kept, n, t.grad, w.grad]
    return [each.detach() for each in made]
theirs = parts()
with patch.dict(sys.modules, double.modules()):
    ours = parts()
difference = max(float((p - q).abs().max()) for p, q in zip(ours, theirs))
"""

COUNTED = """
from collections import Counter
seen, kernels = Counter(), Liger()
def noting(real):
    def note(builder, pointers, *others):
        mask = others[0] if real.__name__.endswith("load") else others[1]
        addresses = numpy.broadcast_to(pointers.data, mask.data.shape)[mask.data]
        seen.update((builder.grid_idx, int(each), real.__name__) for each in addresses)
        return real(builder, pointers, *others)
    return note
for name in ("create_masked_load", "create_masked_store"):
    setattr(interpreter.InterpreterBuilder, name, noting(getattr(interpreter.InterpreterBuilder, name)))
def moved(work, elements):  # accesses, of what several programs read that of one, in bytes of BF16
    seen.clear()
    made, most = work(), {}
    for (_, *access), count in seen.items():
        most[tuple(access)] = max(most.get(tuple(access), 0), count)
    return made, 2 * sum(most.values()) / elements
def both(forward, inputs, elements):
    made, there = moved(lambda: forward(*[each.requires_grad_() * 1 for each in inputs]), elements)
    made = [made] if isinstance(made, torch.Tensor) else list(made)
    _, back = moved(lambda: torch.autograd.backward(made, [torch.randn_like(each) for each in made]), elements)
    return there, back
new, w = (lambda: torch.randn(64, 96)), torch.ones(96, requires_grad=True)
q, k = torch.randn(1, 8, 16, 32), torch.randn(1, 8, 4, 32)
turn = lambda q, k: kernels.rotate(q.transpose(1, 2), k.transpose(1, 2), torch.ones(8, 32), torch.zeros(8, 32))
some = torch.arange(8)
counts = {
    "rms_norm": both(lambda x: kernels.rms_norm(x, w, 1e-5), [new()], 64 * 96),
    "silu_product": both(kernels.silu_product, [new(), new()], 64 * 96),
    "rotate": both(turn, [q, k], q.numel() + k.numel()),
    "cross_entropy": (moved(lambda: kernels.cross_entropy(torch.randn(8, 500), some, gradient=True), 4000)[1], 0),
}
print(json.dumps({"difference": difference, "counts": counts}))
"""


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """What the package computes and moves in Triton's interpreter. It imports transformers where
    that is installed, and so all that belongs to it.
    """
    if not THERE:
        pytest.skip("needs liger-kernel")
    done = in_interpreter("-c", PROGRAM + COUNTED, NVTE_PROJECT_BUILDING="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.long
def test_the_stand_in_computes_what_the_package_does_in_tritons_interpreter(
    interpreted: Any,
) -> None:
    assert interpreted["difference"] < 1e-5


@pytest.mark.long
def test_the_kernels_move_the_bytes_that_are_stated_of_them_in_tritons_interpreter(
    interpreted: Any,
) -> None:
    """Weights, angles and a number per row come on top."""
    assert interpreted["counts"].keys() == liger.MOVED.keys()
    for name, found in interpreted["counts"].items():
        for stated, counted in zip(liger.MOVED[name], found, strict=True):
            assert stated <= counted <= 1.15 * stated, (name, found)
