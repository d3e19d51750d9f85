"""The loss against a teacher is the one that torch computes from all logits at once."""

import pytest
import torch
from limits import set_limit
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from fp4train.models.common import TeacherStates, chunked_distillation

TOKENS = 37
WIDTH = 24
WIDER = 40
VOCABULARY = 50


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, WIDTH, generator=draw).to(dtype).requires_grad_()
    w = (torch.randn(VOCABULARY, WIDTH, generator=draw) * 0.3).requires_grad_()
    theirs = (
        torch.randn(TOKENS, WIDER, generator=draw).to(dtype),
        torch.randn(VOCABULARY, WIDER, generator=draw).to(dtype),
    )
    return h, w, *theirs, torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)


@pytest.fixture(
    params=[1 << 23, 10 * VOCABULARY, 1], ids=["one chunk", "4 chunks", "a chunk a token"]
)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, "logits of a chunk", request.param)


def expected(h: Tensor, w: Tensor, t: TeacherStates, targets: Tensor) -> Tensor:
    """Each token's loss."""
    logits = h.float() @ w.T
    theirs = t.h_MD.float() @ t.w_VD.float().T
    log_s, log_t = (each.div(t.temperature).log_softmax(-1) for each in (logits, theirs))
    kl = kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1) * t.temperature**2
    return kl + t.ce * cross_entropy(logits, targets.clamp(min=0), reduction="none")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(("temperature", "ce"), [(1.0, 0.0), (2.0, 0.0), (1.0, 0.5), (3.0, 2.0)])
def test_value_and_gradients_are_those_of_all_logits(temperature: float, ce: float) -> None:
    h, w, h_t, w_t, targets = inputs()
    teacher = TeacherStates(h_t, w_t, temperature, ce)
    whole = expected(h, w, teacher, targets).mean()
    found = chunked_distillation(h, w, targets, teacher)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(found * 0.5, (h, w)),
        torch.autograd.grad(whole * 0.5, (h, w)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("chunks")
def test_tokens_without_a_loss_have_no_gradient() -> None:
    h, w, h_t, w_t, targets = inputs()
    targets[::3] = -100
    teacher = TeacherStates(h_t, w_t, 2.0, 0.5)
    whole = (expected(h, w, teacher, targets) * (targets >= 0)).sum() / TOKENS
    found = chunked_distillation(h, w, targets, teacher, masked=True)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    (dh,) = torch.autograd.grad(found, (h,))
    assert bool((dh[::3] == 0).all()) and bool((dh[1::3] != 0).any())


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    h, w, *_, targets = inputs()
    found = chunked_distillation(h, w, targets, TeacherStates(h.detach(), w.detach(), 1.0, 0.0))
    assert abs(float(found.detach())) < 1e-6
    for each in torch.autograd.grad(found, (h, w)):
        assert float(each.abs().max()) < 1e-7


def test_bf16_stays_near_the_exact_loss() -> None:
    h, w, h_t, w_t, targets = inputs(torch.bfloat16)
    teacher = TeacherStates(h_t, w_t, 1.0, 0.5)
    found = chunked_distillation(h, w, targets, teacher)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected(h, w, teacher, targets).mean(), rtol=1e-2, atol=1e-2)
    dh, dw = torch.autograd.grad(found, (h, w))
    assert dh.dtype == torch.bfloat16 and dw.dtype == torch.float32
