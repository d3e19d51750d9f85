"""autocast: the recipe of a layer in nested contexts, in other threads, and in backward."""

import threading

import pytest
import torch
from compiled_layers import needs_graphs

from fp4train.models.llama import Llama
from fp4train.nn import Linear, convert
from fp4train.precision import (
    BF16,
    FP32,
    MXFP8,
    NVFP4,
    LayerPolicy,
    activation_dtype,
    autocast,
    current,
)

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def layer() -> Linear:
    torch.manual_seed(0)
    return Linear(32, 48)


def run(layer: Linear, recipe: object) -> torch.Tensor:
    with autocast(recipe, step=0):  # type: ignore[arg-type]
        return layer(X)


def test_outside_of_a_context_the_layer_is_torchs(layer: Linear) -> None:
    assert torch.equal(layer(X), torch.nn.functional.linear(X, layer.weight, layer.bias))


def test_an_inner_context_overrides_and_the_outer_one_returns(layer: Linear) -> None:
    nvfp4 = run(layer, NVFP4())
    mxfp8 = run(layer, MXFP8())
    plain = layer(X)
    assert not torch.equal(nvfp4, mxfp8)
    with autocast(NVFP4(), step=0):
        assert torch.equal(layer(X), nvfp4)
        with autocast(MXFP8(), step=0):
            assert torch.equal(layer(X), mxfp8)
            with autocast(MXFP8(), enabled=False):
                assert torch.equal(layer(X), plain)
            assert torch.equal(layer(X), mxfp8)
        assert torch.equal(layer(X), nvfp4)
    assert current() is None


def test_a_context_ends_when_an_error_passes_through(layer: Linear) -> None:
    with pytest.raises(RuntimeError, match="stop"), autocast(NVFP4()):
        raise RuntimeError("stop")
    assert current() is None


def test_backward_runs_in_the_precision_of_its_forward_whatever_is_active_then(
    layer: Linear,
) -> None:
    def gradients(before: object, during: object) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        y = run(layer, before)
        with autocast(before, step=0, token_offset=0):
            y = layer(x)
        if during is None:
            (y * X.sum(1, keepdim=True)).sum().backward()
        else:
            with autocast(during, step=7):
                (y * X.sum(1, keepdim=True)).sum().backward()
        found = [x.grad.clone(), layer.weight.grad.clone()]
        layer.zero_grad()
        return found

    for recipe in (NVFP4(), MXFP8(), BF16()):
        expected = gradients(recipe, None)
        for other in (MXFP8(), FP32(), NVFP4(hadamard=False)):
            assert all(
                torch.equal(a, b) for a, b in zip(gradients(recipe, other), expected, strict=True)
            )


def test_another_thread_has_a_context_of_its_own(layer: Linear) -> None:
    seen: list[object] = []
    with autocast(NVFP4()):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert seen == [None]
        assert current() is not None


def test_a_class_instead_of_an_object_is_answered_with_the_object_to_write() -> None:
    with pytest.raises(TypeError, match=r"autocast needs NVFP4\(\), not <class"):
        autocast(NVFP4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a recipe object such as NVFP4\(\), not 'nvfp4'"):
        autocast("nvfp4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LayerPolicy object or None"):
        autocast(NVFP4(), policy=LayerPolicy)  # type: ignore[arg-type]


def test_it_decorates_functions_too(layer: Linear) -> None:
    decorated = autocast(NVFP4(), step=0)(layer.forward)  # type: ignore[operator]
    assert torch.equal(decorated(X), run(layer, NVFP4()))
    assert torch.equal(decorated(X), run(layer, NVFP4())), "and more than once"


def test_models_carry_their_activations_in_the_recipes_dtype() -> None:
    assert activation_dtype(torch.float64) == torch.float64
    with autocast(BF16()):
        assert activation_dtype(torch.float64) == torch.bfloat16
        with autocast(FP32()):
            assert activation_dtype(torch.float64) == torch.float32
    model = convert(Llama(width=16, layers=1, heads=2, kv_heads=1).build(vocab_size=8, seq_len=4))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for recipe, dtype in (
        (None, torch.float32),
        (BF16(), torch.bfloat16),
        (NVFP4(dtype="float16"), torch.float16),
    ):
        if recipe is None:
            assert model(tokens).dtype == dtype
            continue
        with autocast(recipe):
            assert model(tokens).dtype == dtype


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "fp4train.precision.context"
    ]
    caplog.clear()
    return found


def judged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4train.precision.context._THREAD", threading.local())


def test_a_region_in_which_no_layer_is_quantised_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged_anew(monkeypatch)
    block = convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)))
    for step in range(2):
        with autocast(NVFP4(), policy=LayerPolicy(last=2), step=step):
            block(X)
    assert messages(caplog) == [
        "autocast(NVFP4): nothing is quantised: the policy keeps every layer that ran (2) in "
        "high precision; "
        "LayerPolicy(last=0) keeps fewer"
    ]
    with autocast(NVFP4(), policy=LayerPolicy(last=0), step=2):
        block(X)
    assert not messages(caplog)


def test_a_model_that_was_not_converted_is_warned_of_and_an_error_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged_anew(monkeypatch)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), autocast(NVFP4()):
            _ = 1 / 0
    assert not messages(caplog)
    for _ in range(2):
        with autocast(NVFP4()):
            torch.nn.Linear(32, 32)(X)
    assert [text.partition(":")[2] for text in messages(caplog)] == [
        " nothing is quantised: no fp4train layer ran in it; fp4train.convert(model) makes them, "
        "fp4train.conversion(model) lists the others"
    ]
    with autocast(BF16()):
        torch.nn.Linear(32, 32)(X)
    assert not messages(caplog), "a recipe in high precision was asked for"


@needs_graphs
def test_an_inner_region_that_quantises_and_compiled_layers_count_for_the_outer_one(
    layer: Linear, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged_anew(monkeypatch)
    with autocast(NVFP4(), policy=LayerPolicy(last=1)), autocast(MXFP8()):
        layer(X)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for recipe in (NVFP4(), MXFP8()):
        with autocast(recipe, step=0):
            compiled(X)
    torch._dynamo.reset()
    assert not messages(caplog)


def test_a_layer_that_ran_before_is_seen_in_the_first_region_of_another_thread(
    layer: Linear, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged_anew(monkeypatch)
    recipe = NVFP4()
    for _ in range(2):
        run(layer, recipe)
    thread = threading.Thread(target=run, args=(layer, recipe))
    thread.start()
    thread.join()
    assert not messages(caplog)
