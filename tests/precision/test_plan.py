"""The plan says what forward and backward then really do."""

import re
from types import ModuleType
from typing import Any

import pytest
import torch

import fp4train.nn.gemms as gemms
from fp4train.backends import BACKENDS
from fp4train.models.llama import Llama
from fp4train.nn import Linear, convert
from fp4train.precision import (
    BF16,
    FP16,
    FP32,
    MXFP8,
    NVFP4,
    FP8Current,
    FP8Row,
    LayerPolicy,
    Mixed,
    Phase,
    Recipe,
    Timeline,
    autocast,
)
from fp4train.precision.layers import Layer, find_layers
from fp4train.precision.plan import Plan, elements, make_plan
from fp4train.precision.recipe import GEMMS, Operands

BATCH, TIME = 2, 8


def model_of(backend: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return convert(
        Llama(width=32, layers=4, heads=2, kv_heads=1, hidden=48).build(vocab_size=60, seq_len=TIME), backend=backend
    )


def plan_of(model: torch.nn.Module, timeline: Timeline, policy: LayerPolicy | None) -> Plan:
    def explain(layer: Layer, recipe: Recipe, gemm: str) -> tuple[str, str]:
        module = model.get_submodule(layer.name)
        assert isinstance(module, Linear)
        return module.explain(recipe, gemm, "cpu")

    return make_plan(find_layers(model).values(), timeline, policy, tokens=BATCH * TIME, explain=explain)


class Observer:
    """Writes down the specs and shapes of each product that a layer runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[tuple[str, str, str]]] = {}
        self.layer = ""
        real = gemms.select

        def select(backend: str, first: Any, second: Any, device: str) -> tuple[ModuleType, str]:
            gemm, why = real(backend, first, second, device)
            name = "torch" if first is None and second is None else gemm.__name__.rpartition(".")[2]
            return self.watching(gemm, name, elements(Operands(first=first, second=second), "bfloat16")), why

        monkeypatch.setattr(gemms, "select", select)

    def watching(self, gemm: ModuleType, name: str, what: str) -> Any:
        observer = self

        class Watched:
            __name__ = gemm.__name__
            prepare = staticmethod(gemm.prepare)

            @staticmethod
            def product(a: Any, b: Any, **options: Any) -> torch.Tensor:
                y: torch.Tensor = gemm.product(a, b, **options)
                columns = a.shape[1] if hasattr(a, "shape") else a.values.shape[1]
                observer.seen.setdefault(observer.layer, []).append(
                    (f"{y.shape[0]}×{y.shape[1]}×{columns}", what, name)
                )
                return y

        return Watched()


POLICIES = [None, LayerPolicy(), LayerPolicy(first=1, last=1, keep=["mlp.down"], recipe_for_kept=MXFP8())]
RECIPES = [
    NVFP4(),
    NVFP4().with_high_precision("fprop"),
    Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=BF16()),
    FP8Current(),
    BF16(),
]


@pytest.mark.parametrize("backend", ["auto", "emulate", "native", "reference"])
@pytest.mark.parametrize("policy", POLICIES, ids=["all", "last15", "mixed"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_row_is_a_product_that_runs(
    recipe: Recipe, policy: LayerPolicy | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Observer(monkeypatch)
    layers = {"blocks.0.mlp.down": (48, 32), "blocks.3.attention.wq": (32, 32), "blocks.3.mlp.up": (32, 48)}
    model = model_of(backend)
    plan = plan_of(model, Timeline(recipe=recipe, steps=1), policy)
    for name, (k, n) in layers.items():
        observer.layer = name
        layer = model.get_submodule(name)
        x = torch.randn(BATCH, TIME, k, requires_grad=True)
        with autocast(recipe, policy=policy, step=0):
            y = layer(x)
        assert y.shape == (BATCH, TIME, n)
        y.sum().backward()
        planned = [row for row in plan.rows if row.layer.name == name]
        assert [row.gemm for row in planned] == list(GEMMS)
        rows = [(row.size, row.elements, row.backend) for row in planned]
        runs = recipe if policy is None else policy.recipe_for(layer.layer, recipe)
        if runs.quantised:
            assert rows == observer.seen[name]
        else:  # torch's own layer runs, and none of ours
            assert name not in observer.seen and {row[1:] for row in rows} == {("BF16·BF16", "torch")}


def test_the_observer_sees_backends_apart() -> None:
    assert set(BACKENDS) == {"emulate", "native", "reference"}


def test_shares_sum_to_one_and_follow_the_sizes() -> None:
    model = model_of("auto")
    plan = plan_of(model, Timeline(recipe=NVFP4(), steps=10), LayerPolicy(last=1))
    shares = plan.shares(0)
    assert sum(shares.values()) == pytest.approx(1)
    layers = find_layers(model)
    macs = {name: layer.in_features * layer.out_features for name, layer in layers.items()}
    kept = sum(m for name, m in macs.items() if name == "head" or name.startswith("blocks.3."))
    assert shares["BF16·BF16"] == pytest.approx(kept / sum(macs.values()))
    assert list(shares) == ["E2M1·E2M1", "BF16·BF16"], "the largest first"


def test_each_stretch_has_its_rows_and_its_reasons() -> None:
    phase = Phase(start="cooldown", recipe=BF16(), gemms=["fprop"])
    timeline = Timeline(recipe=NVFP4(), steps=10, cooldown=8, phases=[phase])
    plan = plan_of(model_of("auto"), timeline, LayerPolicy(last=1))
    assert list(plan.titles) == [0, 8]
    rows = {(r.start, r.layer.name, r.gemm): r for r in plan.rows}
    assert len(rows) == len(plan.rows) == 2 * 3 * len(find_layers(model_of("auto")))
    assert rows[0, "blocks.0.mlp.up", "fprop"].elements == "E2M1·E2M1"
    assert rows[8, "blocks.0.mlp.up", "fprop"].elements == "BF16·BF16"
    assert rows[8, "blocks.0.mlp.up", "fprop"].why == "phase cooldown: fprop in BF16"
    assert rows[8, "blocks.0.mlp.up", "dgrad"].elements == "E2M1·E2M1"
    assert rows[0, "blocks.3.mlp.up", "wgrad"].why == "policy.last=1 (1 of 4 blocks)"
    assert rows[0, "head", "fprop"].why == "outside the blocks"
    kept = plan_of(model_of("auto"), timeline, LayerPolicy(last=1, recipe_for_kept=MXFP8()))
    found = next(r for r in kept.rows if r.layer.name == "blocks.3.mlp.up")
    assert found.elements == "E4M3·E4M3"
    assert found.why.startswith("policy.last=1 (1 of 4 blocks); ")


def unfold(rows: list[list[str]]) -> list[tuple[str, ...]]:
    found = []
    for name, *cells in rows:
        match = re.search(r"(?<![^.])(\d+)–(\d+)(?![^.])", name)
        numbers = range(int(match[1]), int(match[2]) + 1) if match else [None]
        for number in numbers:
            found.append((name if number is None else f"{name[: match.start()]}{number}{name[match.end() :]}", *cells))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    "policy",
    [None, LayerPolicy(), LayerPolicy(first=1, last=0), LayerPolicy(last=0, keep=["blocks.1", "wk"])],
    ids=["all", "last", "first", "keep"],
)
def test_folding_loses_nothing(policy: LayerPolicy | None) -> None:
    torch.manual_seed(0)
    model = convert(Llama(width=16, layers=11, heads=2, kv_heads=1, hidden=16).build(vocab_size=8, seq_len=TIME))
    plan = plan_of(model, Timeline(recipe=NVFP4(), steps=2), policy)

    def body(text: str) -> list[list[str]]:
        return [re.split(r" {2,}", line) for line in text.splitlines()[3:-1]]

    folded, full = body(plan.render()), body(plan.render(full=True))
    assert sorted(unfold(folded)) == sorted(map(tuple, full)) == sorted(r.cells()[1:] for r in plan.rows)
    assert len(folded) < len(full) / 2


def test_the_table_for_trackers_is_unabridged() -> None:
    plan = plan_of(model_of("auto"), Timeline(recipe=NVFP4(), steps=10), LayerPolicy())
    columns, rows = plan.table()
    assert columns == ["steps", "layer", "GEMM", "size", "elements", "backend", "why"]
    assert len(rows) == len(plan.rows)
    assert all(len(row) == len(columns) for row in rows)
    assert rows[0][0] == "0–9"


def test_a_policy_that_names_no_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="matches no linear layer"):
        plan_of(model_of("auto"), Timeline(recipe=NVFP4(), steps=1), LayerPolicy(keep=["nothing"]))


def test_high_precision_is_called_by_the_runs_dtype() -> None:
    for recipe, name in ((FP32(), "FP32·FP32"), (FP16(), "FP16·FP16"), (BF16(), "BF16·BF16")):
        plan = plan_of(model_of("auto"), Timeline(recipe=recipe, steps=1), LayerPolicy())
        assert set(plan.shares(0)) == {name}
        assert {row.backend for row in plan.rows} == {"torch"}


def test_a_backend_that_cannot_says_why_and_what_runs_instead() -> None:
    layer = Linear(32, 32, backend="native")
    assert layer.explain(FP8Row(), "fprop", "cpu") == ("native", "backend=native")
    name, why = layer.explain(NVFP4(), "fprop", "cpu")
    assert name == "emulate"
    assert "FP8 only, not E2M1" in why
    name, why = Linear(32, 32, backend="te").explain(NVFP4(), "fprop", "cpu")
    assert name == "emulate"
    assert "needs a GPU" in why
