"""Layers that read one x as one layer of TE's real Python (te_products_on_cpu.py says what is faked): a program,
started by test_te_joint.py, that prints JSON."""

from __future__ import annotations

import copy
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

import te_calls_on_cpu
import torch
from te_products_on_cpu import added, codes, quantised_from
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
from joint_layers import CPU, SIZES, TOKENS, K, made, normal, within

from fp4train.backends import LAYER_BACKENDS
from fp4train.nn.executors.stacked import rows_of_one
from fp4train.precision import MXFP8, FP8Block, Recipe
from fp4train.precision.context import recompute, use

RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8(),
    "fp8_block": FP8Block(),
    "mxfp8, wgrad high": MXFP8().with_high_precision("wgrad"),
}


def train(
    model: nn.Module, recipe: Recipe, step: int = 0, *, microbatches: int = 2, passes: str = ""
) -> dict[str, Any]:
    """Outputs, dx and gradients of a step, and what its microbatches called."""
    model.zero_grad()
    te_calls_on_cpu.gemms.clear()
    quantised_from.clear()
    x = normal(microbatches, TOKENS, K, seed=11).bfloat16().requires_grad_()
    with LAYER_BACKENDS["te"].region([recipe.table()], None):
        for number, own in enumerate(x.unbind()):
            with use(within(recipe, step)):
                if passes == "recomputed":
                    ys = recompute(lambda given: torch.cat(model(given), dim=1), own).split(SIZES, dim=1)
                else:
                    ys = model(own)
            dys = [normal(*y.shape, seed=20 + number).to(y.dtype) for y in ys]
            torch.autograd.backward(ys, dys)
    found = {"x": x.grad} | {f"y{i}": y.detach() for i, y in enumerate(ys)}
    found |= {name: each.grad.clone() for name, each in model.named_parameters()}
    weights = sum(shape in ((max(SIZES), K), (sum(SIZES), K)) for shape, _ in quantised_from)
    gemms = [each["d"] for each in te_calls_on_cpu.gemms]
    return {"tensors": found, "gemms": gemms, "weights": weights, "added": added(model)}


def together(model: Any) -> bool:
    return rows_of_one([model.wq.weight, model.wk.weight, model.wv.weight]) is not None


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def steps() -> dict[str, Any]:
    """Of each recipe two steps of two microbatches, the weights changed between them, beside the layers apart."""
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        for sums in (False, True):
            for passes in ("plain", "recomputed"):
                results = []
                for joint, in_product in ((True, False), (False, True), (True, True)):
                    model = made(recipe, joint=joint, sums=sums, in_product=in_product, backend="te")
                    train(model, recipe, passes=passes)
                    with torch.no_grad():
                        for each in model.parameters():
                            each.mul_(0.5)
                    results.append(train(model, recipe, step=1, passes=passes))
                by_autograd, apart, one = results
                tensors = apart["tensors"], one["tensors"]
                alike = all(torch.equal(each, by_autograd["tensors"][name]) for name, each in tensors[1].items())
                found[f"{name}, {sums}, {passes}"] = {
                    "differ": sorted(n for n in tensors[0] if not torch.equal(tensors[0][n], tensors[1][n])),
                    "dx": distance(tensors[1]["x"], tensors[0]["x"]),
                    "gemms": [len(apart["gemms"]), len(one["gemms"])],
                    "float32": one["gemms"].count("float32"),
                    "weights": [apart["weights"], one["weights"]],
                    "added": [alike, by_autograd["added"], one["added"]],
                    "together": together(model),
                    "names": list(model.state_dict()) == list(tensors[0])[4:],
                }
    return found


