"""Training steps on TE's real Python (te_products_on_cpu.py says what is faked): a program, started
by test_te_steps.py, that prints JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import te_calls_on_cpu
import torch
from te_on_cpu import K
from te_products_on_cpu import (
    CPU,
    TOKENS,
    added,
    apply,
    codes,
    made,
    manager,
    quantised_from,
    step,
    step_context,
    updates,
)
from te_readers_on_cpu import python_calls, readers
from torch import Tensor, nn

from fp4train.nn import Gathered
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed


def history(run: Any) -> dict[str, list[float]]:
    """The amaxes of x, w and dy that entered, the newest first, as fp4train orders them."""
    layer = run.model.layers[0]
    if layer.backend != "te":
        return {
            name: layer.scaling_state()[f"history.{name}"].tolist() for name in ("x", "w", "dy")
        }
    state = layer.states["te"].state()
    forward = state["amax_history_fwd"]
    backward = state["amax_history_bwd"]
    newest_first = {"x": forward[1:, 0], "w": forward[1:, 1], "dy": backward[1:, 0]}
    return {name: each.flip(0).tolist() for name, each in newest_first.items()}


def delayed() -> dict[str, Any]:
    """Histories, scales and updates of three steps, by the rows of a microbatch; and those of
    emulation.
    """
    recipe = FP8Delayed(history=8)
    found: dict[str, Any] = {}
    for rows in (4, 2, 1):
        run = made(recipe, rows=rows)
        counts = []
        for _ in range(3):
            updates.clear()
            step(run)
            counts.append(sorted(updates))
        scales = run.model.layers[0].states["te"].state()
        names = ("scale_fwd", "scale_bwd")
        found[str(rows)] = {
            "updates": counts,
            "history": {name: each[:3] for name, each in history(run).items()},
            "scales": [scales[name].tolist() for name in names],
        }
    emulated = made(recipe, backend="emulate", rows=2)
    for _ in range(3):
        step(emulated)
    found["emulated"] = {name: each[:3] for name, each in history(emulated).items()}
    return found


def stages() -> list[list[Any]]:
    """What is joined over which ranks, and when, where a step runs on a stage of a pipeline."""
    manager.reset()  # the histories of the models before
    run = made(FP8Delayed(history=4), rows=2)
    run.world.peers = "the ranks of a stage"
    told: list[list[Any]] = []
    plain = manager.reduce_tensor_across_group_op_max
    distributed = torch.distributed
    initialised = distributed.is_initialized
    size = distributed.get_world_size
    backward = Tensor.backward

    def noting(self: Tensor, *rest: Any, **options: Any) -> None:
        backward(self, *rest, **options)
        told.append(["a backward pass ends"])

    manager.reduce_tensor_across_group_op_max = staticmethod(
        lambda tensor, group: told.append(["joined over", group])
    )
    distributed.is_initialized = lambda: True
    distributed.get_world_size = lambda group=None: 2
    Tensor.backward = noting  # type: ignore[method-assign]
    try:
        step(run)
    finally:
        manager.reduce_tensor_across_group_op_max = plain
        distributed.is_initialized = initialised
        distributed.get_world_size = size
        Tensor.backward = backward  # type: ignore[method-assign]
    return told


def exact(run: Any) -> Tensor:
    """The first layer's gradient of the step before, in float64, of the operands that the GEMM
    had.
    """
    generator = torch.Generator().manual_seed(run.step - 1)
    tokens = torch.randint(64, (4, TOKENS), generator=generator)
    x = run.model.table[tokens].double().reshape(-1, K)
    dy = run.model.wanted[tokens.flip(1)].bfloat16().double().reshape(-1, K)
    return dy.T @ x


def gradients() -> dict[str, Any]:
    """How far sums of dw over microbatches lie from exact ones, and into what the GEMM wrote
    them.
    """
    found: dict[str, Any] = {}
    for name, recipe in {
        **{
            "nvfp4": NVFP4(),
            "mxfp8": MXFP8(),
            "fp8_current": FP8Current(),
            "fp8_delayed": FP8Delayed(history=4),
        },
        "nvfp4, wgrad high": NVFP4().with_high_precision("wgrad"),
    }.items():
        run = made(recipe, layers=1)
        distances = []
        written = []
        for _ in range(2):
            te_calls_on_cpu.gemms.clear()
            step(run)
            dw = run.model.layers[0].weight.grad
            wanted = exact(run)
            distances.append(float((dw.double() - wanted).norm() / wanted.norm()))
            written += [each["d"] for each in te_calls_on_cpu.gemms if each["gemm"] == "wgrad"]
        found[name] = {"distances": distances, "written": written, "dtype": str(dw.dtype)}
    alone = made(NVFP4(), rows=4, sums=False)
    te_calls_on_cpu.gemms.clear()
    step(alone)
    found["one microbatch"] = [
        each["d"] for each in te_calls_on_cpu.gemms if each["gemm"] == "wgrad"
    ]
    return found


def ways() -> dict[str, Any]:
    """Gradients of two layers over four microbatches, recomputed or not, added by the GEMM or by
    autograd; and how many GEMMs wrote to where they are.
    """
    found: dict[str, Any] = {}
    for name, recipe in {"nvfp4": NVFP4(), "fp8_delayed": FP8Delayed(history=4)}.items():
        gradients = []
        counts = []
        for recomputes, in_product in ((False, False), (False, True), (True, True)):
            run = made(recipe, layers=2, in_product=in_product)
            run.model.recomputes = recomputes
            te_calls_on_cpu.gemms.clear()
            step(run)
            gradients.append([each.weight.grad for each in run.model.layers])
            counts.append(added(run.model))
        equal = [all(map(torch.equal, gradients[0], each)) for each in gradients]
        found[name] = {"added": counts, "equal": equal}
    return found


def left() -> dict[str, Any]:
    """What passes that leave the weight's gradient as it is make of it, and the error of one that
    is to return dw.
    """
    run = made(NVFP4())
    layer = run.model.layers[0]
    x = run.model.table[:32].clone().requires_grad_()
    for _ in range(2):
        with run.region(), step_context(run):
            y = layer(x)
            if layer.weight.grad is None:
                y.backward(torch.ones_like(y))
    before = layer.weight.grad.clone()
    dx = x.grad.clone()
    found: dict[str, Any] = {}
    found["dx"] = torch.equal(
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0], dx
    )
    found["dw"] = torch.equal(layer.weight.grad, before)
    with run.region(), step_context(run):
        y = layer(x)
    try:
        torch.autograd.grad(y, layer.weight, torch.ones_like(y))
    except RuntimeError as error:
        found["error"] = str(error)
    return found | {"then": torch.equal(layer.weight.grad, before)}


def orders() -> dict[str, float]:
    """A gradient of two passes whose backward passes follow both, the second first; and of a weight
    that is a view.
    """
    run = made(NVFP4())
    layer = run.model.layers[0]
    x = [run.model.table[i : i + 32].clone().requires_grad_() for i in (0, 32)]
    with run.region(), step_context(run):
        y = [layer(each) for each in x]
        gc.collect()
        for each in reversed(y):
            each.backward(torch.ones_like(each))
    wanted = sum(torch.ones(32, K).T @ each.detach().float() for each in x)
    found = {"last first": float((layer.weight.grad - wanted).abs().max())}
    tied = run.model.layers[0]
    tied.register_parameter("turned", nn.Parameter(tied.weight.detach().T.contiguous()))
    view = tied.turned.T
    rows = x[0].detach().clone().requires_grad_()
    del tied._parameters["weight"]
    tied.weight = view
    with run.region(), step_context(run):
        tied(rows).backward(torch.ones(32, K, dtype=torch.bfloat16))
    wanted = torch.ones(32, K).T @ rows.detach().float()
    return found | {"of a view": float((tied.turned.grad.T - wanted).abs().max())}


class Source:
    """A weight whose memory is there in a pass only, as FSDP's is (`WeightGather`)."""

    rounds = True

    def __init__(self, weight: Tensor) -> None:
        self.kept, self.memory = weight.bfloat16(), weight.bfloat16()

    def values(self, dtype: torch.dtype) -> Tensor:
        assert dtype == torch.bfloat16 and self.memory.untyped_storage().size()
        return self.memory

    def free(self) -> None:
        self.memory.untyped_storage().resize_(0)

    def fill(self) -> None:
        """As FSDP does: same tensor, same storage, and autograd is not told (_fsdp_collectives.py
        foreach_all_gather_copy_out)."""
        self.memory.untyped_storage().resize_(self.kept.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.memory):
            self.memory.copy_(self.kept)


