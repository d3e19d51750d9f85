"""Mixtures of experts: the same function as transformers' models, routing at its limits, and what
balances the load.
"""

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from configured import shape_of
from family_models import FamilyChecks, parameters
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.common import DROPPED, Balance, ExpertShape
from fp4train.models.common.experts import ExpertLayer
from fp4train.models.families import family_for, family_of
from fp4train.models.moe import MixtureModel, MixtureOfExperts
from fp4train.nn import LayerCall
from fp4train.precision import BF16, NVFP4, Context, use
from fp4train.run.initial import open_folder

THEIRS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "dense first": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 1.0,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe, tied, without norms of heads": (
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "dots1": (
        "Dots1",
        {
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
}
"""By name: the class of transformers, and what its configuration has besides `THEIRS`."""
WIDTH = 16


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, nn.Module]]:
    """A model of transformers, and ours with the weights of its folder."""
    import transformers

    kind, own = MODELS[request.param]
    folder = tmp_path_factory.mktemp("theirs")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{kind}Config")(**THEIRS, **own)
        )
        with torch.no_grad():
            for each in (
                *theirs.parameters(),
                *(b for n, b in theirs.named_buffers() if n.endswith("_bias")),
            ):
                each.add_(torch.randn_like(each) * 0.1)
    theirs.eval().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    shape = family_for(config).shape_of(config)
    ours = shape.build(vocab_size=128, seq_len=64)
    open_folder(folder, shape).load(ours)
    yield theirs, ours


