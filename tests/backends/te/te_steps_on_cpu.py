"""Training steps on TE's real Python (te_products_on_cpu.py says what is faked): a program, started
by test_te_steps.py, that prints JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import te_products_on_cpu as products
import torch
import torch.nn.functional as F
from te_on_cpu import K
from te_products_on_cpu import TOKENS, apply, small_run, step, step_context
from torch import Tensor, nn

from fp4train.backends import LAYER_BACKENDS
from fp4train.nn import convert
from fp4train.parameters import ParameterSpec
from fp4train.precision import Recipe, recompute
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed

NAMED: dict[str, Recipe] = {
    "nvfp4": NVFP4(),
    "nvfp4, fprop high": NVFP4().with_high_precision("fprop"),
    "nvfp4, wgrad high": NVFP4().with_high_precision("wgrad"),
    "mxfp8": MXFP8(),
    "fp8_current": FP8Current(),
    "fp8_block": FP8Block(),
    "fp8_delayed": FP8Delayed(history=4),
}


def gradients() -> dict[str, Any]:
    """What the GEMMs of a step multiply, and how far sums of dw over microbatches lie from exact
    ones.
    """
    answers: dict[str, Any] = {}
    for name, recipe in NAMED.items():
        run = small_run(recipe)
        products.gemms.clear()
        step(run)
        tokens = torch.randint(64, (4, TOKENS), generator=torch.Generator().manual_seed(0))
        x = run.model.table[tokens].double().reshape(-1, K)
        dy = run.model.targets[tokens.flip(1)].bfloat16().double().reshape(-1, K)
        dw = run.model.layers[0].weight.grad
        calls = {(call["gemm"], call["a"], call["b"], call["d"]) for call in products.gemms}
        distance = float((dw.double() - dy.T @ x).norm() / (dy.T @ x).norm())
        answers[name] = {"calls": sorted(calls), "distance": distance}
    return answers


def ways() -> list[bool]:
    """Whether gradients of two layers over four microbatches are the same added by autograd, added
    by the GEMM, and added by it where layers are recomputed.
    """
    gradients = []
    for recomputes, in_product in ((False, False), (False, True), (True, True)):
        run = small_run(NVFP4(), layers=2, in_product=in_product)
        run.model.recomputes = recomputes
        step(run)
        gradients.append([layer.weight.grad for layer in run.model.layers])
    return [all(map(torch.equal, gradients[0], others)) for others in gradients]


def errors() -> dict[str, str]:
    """Those of a pass that is to return dw, and of delayed scaling outside of a region."""
    run = small_run(NVFP4())
    layer = run.model.layers[0]
    x = run.model.table[:32]
    with run.region(), step_context(run.recipe):
        y = layer(x)
    delayed = small_run(NAMED["fp8_delayed"])

    def outside() -> None:
        with step_context(delayed.recipe):
            delayed.model.layers[0](x)

    calls: dict[str, Callable[[], object]] = {
        "dw": lambda: torch.autograd.grad(y, layer.weight, torch.ones_like(y)),
        "no region": outside,
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            messages[name] = str(error)
    return messages


def edges() -> dict[str, Any]:
    """A layer with a bias: what fills no tile, an input in float32, another weight in the place of
    its own, as FSDP2 puts there.
    """
    answers = {}
    x = torch.randn(2, 15, K)
    for name in ("nvfp4", "fp8_block"):
        layer: Any = convert(nn.Sequential(nn.Linear(K, K)), backend="te")[0]
        apply(layer, NAMED[name])
        weight = layer.weight
        products.quantised_from.clear()
        with torch.no_grad(), step_context(NAMED[name]):
            y = layer(x)
            shapes = [list(layer(part).shape) for part in (x[:, :0], x[0, 0])]
            layer.weight = nn.Parameter(torch.zeros_like(weight))
            bias_alone = layer(x)
        exact = F.linear(x.bfloat16().double(), weight.bfloat16().double(), layer.bias.double())
        answers[name] = {
            "tokens": products.quantised_from[0][0][0],
            "dtype": str(y.dtype),
            "distance": float((y - exact).norm() / exact.norm()),
            "shapes": shapes,
            "replaced": torch.equal(bias_alone, layer.bias.bfloat16().float().expand(2, 15, K)),
        }
    return answers


def evaluated(recipe: Recipe, state: Any = None) -> Any:
    """A layer that has run without gradients, which change no history."""
    run = small_run(recipe)
    layer = run.model.layers[0]
    if state is not None:
        layer.load_scaling_state(state)
    with torch.no_grad(), run.region(), step_context(recipe):
        layer(run.model.table)
    return layer


def loaded() -> dict[str, Any]:
    """Scales and histories of a layer that takes over those of four steps, by the length of its
    own; those of a copy, and of a layer that has not run.
    """
    zeros = evaluated(FP8Delayed(history=4)).scaling_state()
    saved = {
        key: torch.arange(4.0)[:, None].expand_as(values).clone()
        if "amax_history" in key
        else torch.full_like(values, 5)
        for key, values in zeros.items()
    }
    layers = {str(n): evaluated(FP8Delayed(history=n), saved) for n in (4, 2)}
    layers["copy"] = copy.deepcopy(layers["4"])
    layers["not run"] = small_run(FP8Delayed(history=4)).model.layers[0]
    layers["not run"].load_scaling_state(saved)
    answers = {}
    for name, layer in layers.items():
        state = layer.states["te"].state()
        history = state["amax_history_fwd"][:, 0].tolist()
        answers[name] = {"history": history, "scale": state["scale_bwd"].tolist()}
    return answers


def outermost() -> str:
    """TE's recipe in a region of several tables."""
    with LAYER_BACKENDS["te"].region([MXFP8().table(), FP8Delayed().table()], None):
        return type(products.manager.get_fp8_recipe()).__name__


