"""Llama: causal, rotary positions against a direct formula, grouped queries, published sizes and
initialisation.
"""

import math
from typing import Any

import pytest
import torch
from configured import shape_of
from family_models import FamilyChecks
from torch import Tensor, nn

import fp4train as f4
from fp4train.models import Architecture
from fp4train.models.common import Attention, pre_norm_parameters, rope_angles, rotate
from fp4train.models.llama import Llama, LlamaModel
from fp4train.precision import BF16, NVFP4, autocast

SMALL = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}


def small(**changes: object) -> LlamaModel:
    torch.manual_seed(0)
    return Llama(**{**SMALL, **changes}).build(vocab_size=60, seq_len=16)  # type: ignore[arg-type]


def tokens(batch: int = 2, time: int = 12) -> Tensor:
    return torch.randint(0, 60, (batch, time), generator=torch.Generator().manual_seed(0))


def test_a_block_has_other_names_in_folders_of_other_software() -> None:
    shape = Llama(**SMALL)  # type: ignore[arg-type]
    names = {"attention": "mixer", "attention_norm": "norm1", "mlp_norm": "norm2"}
    specs = pre_norm_parameters(shape, (), **names)
    stored = {spec.name: spec.stored for spec in specs}
    assert stored["attention_norm.weight"] == "norm1.weight"
    assert stored["mlp_norm.weight"] == "norm2.weight"
    assert stored["attention.wo.weight"] == "mixer.o_proj.weight"


def test_a_later_token_changes_no_earlier_logits() -> None:
    model = small()
    x = tokens()
    base = model(x)
    for position in (3, 11):
        changed = x.clone()
        changed[:, position] = (changed[:, position] + 1) % 60
        found = model(changed)
        assert torch.equal(found[:, :position], base[:, :position])
        assert not torch.equal(found[:, position:], base[:, position:])


def test_an_earlier_token_changes_all_later_logits() -> None:
    model = small()
    x = tokens()
    changed = x.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 60
    difference = (model(changed) - model(x)).abs().amax(dim=(0, 2))
    assert bool((difference > 0).all())


def test_a_sequence_does_not_see_its_neighbours_in_the_batch() -> None:
    model = small()
    x = tokens(3)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-5, atol=1e-6)