def test_logits_and_gradients_equal_those_of_transformers(pair: tuple[Any, nn.Module]) -> None:
    theirs, ours = pair
    x = tokens(2, 64)
    with torch.no_grad():
        expected = theirs(input_ids=x).logits
        torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-5)
    assert expected.abs().max() > 1
    F.cross_entropy(theirs(input_ids=x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    ours(x[:, :-1], x[:, 1:]).backward()
    grads = {
        name.replace("block_sparse_moe", "mlp"): p.grad for name, p in theirs.named_parameters()
    }
    for name, theirs_at in loaded_names(ours.shape).items():
        own = ours.get_parameter(name).grad
        assert own is not None
        assert (own - grads[theirs_at]).norm() <= 1e-5 * grads[theirs_at].norm(), name


def loaded_names(shape: Any) -> dict[str, str]:
    """Our parameters, by the names that they have in a loaded model of transformers."""
    found: dict[str, str] = {}
    for name, stored in family_of(shape).names_of(shape).items():
        if isinstance(stored, str):
            copied = family_of(shape).copies_of(shape).get(stored, stored)
            found[name] = copied.replace("block_sparse_moe", "mlp")
        else:
            above = f"model.layers.{name.split('.')[1]}.mlp.experts"
            found[name] = f"{above}.{'gate_up_proj' if 'gate_up' in name else 'down_proj'}"
    return {name: other for name, other in found.items() if not name.endswith(".bias")}


def test_a_configuration_comes_back_as_it_was(pair: tuple[Any, nn.Module]) -> None:
    import transformers

    theirs, ours = pair
    family = family_of(ours.shape)
    written = json.loads(json.dumps(family.config_of(ours.shape, vocab_size=128, seq_len=64)))
    assert family.shape_of(written) == ours.shape
    read = transformers.AutoConfig.for_model(**written)
    if written["model_type"] == theirs.config.model_type:  # dots.llm1 comes back as GLM-4-MoE
        assert read.to_dict().keys() >= theirs.config.to_dict().keys() - {"max_window_layers"}
    for key in (
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "head_dim",
        "intermediate_size",
    ):
        assert getattr(read, key, None) == getattr(theirs.config, key, None)


def test_the_small_mixture_is_written_as_a_model_that_transformers_has() -> None:
    shape = shape_of("moe_tiny")
    written = family_of(shape).config_of(shape, vocab_size=128, seq_len=64)
    assert written["model_type"] == "glm4_moe"
    assert written["architectures"] == ["Glm4MoeForCausalLM"]


def tokens(batch: int, time: int) -> Tensor:
    return torch.randint(0, 128, (batch, time), generator=torch.Generator().manual_seed(0))


class TestTheMixture(FamilyChecks):
    @staticmethod
    def model(**changes: Any) -> MixtureModel:
        torch.manual_seed(0)
        experts = ExpertShape(count=4, top=2, hidden=16, shared=1)
        shape = MixtureOfExperts(
            width=32, layers=3, heads=4, kv_heads=2, dense=1, experts=experts, **changes
        )
        converted = f4.convert(shape.build(vocab_size=60, seq_len=40))
        assert isinstance(converted, MixtureModel)
        return converted.eval()

    @staticmethod
    def tokens(batch: int = 3, time: int = 40) -> Tensor:
        return tokens(batch, time) % 60


# -- routing ---------------------------------------------------------------------------------------


def layer(count: int = 4, top: int = 2, **balance: Any) -> ExpertLayer:
    """A layer of experts with weights of seed 0."""
    torch.manual_seed(0)
    shape = ExpertShape(count=count, top=top, hidden=16, bias=True)
    made = ExpertLayer(WIDTH, shape, Balance(**balance))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    f4.convert(made)
    return made


def one_by_one(made: ExpertLayer, x_BTD: Tensor, taken: Tensor | None = None) -> Tensor:
    """What the layer computes, token after token; `taken` [tokens, experts]: which experts take
    them.
    """
    out = []
    for number, x in enumerate(x_BTD.flatten(0, 1)):
        scores = (made.router.weight @ x).softmax(-1)
        chosen = (scores + made.router.bias).topk(made.router.experts.top).indices
        y = torch.zeros_like(x)
        for expert in chosen.tolist():
            if taken is None or taken[number, expert]:
                gate, up = (made.gate_up.weight[expert] @ x).chunk(2)
                y += (
                    scores[expert]
                    / scores[chosen].sum()
                    * (made.down.weight[expert] @ (F.silu(gate) * up))
                )
        out.append(y)
    return torch.stack(out).view_as(x_BTD)


def training(share: float = 1.0, **settings: Any) -> Any:
    """The context of a pass of training, whose own losses count `share`."""
    return use(Context(recipe=settings.pop("recipe", BF16()), auxiliary=share, **settings))


@pytest.mark.parametrize(
    "bias", [[0.0] * 4, [0.0, -9.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0], [9.0, 8.0, 0.0, 0.0]]
)
def test_each_token_gets_the_experts_that_it_chooses(bias: list[float]) -> None:
    """With an expert that no token goes to, and with one or two that all tokens go to; gradients
    too.
    """
    made = layer()
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    assert made.router.bias is not None
    made.router.bias.copy_(torch.tensor(bias))
    y = made(x)
    expected = one_by_one(made, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    inputs = [x, *made.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chosen", [[9.0, 8.0, 0.0, 0.0], [9.0, -9.0, 8.0, -9.0]])
def test_experts_without_tokens_have_gradients_of_zero_in_nvfp4(chosen: list[float]) -> None:
    made = layer()
    x = torch.randn(2, 32, WIDTH).bfloat16().requires_grad_()
    assert made.router.bias is not None
    made.router.bias.copy_(torch.tensor(chosen))
    with training(recipe=NVFP4(), counts="nothing"):
        made(x).float().square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for weight in (made.gate_up.weight, made.down.weight):
        assert weight.grad is not None and weight.grad.isfinite().all()
        assert [bool(each.any()) for each in weight.grad] == [bias > 1 for bias in chosen]


def test_an_expert_takes_the_first_tokens_of_a_sequence_up_to_its_capacity() -> None:
    """Each sequence by itself, however they are batched; nothing is dropped outside of training."""
    made = layer(top=1, capacity=0.5)
    x = torch.randn(3, 16, WIDTH)
    scores = F.linear(x, made.router.weight).softmax(-1)
    place = F.one_hot(scores.argmax(-1), 4).cumsum(1)
    taken = (place <= 2).flatten(0, 1)  # 0.5 · 16 / 4
    with torch.no_grad(), training(recipe=f4.precision.FP32()):
        torch.testing.assert_close(made(x), one_by_one(made, x, taken), rtol=1e-5, atol=1e-6)
        seen = made.router.seen()
        rows = torch.cat([made(each[None]) for each in x])
        torch.testing.assert_close(rows, one_by_one(made, x, taken), rtol=1e-5, atol=1e-6)
        assert torch.equal(made.router.seen()[:5], seen[:5])
    late = (place.amax(1) - 2).clamp(min=0).sum()
    assert seen[4 + DROPPED] == late > 0 and seen[:4].sum() == 48
    with torch.no_grad():
        torch.testing.assert_close(made(x), one_by_one(made, x), rtol=1e-5, atol=1e-6)


# -- balance ---------------------------------------------------------------------------------------


def test_the_loss_of_balance_is_that_of_each_sequence() -> None:
    """E·Σ f·P with shares and mean probabilities of a sequence, meaned over sequences, and the mean
    of logsumexp².
    """
    made = layer(loss=0.3, z_loss=0.01)
    x = torch.randn(3, 8, WIDTH)
    logits = F.linear(x, made.router.weight)
    p = logits.softmax(-1)
    f = F.one_hot(p.topk(2).indices, 4).sum(2).float().mean(1) / 2
    uneven = 4 * (f * p.mean(1)).sum(1)
    z = logits.logsumexp(-1).square()
    expected = torch.autograd.grad(0.3 * uneven.mean() + 0.01 * z.mean(), made.router.weight)[0]
    with training(0.25):
        weights = made.router(x)[1]
    found = torch.autograd.grad(weights, made.router.weight, torch.zeros_like(weights))[0]
    torch.testing.assert_close(found, 0.25 * expected, rtol=1e-5, atol=1e-7)
    seen = made.router.seen()
    torch.testing.assert_close(
        seen[5:], torch.stack((uneven.sum(), z.mean(1).sum())).double(), rtol=1e-5, atol=0
    )
    assert torch.equal(seen[:4], f.sum(0).double() * 16) and not made.router.seen().any()


def small(**changes: Any) -> MixtureModel:
    shape = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "dense": 0, **changes}
    shape = {"experts": ExpertShape(count=4, top=2, hidden=16, shared=1), **shape}
    torch.manual_seed(0)
    model = f4.convert(MixtureOfExperts(**shape).build(vocab_size=60, seq_len=32))
    assert isinstance(model, MixtureModel)
    return model


def gradients(model: nn.Module, parts: int = 1) -> dict[str, Tensor]:
    x = torch.randint(0, 60, (4, 33), generator=torch.Generator().manual_seed(0))
    for rows in x.chunk(parts):
        with training(1 / parts, recipe=f4.precision.FP32()):
            loss = model(rows[:, :-1], rows[:, 1:])
        (loss / parts).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_neither_microbatches_nor_recomputation_change_gradients_and_loads() -> None:
    """In a model whose losses of balance are large; what is recomputed is seen once."""
    balance = Balance(loss=0.1, z_loss=0.01, capacity=1.0)
    model = small(balance=balance)
    lazy = small(balance=balance, recompute=True)
    whole = gradients(model)
    seen = model.fp4train_routers().seen(torch.device("cpu"))
    assert seen[:, :4].sum() == 2 * 4 * 32 * 2 and seen[:, 4].all()
    for other, parts in ((model, 4), (lazy, 1)):
        found = gradients(other, parts)
        loads = other.fp4train_routers().seen(torch.device("cpu"))
        assert torch.equal(loads[:, :5], seen[:, :5])
        torch.testing.assert_close(loads, seen, rtol=1e-6, atol=0)
        for name, grad in whole.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-7)
    assert any(
        not torch.equal(grad, gradients(small(balance=Balance(loss=0)))[name])
        for name, grad in whole.items()
    )


def test_the_graph_of_a_step_is_freed_with_its_loss() -> None:
    """Experts of a block share a cache with those of later ones, whose tensors hold the graph that
    holds the cache.
    """

    def calls() -> int:
        gc.collect()
        return sum(type(each) is LayerCall for each in gc.get_objects())

    model = small()
    before = calls()
    x = torch.arange(66).view(2, 33) % 60
    with training(recipe=NVFP4()):
        loss = model(x[:, :-1], x[:, 1:])
    assert calls() > before
    del loss
    assert calls() == before


def test_a_bias_evens_the_load_out_and_stays_after_a_step_that_failed() -> None:
    """arXiv:2408.15664 on tokens that lean to some experts: the largest load comes near the
    mean.
    """
    made = layer(count=8, speed=0.01)
    generator = torch.Generator().manual_seed(0)
    router = made.router
    good = torch.tensor(False)
    router.weight.data[0] *= 4
    loads = []
    for _ in range(200):
        with torch.no_grad(), training():
            router(torch.randn(4, 32, WIDTH, generator=generator) + 0.5)
        loads.append(router.seen()[:8])
        router.even_out(loads[-1], good)
    first, last = (torch.stack(each).sum(0) for each in (loads[:20], loads[-20:]))
    assert (first.max() / first.mean()) > 1.5 > 1.15 > last.max() / last.mean()
    assert router.bias is not None
    before = router.bias.clone()
    router.even_out(first, torch.tensor(True))
    assert torch.equal(router.bias, before)
    assert not torch.equal(before, torch.zeros(8)) and "router.bias" in made.state_dict()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts": {"top": 9}}, "model.experts.top=9 exceeds model.experts.count=8"),
        ({"experts": {"scores": "relu"}}, "model.experts.scores='relu'"),
        ({"balance": {"speed": 0.1}}, "model.experts.bias=true"),
        ({"balance": {"capacity": 0.0}}, "model.balance.capacity=0.0 must be finite and above 0"),
        ({"dense": 6}, "model.dense=6 must lie from 0 to below model.layers=6"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    parts = {"experts": ExpertShape, "balance": Balance}
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        MixtureOfExperts(
            **{
                key: parts[key](**value) if key in parts else value
                for key, value in changes.items()
            }
        )


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        {
            "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "vocab_size": 32000,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
}  # fmt: skip
"""Parameters and config.json as published on the Hugging Face hub."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    count, config = PUBLISHED[name]
    assert parameters(family_for(config).shape_of(config), 1) == count