def left(in_product: bool) -> dict[str, Any]:
    """What passes that leave some gradients as they are return and make of them: `torch.autograd.grad` of weights that
    have gradients, of x alone, and backward with `inputs`."""
    recipe, names = MXFP8(), ("wq.weight", "wk.weight", "wv.weight")
    model = made(recipe, joint=True, sums=True, in_product=in_product, backend="te")
    once = train(model, recipe, microbatches=1)["tensors"]
    weights = [model.get_parameter(name) for name in names]
    x = normal(1, TOKENS, K, seed=11)[0].bfloat16().requires_grad_()
    dys = [normal(TOKENS, size, seed=20).bfloat16() for size in SIZES]

    def ys() -> Any:
        with LAYER_BACKENDS["te"].region([recipe.table()], None), use(within(recipe)):
            return model(x)

    def times() -> list[int]:
        """How often each weight's gradient has what one pass adds."""
        return [n for name in names for n in range(4) if torch.equal(model.get_parameter(name).grad, n * once[name])]

    returned = torch.autograd.grad(ys(), weights, dys)
    found: dict[str, Any] = {"dw": [torch.equal(dw, once[name]) for dw, name in zip(returned, names, strict=True)]}
    (some,) = torch.autograd.grad(ys(), weights[1], dys)
    found["one dw"] = torch.equal(some, once[names[1]])
    found["dx"] = torch.equal(torch.autograd.grad(ys(), x, dys)[0], once["x"][0])
    found["left"] = times()
    torch.autograd.backward(ys(), dys, inputs=[x, weights[1]])
    found["added to one"] = times()
    torch.autograd.backward(ys(), dys)
    found["added to all"] = times()
    return found


def memory() -> dict[str, Any]:
    """What becomes of the weights' memory in copies, checkpoints, evaluation, and where something else replaces it."""
    recipe = MXFP8()
    model = made(recipe, joint=True, sums=True, backend="te")
    before = train(model, recipe)["tensors"]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = made(recipe, joint=True, sums=True, backend="te")
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    other.load_state_dict(torch.load(file))
    same = train(other, recipe)["tensors"]
    found: dict[str, Any] = {"loaded": all(torch.equal(before[n], same[n]) for n in before)}
    again = copy.deepcopy(model)
    for module in again.modules():
        if hasattr(module, "apply_plan"):
            own = dict(model.named_modules())[module.layer.name]
            module.apply_plan(own.executor_in(within(recipe), CPU).plan, recipe, None, CPU)
    found["copied"] = torch.equal(train(again, recipe)["tensors"]["wk.weight"], before["wk.weight"])
    model.wk.weight.data = model.wk.weight.data.clone()
    found["replaced"] = [
        together(model),
        torch.equal(train(model, recipe)["tensors"]["x"], before["x"]),
        together(model),
    ]
    x = normal(TOKENS, K, seed=11).bfloat16()
    with torch.no_grad(), use(within(recipe)):
        evaluated = model(x)
    with torch.inference_mode(), use(within(recipe)):
        inferred = model(x)
    found["evaluated"] = [bool(torch.equal(a, b)) for a, b in zip(evaluated, inferred, strict=True)]
    return found


def phases() -> dict[str, Any]:
    """Codes of weights that live after changes between recipes that join the layers and one that does not."""
    from joint_layers import Readers

    from fp4train.hardware import Device
    from fp4train.nn import convert
    from fp4train.precision import FP8Current
    from fp4train.precision.layers import find_layers
    from fp4train.precision.phases import Timeline
    from fp4train.precision.plan import make_plan

    model: Any = convert(Readers(()), backend="te")
    options: dict[str, Any] = {"tokens": TOKENS, "device": Device(type="cpu"), "backend": "te", "joint": True}
    kept = []
    for recipe in (FP8Current(), MXFP8(), FP8Current(), MXFP8()):
        plan = make_plan(find_layers(model).values(), Timeline(recipe=recipe, steps=9), None, **options).stretches[0]
        for module in (model.wq, model.wk, model.wv):
            module.apply_plan(plan.layers[module.layer.name], recipe, None, CPU)
        train(model, recipe)
        gc.collect()
        kept.append(sorted(each.size(0) for each in codes))
    return {"kept": kept}


if __name__ == "__main__":
    gc.freeze()
    found = {"steps": steps(), "memory": memory(), "phases": phases()}
    found["left"] = {str(each): left(each) for each in (True, False)}
    json.dump(found, sys.stdout)
