"""Attention of the last tokens of a sequence."""

import torch
import torch.nn.functional as F

from fp4train.models.common.lower_right import attend_last


def test_queries_of_the_last_tokens_attend_as_under_a_mask_and_so_do_gradients() -> None:
    torch.manual_seed(0)
    shapes = ((2, 5, 4, 8), (2, 2, 17, 8), (2, 2, 17, 8))
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    q_BHTE = q.transpose(1, 2)
    mask = torch.ones(5, 17, dtype=torch.bool).tril(12)
    y = F.scaled_dot_product_attention(q_BHTE, k, v, attn_mask=mask, enable_gqa=True)
    parts = attend_last(q_BHTE, k, v)
    torch.testing.assert_close(parts, y)
    gradients = torch.autograd.grad(y.square().sum(), (q, k, v))
    torch.testing.assert_close(torch.autograd.grad(parts.square().sum(), (q, k, v)), gradients)
