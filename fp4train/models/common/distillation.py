"""The loss against a teacher's distribution, without ever holding all logits (distillation; Hinton
et al., arXiv:1503.02531).

    loss = mean_m [ τ²·Σ_v t_v·(log t_v − log s_v) + c·CE ],   t = softmax(z_teacher / τ),  s = softmax(z / τ)

with the logits z = h·Wᵀ of the student and of the teacher, and the student's cross-entropy CE of
the targets at τ = 1. τ² keeps the gradients of the first term at one scale. As in `loss.py` tokens
are taken in chunks, whose logits are turned at once into the gradients of the student's h and W.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4train.backends import widened
from fp4train.models.common.loss import ChunkedLoss, subtract_at


class TeacherStates(NamedTuple):
    """The states that a student learns from in one forward pass.

    h_MD: hidden states of the teacher [tokens, its width]; w_VD: its head [vocabulary, its width],
        of the same dtype.
    temperature: τ. ce: c, the weight of the cross-entropy of the targets.
    """

    h_MD: Tensor
    w_VD: Tensor
    temperature: float
    ce: float


def chunked_distillation(
    h_MD: Tensor, w_VD: Tensor, targets_M: Tensor, teacher: TeacherStates, *, masked: bool = False
) -> Tensor:
    """The mean loss in nats, float32 scalar.

    Args:
        h_MD: hidden states of the student [tokens, width]. w_VD: its head [vocabulary, width].
        targets_M: int64 [tokens]. masked: a token whose target is below 0 has no loss; the sum is
            divided by all tokens even so.
    """
    loss: Tensor = _ChunkedDistillation.apply(h_MD, w_VD, targets_M, teacher, masked)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedDistillation(ChunkedLoss):
    @staticmethod
    def forward(
        ctx: Any,
        h_MD: Tensor,
        w_VD: Tensor,
        targets_M: Tensor,
        teacher: TeacherStates,
        masked: bool,
    ) -> Tensor:
        temperature = teacher.temperature

        def losses_of(logits: Tensor, target: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
            logits = logits.float()
            theirs = (
                widened(torch.mm, teacher.h_MD[chunk], teacher.w_VD.T).float() / temperature
            ).log_softmax(-1)
            ours = (logits / temperature).log_softmax(-1)
            t = theirs.exp()
            losses = temperature**2 * (t * (theirs - ours)).sum(-1, keepdim=True)
            grad = temperature * (ours.exp() - t)
            if teacher.ce:
                log_p = logits.log_softmax(-1)
                index = target.clamp(min=0)
                losses -= teacher.ce * log_p.gather(1, index)
                p = log_p.exp_()
                grad += teacher.ce * subtract_at(p, index, torch.ones_like(index, dtype=p.dtype))
            if masked:
                losses = losses * (target >= 0)
                grad = grad * (target >= 0)
            return losses, grad

        return ChunkedLoss.over_chunks(ctx, h_MD, w_VD, targets_M, losses_of)
