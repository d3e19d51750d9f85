"""The chunked cross-entropy is torch's cross_entropy, without all logits at once."""

from typing import Any

import pytest
import torch
from limits import set_limit
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import fp4train.models.common.loss as loss_module
from fp4train.backends import add_product
from fp4train.models.common import chunked_cross_entropy

TOKENS = 37
WIDTH = 24
VOCABULARY = 50


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.3).requires_grad_()
    return h, w, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


@pytest.fixture(
    params=[1 << 23, 10 * VOCABULARY, 1], ids=["one chunk", "4 chunks", "a chunk a token"]
)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "logits of a chunk", request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_value_and_gradients_are_torchs(scale: float) -> None:
    h, w, targets = inputs(torch.float32)
    expected = cross_entropy(h @ w.T, targets)
    expected_grads = torch.autograd.grad(expected * scale, (h, w))
    found = chunked_cross_entropy(h, w, targets)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found * scale, (h, w)), expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_exact_loss(dtype: torch.dtype) -> None:
    h, w, targets = inputs(dtype)
    exact_h = h.detach().float().requires_grad_()
    exact = cross_entropy(exact_h @ w.T, targets)
    expected = torch.autograd.grad(exact, (exact_h, w))
    found = chunked_cross_entropy(h, w, targets)
    assert found.dtype == torch.float32
    assert float((found - exact).detach().abs()) < 2e-3
    dh, dw = torch.autograd.grad(found, (h, w))
    assert dh.dtype == dtype and dw.dtype == torch.float32
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-3
    for a, b in ((dh, expected[0]), (dw, expected[1])):
        assert float((a.float() - b).norm()) < bound * float(b.norm())