def history(run: Any) -> dict[str, list[float]]:
    """The amaxes that entered, the newest first, as fp4train orders them: of x and w of the first
    layer, and dy of the last, which no other product of a layer changes.
    """
    layers = run.model.layers
    if layers[0].backend != "te":
        states = {"x": layers[0], "w": layers[0], "dy": layers[-1]}
        return {
            name: layer.scaling_state()[f"history.{name}"][:3].tolist()
            for name, layer in states.items()
        }
    forward = layers[0].states["te"].state()["amax_history_fwd"][1:].flip(0)
    backward = layers[-1].states["te"].state()["amax_history_bwd"][1:].flip(0)
    newest_first = {"x": forward[:3, 0], "w": forward[:3, 1], "dy": backward[:3, 0]}
    return {name: amaxes.tolist() for name, amaxes in newest_first.items()}


def delayed() -> dict[str, Any]:
    """Histories and updates of three steps, by the rows of a microbatch, those of emulation, and
    those after an evaluation of other sizes.
    """
    recipe = FP8Delayed(history=8)
    answers: dict[str, Any] = {}
    for backend, rows in (("te", 4), ("te", 1), ("emulate", 2)):
        run = small_run(recipe, backend=backend, rows=rows, layers=2)
        products.updates.clear()
        for _ in range(3):
            step(run)
        answers[f"{backend}, {rows}"] = history(run)
        answers[f"updates, {backend}, {rows}"] = list(products.updates)
        if rows == 1:
            with torch.no_grad(), run.region(), step_context(recipe):
                run.model.layers[0](100 * run.model.table)
            answers["evaluated"] = history(run)
    return answers


class Projections(nn.Module):
    """Three layers that read one x, and one that reads the sum of what they make."""

    changes = False
    """Whether x is another one, in the same memory, for the layers after the first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in "qkvo":
            layer = nn.Linear(K, K, bias=False)
            nn.init.normal_(layer.weight, std=0.1, generator=generator)
            setattr(self, name, layer)

    def fp4train_parameters(self) -> list[ParameterSpec]:
        """The three layers are one group."""
        return [ParameterSpec(name=f"{letter}.weight", fused="qkv") for letter in "qkv"]

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        q = self.q(x)
        if self.changes:
            x.mul_(2)
        y: Tensor = self.o(q + self.k(x) * self.v(x))
        return y


def readers() -> dict[str, Any]:
    """How often x is quantised for layers that read it, and whether the results are those of
    layers that know of no others.
    """
    answers: dict[str, Any] = {}
    x = torch.randn(2, 16, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name in ("nvfp4", "mxfp8", "fp8_current", "fp8_delayed"):
        recipe = NAMED[name]
        for passes in ("plain", "recomputed", "changed"):
            results: list[list[Any]] = []
            for alone in (True, False):
                model = convert(Projections(), backend="te")
                model.changes = passes == "changed"
                for layer in model.children():
                    place = replace(layer.layer, fused=()) if alone else layer.layer
                    layer.rename(place, "te")
                    apply(layer, recipe)
                products.quantised_from.clear()
                a = x.clone().requires_grad_()
                with LAYER_BACKENDS["te"].region([recipe.table()], None), step_context(recipe):
                    y = recompute(model, a) if passes == "recomputed" else model(a)
                    count = sum(shape == (32, K) for shape, _ in products.quantised_from)
                    y.backward(torch.ones_like(y))
                results.append([y, a.grad, *(layer.weight.grad for layer in model.children())])
            answers[f"{name}, {passes}"] = [count, all(map(torch.equal, *results))]
    return answers


if __name__ == "__main__":
    report = {
        "gradients": gradients(),
        "ways": ways(),
        "errors": errors(),
        "edges": edges(),
        "loaded": loaded(),
        "outermost": outermost(),
        "delayed": delayed(),
        "readers": readers(),
    }
    json.dump(report, sys.stdout)
