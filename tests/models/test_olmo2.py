"""OLMo 2: norms behind attention and MLP, first weights that do not shrink with depth, refusals.
Logits and gradients are those of transformers (test_families.py).
"""

from typing import Any

import pytest
import torch
from family_models import FamilyChecks, check_drawn
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.olmo2 import Olmo2, Olmo2Model

SMALL: dict[str, Any] = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 48}


def built(**changes: Any) -> Olmo2Model:
    torch.manual_seed(0)
    return Olmo2(**{**SMALL, **changes}).build(vocab_size=60, seq_len=40)


def token_ids(batch: int = 3, time: int = 40) -> Tensor:
    return torch.randint(0, 60, (batch, time), generator=torch.Generator().manual_seed(0))


class TestOlmo2(FamilyChecks):
    @staticmethod
    def model(**changes: Any) -> nn.Module:
        return f4.convert(built(**changes)).eval()

    @staticmethod
    def tokens(batch: int = 3, time: int = 40) -> Tensor:
        return token_ids(batch, time)


def test_attention_and_mlp_read_the_stream_and_add_vectors_of_the_length_of_their_norms() -> None:
    """However long the stream is: pre-norm blocks read a normalised stream and add what it makes."""
    (block, *_) = built().blocks
    inputs: dict[str, Tensor] = {}
    for name in ("attention", "mlp"):
        module = block.get_submodule(name)
        module.register_forward_pre_hook(
            lambda module, args, name=name: inputs.update({name: args[0]})
        )
    with torch.no_grad():
        block.get_parameter("attention_norm.weight").fill_(3.0)
        block.get_parameter("mlp_norm.weight").fill_(0.5)
        model = built()
        angles = model.positions(0, 40, torch.float32)
        stream = 100 * torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1))
        after_mlp = block(stream, *angles)
    after_attention = inputs["mlp"]
    assert inputs["attention"] is stream
    for added, length in ((after_attention - stream, 3.0), (after_mlp - after_attention, 0.5)):
        root_mean_square = added.square().mean(-1).sqrt()
        torch.testing.assert_close(
            root_mean_square, torch.full_like(root_mean_square, length), rtol=1e-3, atol=0
        )


def test_queries_and_keys_of_one_head_shrink_where_those_of_another_grow() -> None:
    """One norm spans all heads; norms per head would not change the other head."""
    attention = built().blocks[0].get_submodule("attention")
    heads = torch.randn(1, 5, 4, 8, generator=torch.Generator().manual_seed(1))
    louder = heads.clone()
    louder[:, :, 0] *= 100
    keys = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        normed: Any = attention.normed  # type: ignore[attr-defined]
        quiet, _ = normed(heads, keys)
        loud, _ = normed(louder, keys)
    assert loud[:, :, 1:].norm() < 0.1 * quiet[:, :, 1:].norm()
    assert loud.square().mean((2, 3)) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "changes", [{"width": 256, "layers": 8}, {"width": 4096, "layers": 1, "head_dim": 8}], ids=str
)
def test_first_weights_do_not_shrink_with_depth_and_width(changes: dict[str, int]) -> None:
    """A norm follows what the blocks add, and would undo it; Llama's shrink by √(2 · layers), and
    are 1/√width from a width of 2500.
    """
    model = built(**changes)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.1), name
        else:
            assert bool((parameter == 1).all()), name


def test_a_model_that_is_drawn_later_has_the_same_weights() -> None:
    check_drawn(Olmo2(**SMALL), built(), 40)


@pytest.mark.parametrize("hidden", [0, -64])
def test_a_width_of_the_mlp_below_1_is_refused(hidden: int) -> None:
    with pytest.raises(ValueError, match=f"model.hidden={hidden} must be at least 1"):
        Olmo2(hidden=hidden)