def test_a_loss_scale_keeps_small_float16_gradients() -> None:
    """Most probabilities of a vocabulary over thousands of tokens underflow in float16; dividing
    last keeps them.
    """
    tokens = 8192
    vocabulary = 256
    generator = torch.Generator().manual_seed(0)
    h = (torch.randn(tokens, 8, generator=generator) * 0.01).half().requires_grad_()
    w = (torch.randn(vocabulary, 8, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    (dh,) = torch.autograd.grad(chunked_cross_entropy(h, w, targets) * 65536.0, h)
    exact_h = h.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(cross_entropy(exact_h @ w.T, targets) * 65536.0, exact_h)
    assert float((dh.float() - exact).norm()) < 2e-3 * float(exact.norm())


def test_bfloat16_gradients_are_not_scaled_by_a_rounded_share() -> None:
    """1 / (3 · 96) is 0.2 % larger in BF16, which would lengthen every gradient by as much."""
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(96, 32, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(64, 32, generator=generator).bfloat16().float()
    targets = torch.randint(0, 64, (96,), generator=generator)
    (dh,) = torch.autograd.grad(chunked_cross_entropy(h, w, targets) / 3, h)
    exact_h = h.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(cross_entropy(exact_h @ w.T, targets) / 3, exact_h)
    assert abs(float((dh.float() * exact).sum() / exact.square().sum()) - 1) < 5e-4


def test_a_frequent_token_does_not_overflow_float16() -> None:
    h = torch.full((4096, 8), 30.0).half().requires_grad_()
    w = torch.zeros(16, 8, requires_grad=True)
    _, dw = torch.autograd.grad(
        chunked_cross_entropy(h, w, torch.zeros(4096, dtype=torch.int64)), (h, w)
    )
    assert dw.isfinite().all(), "4096 · 30 is beyond float16"


def test_large_logits_do_not_overflow() -> None:
    h = torch.full((3, 2), 300.0, requires_grad=True)
    w = torch.eye(2).mul(2.0).requires_grad_()
    loss = chunked_cross_entropy(h, w, torch.tensor([0, 1, 0]))
    assert float(loss.detach()) == pytest.approx(0.6931, abs=1e-3)


@pytest.mark.parametrize("frozen", ["h", "w", "both"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    h, w, targets = inputs(torch.float32)
    h.requires_grad_(frozen == "w")
    w.requires_grad_(frozen == "h")
    loss = chunked_cross_entropy(h, w, targets)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    assert (h.grad is None) == (frozen != "w")
    assert (w.grad is None) == (frozen != "h")


def test_a_nan_reaches_the_loss() -> None:
    h, w, targets = inputs(torch.float32)
    with torch.no_grad():
        h[3, 3] = float("nan")
    assert chunked_cross_entropy(h, w, targets).isnan()


@pytest.mark.parametrize(
    ("device", "vocabulary", "rows"),
    [
        ("cuda", 128_000, 4096),
        ("cuda", 256, 1 << 15),
        ("cpu", 128_000, 65),
        ("cpu", 256, 1 << 15),
        ("cpu", 1 << 24, 1),
    ],
)
def test_a_gpu_takes_thousands_of_rows_at_a_time_and_a_cpu_what_it_always_took(
    device: str, vocabulary: int, rows: int
) -> None:
    """Each chunk reads the head anew: at 65 rows a step of a 1B model would move a terabyte."""
    assert loss_module.chunk_rows(device, vocabulary) == rows


def test_on_a_gpu_the_heads_gradient_is_summed_over_chunks_unrounded() -> None:
    """A BF16 product per chunk would round once per chunk, and a sum of its own would read and
    write dw once more. The calls are recorded on tensors without data: the one operator of a chunk
    writes into dw itself, and that of the first chunk reads nothing there.
    """
    asked: list[tuple[Any, bool]] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function in (torch.ops.aten.addmm.dtype_out, torch.ops.aten.mm.dtype_out):
                fits = torch.mm(*args[-3:-1]).shape == dw.shape and args[-1] is dw.dtype
                inside = kwargs["out"] is dw and (args[0] is dw) == (len(args) == 4)
                asked.append((function, inside and fits))
                return dw
            if function.overloadpacket in (
                torch.ops.aten.mm,
                torch.ops.aten.add,
                torch.ops.aten.add_,
            ):
                asked.append((function, False))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Recorded():
        grad, h = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (32, 16))
        dw = torch.empty(32, 16, device="cuda")
        add_product(dw, grad.T, h, first=True)
        add_product(dw, grad.T, h)
    assert asked == [(torch.ops.aten.mm.dtype_out, True), (torch.ops.aten.addmm.dtype_out, True)]


class Written(TorchDispatchMode):
    """The names of the operators whose result has a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.names = shape, []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape == self.shape and not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return made


@pytest.mark.parametrize("chunks", [1, 4])
def test_in_a_second_microbatch_the_heads_gradient_is_made_scaled_and_added_in_place(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    """Each pass over it is a gigabyte of a vocabulary of 128 k: no zeros, no copy, and the bits of
    the plain sum.
    """
    set_limit(monkeypatch, "logits of a chunk", -(-TOKENS // chunks) * VOCABULARY)
    h, w, targets = inputs(torch.float32)
    (chunked_cross_entropy(h, w, targets) * 0.3).backward()
    first, once = w.grad, w.grad.clone()  # type: ignore[union-attr]
    with Written(w.shape) as written:
        (chunked_cross_entropy(h, w, targets) * 0.3).backward()
    assert written.names == ["empty", "mm", "copy_", *["mm", "add_"] * (chunks - 1), "mul_", "add_"]
    assert w.grad is first
    total = torch.zeros_like(w)
    with torch.no_grad():
        for h_CD, target in zip(
            h.split(-(-TOKENS // chunks)), targets.split(-(-TOKENS // chunks)), strict=True
        ):
            _, grad = loss_module._losses(
                h_CD @ w.T, target[:, None], None, masked=False, gradient=True
            )
            total += grad.T @ h_CD
    assert torch.equal(once, total * (torch.tensor(0.3) / TOKENS)) and torch.equal(
        w.grad, once + once
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_scaled_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    factor = torch.tensor(1 / 3)
    wanted = (x.float() * factor).to(dtype)
    assert torch.equal(loss_module.scale(x, factor), wanted) and torch.equal(x, wanted)


def test_a_second_backward_pass_of_a_graph_is_an_error() -> None:
    """The first one has scaled what the graph holds."""
    h, w, targets = inputs(torch.float32)
    loss = chunked_cross_entropy(h, w, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_without_a_loss_have_no_gradient(dtype: torch.dtype) -> None:
    """The sum is divided by all tokens, so that the parts of a batch add up."""
    h, w, targets = inputs(dtype)
    targets[::3] = -100
    counted = int((targets >= 0).sum())
    expected = (
        cross_entropy(h.float() @ w.T.to(dtype).float(), targets, ignore_index=-100)
        * counted
        / TOKENS
    )
    found = chunked_cross_entropy(h, w, targets, masked=True)
    torch.testing.assert_close(
        found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
    dh, _ = torch.autograd.grad(found, (h, w))
    assert bool((dh[::3] == 0).all()) and bool((dh[1::3] != 0).any())


@pytest.mark.usefixtures("chunks")
def test_where_all_targets_count_nothing_changes_in_any_bit() -> None:
    h, w, targets = inputs(torch.bfloat16)
    plain, masked = (chunked_cross_entropy(h, w, targets, masked=each) for each in (False, True))
    assert torch.equal(plain, masked)
    for a, b in zip(
        torch.autograd.grad(plain, (h, w)), torch.autograd.grad(masked, (h, w)), strict=True
    ):
        assert torch.equal(a, b)