def test_rotation_is_that_of_complex_numbers() -> None:
    """Pair (i, i + half) of position t is rotated by t·base^(−2i/E), the half-split layout of
    Llama's checkpoints.
    """
    time = 7
    width = 8
    base = 100.0
    x = torch.randn(1, 2, time, width, generator=torch.Generator().manual_seed(0))
    angles = rope_angles(time, width, base)
    found = rotate(x, angles.cos(), angles.sin())
    for t in range(time):
        for i in range(width // 2):
            turned = complex(x[0, 1, t, i], x[0, 1, t, i + width // 2]) * complex(
                math.cos(t * base ** (-2 * i / width)), math.sin(t * base ** (-2 * i / width))
            )
            assert found[0, 1, t, i] == pytest.approx(turned.real, abs=1e-5)
            assert found[0, 1, t, i + width // 2] == pytest.approx(turned.imag, abs=1e-5)


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    angles = rope_angles(32, 8, 10000.0)

    def score(i: int, j: int) -> float:
        return float(
            rotate(q, angles[i].cos(), angles[i].sin())
            @ rotate(k, angles[j].cos(), angles[j].sin())
        )

    assert score(5, 2) == pytest.approx(score(30, 27), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-4)


def test_grouped_queries_equal_repeated_key_and_value_heads() -> None:
    torch.manual_seed(0)
    grouped, full = (Attention(width=32, heads=4, kv_heads=kv_heads) for kv_heads in (2, 4))
    with torch.no_grad():
        full.wq.weight.copy_(grouped.wq.weight)
        full.wo.weight.copy_(grouped.wo.weight)
        for name in ("wk", "wv"):
            heads = getattr(grouped, name).weight.view(2, 8, 32)
            getattr(full, name).weight.copy_(heads[[0, 0, 1, 1]].reshape(32, 32))
    angles = rope_angles(6, 8, 10000.0)
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(
        grouped(x, angles.cos(), angles.sin()), full(x, angles.cos(), angles.sin())
    )


def test_the_head_is_tied_to_the_embedding_or_its_own() -> None:
    tied = small()
    untied = small(tied=False)
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == 64 * 32
    for model in (tied, untied):
        model(tokens(), tokens()).backward()
        assert model.head.weight.grad is not None


def test_weights_start_as_in_gpt2_scaled_for_depth() -> None:
    model = Llama(width=64, layers=8, heads=4, kv_heads=4, hidden=256, tied=False).build(
        vocab_size=512, seq_len=8
    )
    for name, parameter in model.state_dict().items():
        if parameter.dim() == 1:
            assert bool((parameter == 1).all()), "norms begin as the identity"
            continue
        std = 0.02 / math.sqrt(2 * 8) if name.endswith(("wo.weight", "down.weight")) else 0.02
        assert float(parameter.std()) == pytest.approx(std, rel=0.1), name
        assert abs(float(parameter.mean())) < 5 * std / parameter.numel() ** 0.5
    loss = model(torch.randint(0, 512, (64, 8)), torch.randint(0, 512, (64, 8)))
    assert float(loss.detach()) == pytest.approx(math.log(512), abs=0.05), "uniform to begin with"


def test_a_wide_model_starts_smaller() -> None:
    model = Llama(width=4096, layers=1, heads=32, kv_heads=8, hidden=64).build(
        vocab_size=64, seq_len=2
    )
    assert float(model.embed.weight.detach().std()) == pytest.approx(4096**-0.5, rel=0.05)


def test_the_same_seed_gives_the_same_weights() -> None:
    assert all(
        torch.equal(a, b) for a, b in zip(small().parameters(), small().parameters(), strict=True)
    )


def test_the_vocabulary_is_padded_so_that_the_heads_gemm_is_aligned() -> None:
    assert small().embed.weight.shape[0] == 64
    assert (
        Llama(**SMALL, vocab_multiple=1).build(vocab_size=60, seq_len=4).embed.weight.shape[0] == 60
    )


def test_more_tokens_than_the_model_was_made_for_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens exceed the model's seq_len=16"):
        small()(tokens(time=17))


def test_the_loss_is_the_mean_over_all_tokens() -> None:
    model = small()
    x = tokens()
    y = tokens().roll(1)
    expected = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    torch.testing.assert_close(model(x, y), expected)


@pytest.mark.parametrize("recipe", [BF16(), NVFP4()], ids=lambda r: r.name)
def test_a_few_steps_in_low_precision_learn_a_sequence(recipe: BF16) -> None:
    model = f4.convert(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.arange(16).repeat(4, 1)
    losses = []
    for step in range(15):
        with autocast(recipe, step=step):
            loss = model(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 33}, "width=33 is not divisible by model.heads=4"),
        ({"width": 36}, "width=36 over model.heads=4 is 9 per head"),
        ({"kv_heads": 3}, "heads=4 is not divisible by model.kv_heads=3"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"layers": 2_000_000}, "layers=2000000 must be at most 4096"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"hidden": 0}, "hidden=0"),
        ({"vocab_multiple": 0}, "vocab_multiple=0"),
        ({"rope_base": 0.0}, "model.rope_base=0.0 must be finite and above 0"),
        ({"norm_eps": -1.0}, "model.norm_eps=-1.0 must be finite and above 0"),
        ({"norm_eps": math.nan}, "model.norm_eps=nan must be finite and above 0"),
    ],
)
def test_an_impossible_shape_names_the_field(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama(**{**SMALL, **changes})


SIZES = {
    "tiny": 1.2e6,
    "30m": 30e6,
    "125m": 125e6,
    "350m": 350e6,
    "1b": 1.24e9,
    "3b": 3.21e9,
    "8b": 8.03e9,
    "70b": 70.6e9,
    "405b": 405.9e9,
}
VOCABULARY = {"tiny": 257, "30m": 257, "125m": 50304, "350m": 64000}


@pytest.mark.parametrize("size", SIZES)
def test_the_named_sizes_have_the_parameters_they_are_named_after(size: str) -> None:
    shape = shape_of(f"llama_{size}")
    assert isinstance(shape, Llama)
    with torch.device("meta"):
        model = shape.build(vocab_size=VOCABULARY.get(size, 128256), seq_len=8)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(SIZES[size], rel=0.2 if size == "30m" else 0.1)
    assert {shape.width, shape.mlp_width, shape.width * shape.kv_heads // shape.heads} <= set(
        range(0, 1 << 20, 32)
    ), "every GEMM fits the blocks of MXFP8"


def test_it_is_an_architecture() -> None:
    shape: Architecture = Llama(**SMALL)
    assert isinstance(shape.build(vocab_size=8, seq_len=4), nn.Module)


def test_the_default_hidden_width_is_8_3_of_the_width_in_multiples_of_32() -> None:
    assert Llama(width=128, heads=4, kv_heads=2).mlp_width == 352
    assert Llama(width=96, heads=4, kv_heads=2).mlp_width == 256


@pytest.mark.parametrize(
    ("shape", "vocab", "message"),
    [
        (
            {"vocab_size": 59},
            60,
            "the tokenizer has 60 ids, and model.vocab_size=59 rows are fewer",
        ),
        ({"max_positions": 15}, 59, "train.seq_len=16 exceeds model.max_positions=15"),
    ],
)
def test_what_the_model_is_not_made_for_is_refused(
    shape: dict[str, Any], vocab: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Llama(**SMALL, **shape).build(vocab_size=vocab, seq_len=16)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 7}, "model.head_dim=7: rotary embedding needs an even number"),
        ({"head_dim": 0}, "model.head_dim=0 must be at least 1, or null"),
        ({"vocab_size": 0}, "model.vocab_size=0 must be at least 1, or null"),
        ({"max_positions": -1}, "model.max_positions=-1 must be at least 1, or null"),
    ],
)
def test_an_option_out_of_range_is_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Llama(**SMALL, **shape)


def test_the_rows_of_the_vocabulary_can_be_chosen() -> None:
    """More than the tokenizer has ids, and no multiple of anything: as the weights of others have
    them.
    """
    shape = Llama(**SMALL, vocab_size=77)
    model = shape.build(vocab_size=60, seq_len=16)
    assert model.embed.weight.shape[0] == 77


class TestTheLlama(FamilyChecks):
    @staticmethod
    def model(**changes: Any) -> LlamaModel:
        torch.manual_seed(0)
        converted = f4.convert(Llama(**{**SMALL, **changes}).build(vocab_size=60, seq_len=40))
        assert isinstance(converted, LlamaModel)
        return converted.eval()

    @staticmethod
    def tokens(batch: int = 3) -> Tensor:
        return tokens(batch, 40)
