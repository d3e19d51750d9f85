"""The conversion report: every matrix weight that stays in high precision is listed."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.nn import Conversion
from fp4train.nn.conversion import report


class Experts(nn.Module):
    """Experts stacked in one parameter per projection, as Mixtral and gpt-oss in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, width, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 2 * width))
        self.down_proj = nn.Parameter(torch.zeros(4, width, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o, self.norm = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )
        self.experts = Experts(width)


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(64, width), nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight


def elements(model: nn.Module, *names: str) -> int:
    return sum(p.numel() for n, p in model.named_parameters() if n.endswith(names) and p.dim() > 1)


def test_expert_parameters_are_reported_with_their_share(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING):
        f4.convert(model)
    found = report(model)
    assert [layer.name for layer in found.layers] == [
        *(f"blocks.{i}.{k}" for i in range(3) for k in "qo"),
        "head",
    ]
    assert [weight.name for weight in found.others] == [
        f"blocks.{i}.experts.{key}" for i in range(3) for key in ("gate_up_proj", "down_proj")
    ], "biases, embeddings and norms are no matrices"
    experts = elements(model, "_proj")
    linears = elements(model, "q.weight", "o.weight", "embed.weight")
    assert found.share == pytest.approx(linears / (linears + experts))
    assert (found.others[0].module, found.others[0].shape) == ("blocks.0.experts", (4, 32, 64))
    assert found.others[0].share == pytest.approx(4 * 32 * 64 / (linears + experts))
    (record,) = caplog.records
    assert record.getMessage() == (
        "Model: 82% of the matrix weights are not converted: 6 tensors in blocks.*.experts "
        "(3-D expert parameters); "
        "fp4train.conversion(model) lists them"
    )
    assert str(found).splitlines() == [
        "7 linear layers converted: 18% of the matrix weights",
        "left alone        tensors  shape    share  why",
        "────────────────  ───────  ───────  ─────  ─────────────────────",
        "blocks.*.experts  6        4×32×64  82%    3-D expert parameters",
    ]


def test_nothing_is_said_where_everything_is_converted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = f4.convert(Llama(layers=2).build(vocab_size=64, seq_len=8))
    assert not caplog.records
    assert str(report(model)) == "15 linear layers converted: 100% of the matrix weights"


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_every_kind_of_matrix_has_its_reason() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(32, 32),
            "doubling": Doubling(32, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "cross": nn.MultiheadAttention(32, 2, kdim=16, vdim=16),
            "conv": nn.Conv1d(32, 32, 4),
            "lstm": nn.LSTM(32, 32),
            "bilinear": nn.Bilinear(8, 8, 8),
            "norm": nn.LayerNorm((4, 8)),
            "embed": nn.EmbeddingBag(16, 32),
        }
    )
    found = report(f4.convert(model))
    bypassed = "nn.MultiheadAttention multiplies its weights itself; use separate projections"
    assert {weight.name: weight.why for weight in found.left} == {
        "doubling.weight": "Doubling is a subclass of nn.Linear with a forward of its own",
        "attention.out_proj.weight": bypassed,
        "cross.out_proj.weight": bypassed,
    }
    assert {weight.name: weight.why for weight in found.others} == {
        "attention.in_proj_weight": bypassed,
        "cross.q_proj_weight": bypassed,
        "cross.k_proj_weight": bypassed,
        "cross.v_proj_weight": bypassed,
        "conv.weight": "convolution",
        "lstm.weight_ih_l0": "LSTM is not an nn.Linear",
        "lstm.weight_hh_l0": "LSTM is not an nn.Linear",
        "bilinear.weight": "3-D in Bilinear",
    }
    shares = [weight.share for weight in (*found.left, *found.others)]
    assert found.share + sum(shares) == pytest.approx(1)
    assert found.share == pytest.approx(
        32 * 32 / sum(p.numel() for n, p in model.named_parameters() if matrix(n, p))
    )


def matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not name.startswith(("norm", "embed"))


@pytest.mark.parametrize("rank", [8, 16])
def test_adapters_stay_by_name_whatever_their_rank(rank: int) -> None:
    adapter = nn.ModuleDict(
        {"lora_A": nn.Linear(64, rank, bias=False), "lora_B": nn.Linear(rank, 64, bias=False)}
    )
    found = report(f4.convert(nn.ModuleDict({"base_layer": nn.Linear(64, 64), "adapter": adapter})))
    assert [layer.name for layer in found.layers] == ["base_layer"]
    why = "adapter (lora_{}): kept in high precision by its name"
    assert [weight.why for weight in found.left] == [why.format("A"), why.format("B")]
    assert found.share == pytest.approx(64 * 64 / (64 * 64 + 2 * rank * 64))


def test_every_layer_beside_a_base_layer_is_an_adapter() -> None:
    """peft's other methods name their layers as they like (lily_A, peanut_encoders)."""
    wrapper = nn.ModuleDict(
        {"base_layer": nn.Linear(64, 64), "lily_A": nn.ModuleList([nn.Linear(64, 32)])}
    )
    found = report(f4.convert(nn.ModuleDict({"plain": nn.Linear(64, 64), "wrapped": wrapper})))
    assert [layer.name for layer in found.layers] == ["plain", "wrapped.base_layer"]
    assert [(w.name, w.why) for w in found.left] == [
        ("wrapped.lily_A.0.weight", "adapter (lily_A): kept in high precision by its name")
    ]


def test_a_tied_weight_counts_once() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Linear(32, 32),
            "b": Doubling(32, 32),
            "c": Doubling(32, 32),
            "d": Doubling(32, 32),
        }
    )
    model["b"].weight = model["a"].weight
    model["d"].weight = model["c"].weight
    found = report(f4.convert(model))
    assert [(weight.name, weight.share) for weight in found.left] == [
        ("b.weight", 0),
        ("c.weight", 0.5),
        ("d.weight", 0),
    ]
    assert found.share == 0.5


def test_the_report_is_of_the_model_as_it_is_now() -> None:
    model = Model()
    before = report(model)
    assert before.layers == ()
    assert {weight.why for weight in before.left} == {"convert was not called on it"}
    state = set(vars(model))
    f4.convert(model)
    assert set(vars(model)) == state, "convert leaves nothing on the model"
    assert len(report(model).layers) == 7
    assert report(copy.deepcopy(model)) == report(model)


def test_what_is_no_module_cannot_be_reported_on() -> None:
    with pytest.raises(TypeError, match="not NoneType"):
        report(None)  # type: ignore[arg-type]
    assert Conversion(layers=(), left=(), others=()).summary() == ""