def gathered() -> dict[str, Any]:
    """A layer whose weight is gathered for each pass: what lives between forward and backward, and
    the gradients.
    """
    found: dict[str, Any] = {}
    for name, recipe in {
        "nvfp4": NVFP4(),
        "mxfp8": MXFP8(),
        "fp8_delayed": FP8Delayed(history=4),
    }.items():
        run = made(recipe)
        layer = run.model.layers[0]
        layer.weight.data = layer.weight.data.bfloat16().float()
        x = run.model.table[:32].clone()
        results = []
        for shared in (False, True):
            source = Source(layer.weight.detach())
            weight = layer.weight
            if shared:
                layer.keeps_forms = False
                weight = nn.Parameter(Gathered(source, weight.shape, CPU))  # type: ignore[arg-type]
                layer._parameters["weight"] = weight
            run.step += 1
            codes.clear()
            quantised_from.clear()
            a = x.clone().requires_grad_()
            with run.region(), step_context(run):
                y = layer(a)
                gc.collect()
                if shared:
                    found[name] = {
                        "copies of the weight": sum(
                            shape == (K, K) and at != source.memory.untyped_storage().data_ptr()
                            for shape, at in quantised_from
                        ),
                        "codes of the weight between": sum(
                            tuple(each.shape) == (K, K) for each in codes
                        ),
                    }
                    source.free()
                    source.fill()
                y.backward(torch.ones_like(y))
            results.append((y.detach(), a.grad, weight.grad))
        plain, of_shards = results
        found[name]["equal"] = [
            bool(torch.equal(p, q)) for p, q in zip(plain, of_shards, strict=True)
        ]
    return found


def phases() -> dict[str, Any]:
    """The codes of weights that live after a change of the recipe and back."""
    run = made(MXFP8(), layers=2, rows=2)
    found: dict[str, Any] = {"kept": []}
    for recipe in (MXFP8(), FP8Current(), MXFP8()):
        apply(run, recipe)
        step(run)
        gc.collect()
        found["kept"].append(sum(tuple(each.shape) == (K, K) for each in codes))
    found["modules"] = len(run.model.layers[0].states["te"]._built)
    run = made(FP8Delayed(history=4))
    for _ in range(2):
        step(run)
    before = history(run)["x"]
    apply(run, FP8Delayed(history=8))
    step(run)
    return found | {"amaxes": [before[:2], history(run)["x"][1:3]]}


if __name__ == "__main__":
    gc.freeze()  # collections look at what the cases made, and not at all that was imported
    report = {
        "delayed": delayed(),
        "stages": stages(),
        "gradients": gradients(),
        "ways": ways(),
        "left": left(),
        "orders": orders(),
        "gathered": gathered(),
        "phases": phases(),
        "readers": readers(),
        "calls": python_calls(),
    }
    json.dump(report, sys.stdout)
