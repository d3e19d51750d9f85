"""Forward and backward run what the plan says."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from resolving import refuse_resolving

import fp4train as f4
from fp4train.backends import BACKENDS, GEMMS
from fp4train.hardware import Device
from fp4train.models.llama import Llama
from fp4train.nn import Linear, convert
from fp4train.precision import (
    BF16,
    FP16,
    FP32,
    MXFP8,
    NVFP4,
    Context,
    FP8Current,
    LayerPolicy,
    Mixed,
    Phase,
    Plan,
    Recipe,
    Timeline,
    autocast,
    find_layers,
    make_plan,
    resolve,
    use,
)
from fp4train.precision.report import cells, render, table

BATCH = 2
TIME = 8
CPU = Device(type="cpu")


def model_of(backend: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return convert(
        Llama(width=32, layers=4, heads=2, kv_heads=1, hidden=48).build(
            vocab_size=60, seq_len=TIME
        ),
        backend=backend,
    )


def plan_of(model: torch.nn.Module, timeline: Timeline, policy: LayerPolicy | None) -> Plan:
    backends = {name: model.get_submodule(name).backend for name in find_layers(model)}
    return make_plan(
        find_layers(model).values(),
        timeline,
        policy,
        tokens=BATCH * TIME,
        device=CPU,
        backend=backends,
    )


class Observer:
    """Records the shapes and the backend of each product that a layer runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        self.layer = ""
        for name, backend in BACKENDS.items():
            monkeypatch.setattr(
                backend, "product", self.watching(name, backend.product), raising=False
            )

    def watching(self, name: str, product: Any) -> Any:
        def watched(a: Any, b: Any, **options: Any) -> torch.Tensor:
            y: torch.Tensor = product(a, b, **options)
            columns = a.shape[1] if hasattr(a, "shape") else a.values.shape[1]
            self.seen.setdefault(self.layer, []).append(((y.shape[0], y.shape[1], columns), name))
            return y

        return watched


POLICIES = [
    None,
    LayerPolicy(),
    LayerPolicy(first=1, last=1, keep=["mlp.down"], recipe_for_kept=MXFP8()),
]
RECIPES = [
    NVFP4(),
    NVFP4().with_high_precision("fprop"),
    Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=BF16()),
    FP8Current(),
    BF16(),
]


