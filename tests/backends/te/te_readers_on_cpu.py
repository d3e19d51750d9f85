"""Layers on TE's real Python that read one input, and the Python calls of a layer: parts of
te_steps_on_cpu.py.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from te_on_cpu import K, te
from te_products_on_cpu import CPU, made, quantised_from, step_context, tensors
from torch import Tensor, nn

import fp4train
from fp4train.backends import LAYER_BACKENDS
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.parameters import ParameterSpec
from fp4train.precision import Context, Recipe, recompute, resolve, use
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed
from fp4train.quantize import Position, RunStep


class Projections(nn.Module):
    """Three layers that read one x, and one that reads the sum of what they make."""

    def fp4train_parameters(self) -> list[ParameterSpec]:
        """The three layers are one group."""
        return [ParameterSpec(name=f"{letter}.weight", fused="qkv") for letter in "qkv"]

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, out in (("q", 2 * K), ("k", K), ("v", K), ("o", K)):
            layer = nn.Linear(K, out, bias=False)
            nn.init.normal_(layer.weight, std=0.1, generator=generator)
            setattr(self, name, layer)

    changes = False
    """Whether x is another one, in the same memory, for the layers after the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        q = self.q(x)[..., :K]
        if self.changes:
            x.mul_(2)
        y: Tensor = self.o(q + self.k(x) * self.v(x))
        return y


def readers() -> dict[str, Any]:
    """How often x is quantised for layers that read it, the forms that live on for backward, and
    the results beside those of layers that know of no others.
    """
    found: dict[str, Any] = {}
    x = torch.randn(2, 16, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    recipes: dict[str, Recipe] = {"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_current": FP8Current()}
    recipes |= {
        "fp8_delayed": FP8Delayed(history=4),
        "nvfp4, wgrad high": NVFP4().with_high_precision("wgrad"),
    }
    for name, recipe in recipes.items():
        for passes in (
            "plain",
            "recomputed",
            "evaluated",
            *(["changed"] if name == "mxfp8" else []),
        ):
            results: list[list[Tensor]] = []
            for alone in (True, False):
                model = convert(Projections(), backend="te")
                model.changes = passes == "changed"
                layers = [model.q, model.k, model.v, model.o]
                for layer in layers:
                    place = replace(layer.layer, fused=()) if alone else layer.layer
                    layer.rename(place, "te")
                    layer.apply_plan(
                        resolve(place, recipe, None, "te", Device.of(CPU)), recipe, None, CPU
                    )
                for step in range(2):
                    tensors.clear()
                    quantised_from.clear()
                    a = x.clone().requires_grad_()
                    model.zero_grad()
                    context = Context(
                        recipe=recipe,
                        position=Position(RunStep(0, step)),
                        counts="nothing",
                        applied=True,
                    )
                    region = LAYER_BACKENDS["te"].region([recipe.table()], None)
                    with region, use(context), torch.set_grad_enabled(passes != "evaluated"):
                        y = recompute(model, a) if passes == "recomputed" else model(a)
                        seen = sum(shape == (32, K) for shape, _ in quantised_from)
                        gc.collect()
                        kept = [
                            each.usages["rowwise"]
                            for made in tensors
                            if (each := made()) is not None
                        ]
                        if passes != "evaluated":
                            y.backward(torch.ones_like(y))
                gradients = (
                    []
                    if passes == "evaluated"
                    else [a.grad, *(layer.weight.grad for layer in layers)]
                )
                results.append([y.detach(), *gradients])
                if not alone:
                    found[f"{name}, {passes}"] = {"quantised": seen, "rows kept": sum(kept)}
            found[f"{name}, {passes}"]["equal"] = all(map(torch.equal, *results))
            found[f"{name}, {passes}"]["why"] = resolve(
                layers[0].layer, recipe, None, "te", Device.of(CPU)
            ).fprop.why
    return found


def python_calls() -> dict[str, dict[str, int]]:
    """Calls of Python functions by one layer, forward and backward, whose weight is quantised:
    fp4train's and TE's.
    """
    folders = {"fp4train": Path(fp4train.__file__).parent, "te": Path(te.__file__).parent}
    found: dict[str, dict[str, int]] = {}
    for name, recipe in {"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_current": FP8Current()}.items():
        run = made(recipe)
        counts = dict.fromkeys(folders, 0)
        layer = run.model.layers[0]
        x = run.model.table[:32].clone().requires_grad_()

        def watch(frame: Any, event: str, _: Any, counts: dict[str, int] = counts) -> None:
            for which, folder in folders.items():
                counts[which] += event == "call" and Path(frame.f_code.co_filename).is_relative_to(
                    folder
                )

        with run.region():
            for last in (False, False, True):
                with step_context(run):
                    sys.setprofile(watch if last else None)
                    y = layer(x)
                    sys.setprofile(None)
                sys.setprofile(watch if last else None)
                y.backward(torch.ones_like(y))  # on a CPU in this thread
                sys.setprofile(None)
        found[name] = counts
    return found