@pytest.mark.parametrize("backend", ["auto", "emulate", "reference"])
@pytest.mark.parametrize("policy", POLICIES, ids=["all", "last15", "mixed"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_row_is_a_product_that_runs(
    recipe: Recipe, policy: LayerPolicy | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Observer(monkeypatch)
    layers = {
        "blocks.0.mlp.down": (48, 32),
        "blocks.3.attention.wq": (32, 32),
        "blocks.3.mlp.up": (32, 48),
    }
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
        rows = [(row.size, row.backend) for row in planned]
        runs = recipe if policy is None else policy.recipe_for(layer.layer, recipe)
        assert [row.elements for row in planned] == [
            o.elements("bfloat16") for o in runs.table().values()
        ]
        if runs.quantised:
            assert rows == observer.seen[name]
        else:  # torch's layer runs, without a backend of fp4train
            assert name not in observer.seen and {row[1] for row in rows} == {"torch"}


def test_native_products_are_native_and_what_the_policy_keeps_is_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test_every_row_is_a_product_that_runs(FP8Current(), LayerPolicy(), "native", monkeypatch)


def test_a_backend_that_cannot_is_refused_when_the_plan_is_made() -> None:
    for backend, word in (("native", "NVFP4 on NVIDIA GPUs only"), ("te", "needs an NVIDIA GPU")):
        with pytest.raises(ValueError, match=word):
            plan_of(model_of(backend), Timeline(recipe=NVFP4(), steps=1), None)


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
    assert [stretch.start for stretch in plan.stretches] == [0, 8]
    rows = {(r.start, r.layer.name, r.gemm): r for r in plan.rows}
    assert len(rows) == len(list(plan.rows)) == 2 * 3 * len(find_layers(model_of("auto")))
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
    for name, *others in rows:
        match = re.search(r"(?<![^.])(\d+)–(\d+)(?![^.])", name)
        numbers = range(int(match[1]), int(match[2]) + 1) if match else [None]
        for number in numbers:
            found.append(
                (
                    name
                    if number is None
                    else f"{name[: match.start()]}{number}{name[match.end() :]}",
                    *others,
                )
            )  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    "policy",
    [
        None,
        LayerPolicy(),
        LayerPolicy(first=1, last=0),
        LayerPolicy(last=0, keep=["blocks.1", "wk"]),
    ],
    ids=["all", "last", "first", "keep"],
)
def test_folding_loses_nothing(policy: LayerPolicy | None) -> None:
    torch.manual_seed(0)
    model = convert(
        Llama(width=16, layers=11, heads=2, kv_heads=1, hidden=16).build(vocab_size=8, seq_len=TIME)
    )
    plan = plan_of(model, Timeline(recipe=NVFP4(), steps=2), policy)

    def body(text: str) -> list[list[str]]:
        return [re.split(r" {2,}", line) for line in text.splitlines()[3:-1]]

    folded = body(render(plan.sections))
    full = body(render(plan.sections, full=True))
    assert (
        sorted(unfold(folded))
        == sorted(map(tuple, full))
        == sorted(cells(r)[1:] for r in plan.rows)
    )
    assert len(folded) < len(full) / 2


def test_the_table_for_trackers_is_unabridged() -> None:
    plan = plan_of(model_of("auto"), Timeline(recipe=NVFP4(), steps=10), LayerPolicy())
    columns, rows = table(plan.rows)
    assert columns == ["steps", "layer", "GEMM", "size", "elements", "backend", "why"]
    assert len(rows) == len(list(plan.rows))
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


def test_a_layer_alone_is_resolved_by_the_same_function() -> None:
    layer = Linear(32, 32).layer
    assert resolve(layer, FP8Current(), None, "native", CPU).fprop.why == "backend=native"
    with pytest.raises(
        ValueError, match=r"GPUs only, not on cpu\. backend=auto would run it by emulate"
    ):
        resolve(layer, NVFP4(), None, "native", CPU)


def test_the_plan_of_anyones_model_is_the_one_that_runs_after_conversion() -> None:
    shape = Llama(width=32, layers=4, heads=2, kv_heads=1, hidden=48)
    plain = shape.build(vocab_size=60, seq_len=TIME)
    before = f4.plan(plain, NVFP4(), LayerPolicy(last=1), tokens=16)
    after = f4.plan(convert(plain), NVFP4(), LayerPolicy(last=1), tokens=16)
    assert list(before.rows) == list(after.rows)
    assert [line.split("  ")[1] for line in str(after).splitlines()[1:]] == [
        "blocks 0–2",
        "block 3",
        "head",
    ]
    assert len(after.render(full=True).splitlines()) == 4 + len(list(after.rows))
    with pytest.raises(ValueError, match="has no linear layer"):
        f4.plan(torch.nn.ReLU(), NVFP4())


def test_applied_plans_are_what_layers_run_and_nothing_is_resolved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("auto")
    recipe = NVFP4()
    policy = LayerPolicy(last=1)
    stretch = f4.plan(model, recipe, policy).at(0)
    for module in model.modules():
        if isinstance(module, Linear):
            module.apply_plan(
                stretch.layers[module.layer.name], recipe, policy, torch.device("cpu")
            )
    refuse_resolving(monkeypatch)
    tokens = torch.zeros(1, TIME, dtype=torch.int64)
    with autocast(recipe, policy=policy, step=0):
        assert model(tokens, tokens).isfinite()


def test_in_a_context_of_an_applied_plan_another_recipe_is_an_error_and_autocast_goes_on_resolving() -> (
    None
):
    layer = Linear(32, 32)
    x = torch.randn(8, 32)
    device = torch.device("cpu")
    context = Context(recipe=NVFP4(), counts="tokens", applied=True)
    with (
        use(context),
        pytest.raises(RuntimeError, match=r"called in NVFP4 on cpu, .* is none: apply the plan"),
    ):
        layer(x)
    layer.apply_plan(resolve(layer.layer, NVFP4(), None, "auto", CPU), NVFP4(), None, device)
    with use(context):
        wanted = layer(x)
        with autocast(BF16()):
            assert not torch.equal(layer(x), wanted), "a nested context overrides, and is resolved"
        assert torch.equal(layer(x), wanted)
    for other in (replace(context, recipe=BF16()), replace(context, policy=LayerPolicy())):
        with (
            use(other),
            pytest.raises(
                RuntimeError, match=r"is that of NVFP4: apply the plan of the coming stretch"
            ),
        ):
            layer(x)
        with autocast(other.recipe, policy=other.policy, step=0):
            layer(x)
        with use(other), pytest.raises(RuntimeError, match="is that of NVFP4"):
            layer(x)  # what autocast resolved is no plan that was applied
    with use(context):
        assert torch.equal(layer(x), wanted)
    layer.rename(layer.layer, "auto")
    with autocast(NVFP4(), step=0):
        assert torch.equal(layer(x), wanted)


def test_the_plan_of_the_rest_begins_where_it_is_asked_for() -> None:
    model = torch.nn.ModuleDict(
        {"blocks": torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(2)])}
    )
    whole = f4.plan(model, NVFP4(), phases=[Phase(start=4, recipe=BF16())], steps=8)
    assert [(s.start, s.stop) for s in whole.stretches] == [(0, 4), (4, 8)]
    assert [(s.start, s.stop) for s in whole.since(2).stretches] == [(2, 4), (4, 8)]
    assert [(s.start, s.stop) for s in whole.since(6).stretches] == [(6, 8)]
    assert whole.since(6).at(7).recipe == whole.at(7).recipe and whole.since(0) == whole
