"""Training steps on TE's real Python with an extension that multiplies: a program, started by test_te_steps.py, that
prints JSON, and a patch of the ranks of tests/distributed/test_te.py.

Besides what te_calls_on_cpu.py fakes: quantising rounds to BF16, and the GEMM is one in float64, whose result is added
to what it is given where TE asks for that (cublaslt_gemm.cu: `accumulate` is β = 1). Histories are rolled by TE's own
Python (quantization.py _amax_and_scale_update, which NVTE_UNFUSED_FP8_UPDATE=1 chooses), amaxes enter by a maximum
(quantize_fp8.cuh, cast_transpose.cu: atomicMaxFloat).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import te_calls_on_cpu
import torch
import transformer_engine_torch as tex
from te_on_cpu import K, pretend_gpu, te
from torch import Tensor, nn
from transformer_engine.pytorch.cpp_extensions import gemm as cpp_gemm
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer

import fp4train
from fp4train.backends import LAYER_BACKENDS
from fp4train.backends.te import TEExecutor, executor
from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.nn.weights import Gathered
from fp4train.precision.context import Context, recompute, use
from fp4train.precision.plan import resolve
from fp4train.precision.recipe import Recipe
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed
from fp4train.run.run import Run
from fp4train.run.step import train_losses

os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"

torch.cuda.current_device = lambda: 0  # quantisers are copied in backward, where nothing else looks for a GPU
CPU = torch.device("cpu")
TOKENS = 32
"""Of a row."""
codes: weakref.WeakSet[Any] = weakref.WeakSet()
"""All quantised tensors that are alive."""
tensors: list[weakref.ref[Any]] = []
"""All `TensorCodes`."""
quantised_from: list[tuple[tuple[int, ...], int]] = []
"""Shape and address of every tensor that was quantised."""


class TensorCodes(QuantizedTensorStorage, QuantizedTensor):
    """What a quantiser of x makes that is not `internal`: a tensor for autograd (quantized_tensor.py Quantizer; detach
    and update_usage of tensor/*_tensor.py). It has the forms that were asked for; what it gave up is not remade."""

    def __new__(cls, values: Tensor, quantizer: Any, usages: dict[str, bool]) -> TensorCodes:
        made: Any = QuantizedTensor.__new__(cls, values.shape, values.dtype, device=values.device)
        made.values, made._quantizer, made.usages = values, quantizer, dict(usages)
        tensors.append(weakref.ref(made))
        return made  # type: ignore[no-any-return]

    def __init__(self, *_: Any) -> None:
        pass

    def detach(self) -> TensorCodes:
        return TensorCodes(self.values, self._quantizer, self.usages)

    def get_usages(self) -> dict[str, bool]:
        return self.usages

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        for name, wanted in (("rowwise", rowwise_usage), ("columnwise", columnwise_usage)):
            assert not wanted or self.usages[name], f"the {name} form is not there"
            self.usages[name] &= wanted is not False


shared_input: list[bool] = []
"""Not empty while an input is quantised for all layers that read it."""
codes_of = executor._Built.codes_of


def codes_of_input(*arguments: Any) -> Tensor:
    shared_input.append(True)
    try:
        return codes_of(*arguments)
    finally:
        shared_input.pop()


executor._Built.codes_of = codes_of_input  # type: ignore[method-assign]


def quantise(x: Tensor, quantizer: Any, *_: Any) -> Any:
    if shared_input:
        made = TensorCodes(x.detach().to(torch.bfloat16), quantizer, Quantizer.get_usages(quantizer))
    else:  # TE's weights are tensors, too, which nothing here looks at
        made = te_calls_on_cpu.quantise(x, quantizer)
        made.values = x.detach().to(torch.bfloat16)
        codes.add(made)
    quantised_from.append((tuple(x.shape), x.untyped_storage().data_ptr()))
    return made


def gemm(a: Any, transa: bool, b: Any, transb: bool, out: Any, _: Any, out_dtype: Any, *rest: Any, **__: Any) -> Any:
    """cuBLASLt's D = A·B, or D += A·B, column by column: row by row it is D = op(b)·op(a)."""
    accumulate = rest[7]  # after bias, its dtype, gelu, its input, grad, the workspace and its size
    a, b = (each.values if isinstance(each, (te_calls_on_cpu.Codes, TensorCodes)) else each for each in (a, b))
    product = ((b.T if transb else b).double() @ (a.T if transa else a).double()).float()
    found = te_calls_on_cpu.TE_DTYPES[out_dtype] if out is None else str(out.dtype).removeprefix("torch.")
    te_calls_on_cpu.gemms.append({"gemm": "wgrad" if transb else "fprop" if transa else "dgrad", "d": found})
    if out is None:
        return product.to(getattr(torch, found)), None, None, None
    return (out.add_(product) if accumulate else out.copy_(product)), None, None, None


cpp_gemm._NATIVE_GEMM_INPUT_STORAGES += (TensorCodes,)
call = TEExecutor.__call__


def on_a_gpu(*arguments: Any, **options: Any) -> Tensor:
    with pretend_gpu():
        return call(*arguments, **options)


TEExecutor.__call__ = on_a_gpu  # type: ignore[method-assign]
tex.quantize, tex.generic_gemm = quantise, gemm
tex.bgrad_quantize = lambda dy, quantizer: (dy.sum(0), quantise(dy, quantizer))
updates: list[str] = []
"""Direction of each update of histories."""
manager = te.quantization.FP8GlobalStateManager
roll = manager.reduce_and_update_fp8_tensors


def noted(cls: Any, forward: bool = True) -> None:
    if any(key.startswith("forward") is forward for key in cls.quantization_state.global_amax_buffer):
        updates.append("forward" if forward else "backward")
    roll(forward=forward)


manager.reduce_and_update_fp8_tensors = classmethod(noted)


class Model(nn.Module):
    """Layers after a table of tokens; the loss is a sum over tokens."""

    def __init__(self, layers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Buffer(torch.randn(64, K, generator=generator).bfloat16())
        self.wanted = nn.Buffer(torch.randn(64, K, generator=generator))
        self.layers = nn.ModuleList(nn.Linear(K, K, bias=False, dtype=dtype) for _ in range(layers))
        for each in self.layers:
            nn.init.normal_(each.weight, std=0.1, generator=generator)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.table[tokens_BT].detach().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        return (x.float() * self.wanted[targets_BT]).sum()


def made(recipe: Recipe, *, backend: str = "te", rows: int = 1, layers: int = 1, sums: bool = True) -> Any:
    """What `train_losses` needs of a run, with four sequences in a batch."""
    model = Model(layers)
    convert(model, backend=backend)
    for module in model.layers:
        module.sum_gradients(sums)
    run = SimpleNamespace(
        model=model,
        world=SimpleNamespace(size=1, data_rank=0, peers=None),
        share=4,
        rows=rows,
        loss_scale=1.0,
        config=SimpleNamespace(
            train=SimpleNamespace(seq_len=TOKENS, batch_size=4), policy=None, run=SimpleNamespace(seed=0)
        ),
        step=0,
        counters=None,
        called=None,
        teacher=None,
        device=CPU,
        pipeline=None,
    )
    run.region = lambda: Run.region(run)  # type: ignore[arg-type]
    apply(run, recipe)
    return run


def apply(run: Any, recipe: Recipe) -> None:
    for module in run.model.layers:
        module.apply_plan(resolve(module.layer, recipe, None, module.backend, Device.of(CPU)), recipe, None, CPU)
    te_runs = run.model.layers[0].backend == "te"
    run._regions = [(LAYER_BACKENDS["te"], [recipe.table()])] if te_runs else []
    run.recipe = recipe


def step(run: Any) -> None:
    """Forward and backward of a step's microbatches; gradients stay."""
    generator = torch.Generator().manual_seed(run.step)
    tokens = torch.randint(64, (4, TOKENS), generator=generator)
    rows = [(part, part.flip(1)) for part in tokens.split(run.rows)]
    run.model.zero_grad(set_to_none=True)
    for _ in train_losses(run, run.recipe, rows, 1.0):
        pass
    run.step += 1


def history(run: Any) -> dict[str, list[float]]:
    """The amaxes of x, w and dy that entered, the newest first, as fp4train orders them."""
    layer = run.model.layers[0]
    if layer.backend != "te":
        return {name: layer.states["scaling"].histories[name].tolist() for name in ("x", "w", "dy")}
    state = layer.states["te"].state()
    forward, backward = state["amax_history_fwd"], state["amax_history_bwd"]
    newest_first = {"x": forward[1:, 0], "w": forward[1:, 1], "dy": backward[1:, 0]}
    return {name: each.flip(0).tolist() for name, each in newest_first.items()}


def delayed() -> dict[str, Any]:
    """Histories, scales and updates of three steps, by the rows of a microbatch; and those of emulation."""
    recipe = FP8Delayed(history=8)
    found: dict[str, Any] = {}
    for rows in (4, 2, 1):
        run, counts = made(recipe, rows=rows), []
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
    plain, distributed = manager.reduce_tensor_across_group_op_max, torch.distributed
    initialised, size = distributed.is_initialized, distributed.get_world_size
    backward = Tensor.backward

    def noting(self: Tensor, *rest: Any, **options: Any) -> None:
        backward(self, *rest, **options)
        told.append(["a backward pass ends"])

    manager.reduce_tensor_across_group_op_max = staticmethod(lambda tensor, group: told.append(["joined over", group]))
    distributed.is_initialized, distributed.get_world_size = lambda: True, lambda group=None: 2
    Tensor.backward = noting  # type: ignore[method-assign]
    try:
        step(run)
    finally:
        manager.reduce_tensor_across_group_op_max = plain
        distributed.is_initialized, distributed.get_world_size = initialised, size
        Tensor.backward = backward  # type: ignore[method-assign]
    return told


def exact(run: Any) -> Tensor:
    """The first layer's gradient of the step before, in float64, of the operands that the GEMM had."""
    generator = torch.Generator().manual_seed(run.step - 1)
    tokens = torch.randint(64, (4, TOKENS), generator=generator)
    x = run.model.table[tokens].double().reshape(-1, K)
    dy = run.model.wanted[tokens.flip(1)].bfloat16().double().reshape(-1, K)
    return dy.T @ x


def gradients() -> dict[str, Any]:
    """How far sums of dw over microbatches lie from exact ones, and into what the GEMM wrote them."""
    found: dict[str, Any] = {}
    for name, recipe in {
        **{"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_current": FP8Current(), "fp8_delayed": FP8Delayed(history=4)},
        "nvfp4, wgrad high": NVFP4().with_high_precision("wgrad"),
    }.items():
        run = made(recipe, layers=1)
        distances, written = [], []
        for _ in range(2):
            te_calls_on_cpu.gemms.clear()
            step(run)
            dw, wanted = run.model.layers[0].weight.grad, exact(run)
            distances.append(float((dw.double() - wanted).norm() / wanted.norm()))
            written += [each["d"] for each in te_calls_on_cpu.gemms if each["gemm"] == "wgrad"]
        found[name] = {"distances": distances, "written": written, "dtype": str(dw.dtype)}
    alone = made(NVFP4(), rows=4, sums=False)
    te_calls_on_cpu.gemms.clear()
    step(alone)
    found["one microbatch"] = [each["d"] for each in te_calls_on_cpu.gemms if each["gemm"] == "wgrad"]
    return found


def orders() -> dict[str, float]:
    """A gradient of two passes whose backward passes follow both, the second first; and of a weight that is a view."""
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
    view, rows = tied.turned.T, x[0].detach().clone().requires_grad_()
    del tied._parameters["weight"]
    tied.weight = view
    with run.region(), step_context(run):
        tied(rows).backward(torch.ones(32, K, dtype=torch.bfloat16))
    wanted = torch.ones(32, K).T @ rows.detach().float()
    return found | {"of a view": float((tied.turned.grad.T - wanted).abs().max())}


def step_context(run: Any) -> Any:
    return use(Context(recipe=run.recipe, policy=None, seed=0, step=run.step, token_offset=0, applied=True))


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
    """A layer whose weight is gathered for each pass: what lives between forward and backward, and the gradients."""
    found: dict[str, Any] = {}
    for name, recipe in {"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_delayed": FP8Delayed(history=4)}.items():
        run = made(recipe)
        layer = run.model.layers[0]
        layer.weight.data = layer.weight.data.bfloat16().float()
        x = run.model.table[:32].clone()
        results = []
        for shared in (False, True):
            source = Source(layer.weight.detach())
            weight = layer.weight
            if shared:
                layer.keep_forms(False)
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
                        "codes of the weight between": sum(tuple(each.shape) == (K, K) for each in codes),
                    }
                    source.free()
                    source.fill()
                y.backward(torch.ones_like(y))
            results.append((y.detach(), a.grad, weight.grad))
        plain, of_shards = results
        found[name]["equal"] = [bool(torch.equal(p, q)) for p, q in zip(plain, of_shards, strict=True)]
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
    return found


class Projections(nn.Module):
    """Three layers that read one x, and one that reads the sum of what they make."""

    fp4train_fused = (("q", "k", "v"),)

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
    """How often x is quantised for layers that read it, the forms that live on for backward, and the results beside
    those of layers that know of no others."""
    found: dict[str, Any] = {}
    x = torch.randn(2, 16, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    recipes: dict[str, Recipe] = {"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_current": FP8Current()}
    recipes |= {"fp8_delayed": FP8Delayed(history=4), "nvfp4, wgrad high": NVFP4().with_high_precision("wgrad")}
    for name, recipe in recipes.items():
        for passes in ("plain", "recomputed", "evaluated", *(["changed"] if name == "mxfp8" else [])):
            results: list[list[Tensor]] = []
            for alone in (True, False):
                model = convert(Projections(), backend="te")
                model.changes = passes == "changed"
                layers = [model.q, model.k, model.v, model.o]
                for layer in layers:
                    place = replace(layer.layer, fused=()) if alone else layer.layer
                    layer.rename(place, "te")
                    layer.apply_plan(resolve(place, recipe, None, "te", Device.of(CPU)), recipe, None, CPU)
                for step in range(2):
                    tensors.clear()
                    quantised_from.clear()
                    a = x.clone().requires_grad_()
                    model.zero_grad()
                    context = Context(recipe=recipe, seed=0, step=step, token_offset=0, applied=True)
                    region = LAYER_BACKENDS["te"].region([recipe.table()], None)
                    with region, use(context), torch.set_grad_enabled(passes != "evaluated"):
                        y = recompute(model, a) if passes == "recomputed" else model(a)
                        seen = sum(shape == (32, K) for shape, _ in quantised_from)
                        gc.collect()
                        kept = [each.usages["rowwise"] for made in tensors if (each := made()) is not None]
                        if passes != "evaluated":
                            y.backward(torch.ones_like(y))
                gradients = [] if passes == "evaluated" else [a.grad, *(layer.weight.grad for layer in layers)]
                results.append([y.detach(), *gradients])
                if not alone:
                    found[f"{name}, {passes}"] = {"quantised": seen, "rows kept": sum(kept)}
            found[f"{name}, {passes}"]["equal"] = all(map(torch.equal, *results))
            found[f"{name}, {passes}"]["why"] = resolve(layers[0].layer, recipe, None, "te", Device.of(CPU)).fprop.why
    return found


def python_calls() -> dict[str, dict[str, int]]:
    """Calls of Python functions by one layer, forward and backward, whose weight is quantised: fp4train's and TE's."""
    folders = {"fp4train": Path(fp4train.__file__).parent, "te": Path(te.__file__).parent}
    found: dict[str, dict[str, int]] = {}
    for name, recipe in {"nvfp4": NVFP4(), "mxfp8": MXFP8(), "fp8_current": FP8Current()}.items():
        run, counts = made(recipe), dict.fromkeys(folders, 0)
        layer, x = run.model.layers[0], run.model.table[:32].clone().requires_grad_()

        def watch(frame: Any, event: str, _: Any, counts: dict[str, int] = counts) -> None:
            for which, folder in folders.items():
                counts[which] += event == "call" and Path(frame.f_code.co_filename).is_relative_to(folder)

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


if __name__ == "__main__":
    gc.freeze()  # collections look at what the cases made, and not at all that was imported
    report = {
        "delayed": delayed(),
        "stages": stages(),
        "gradients": gradients(),
        "orders": orders(),
        "gathered": gathered(),
        "phases": phases(),
        "readers": readers(),
        "calls": python_calls(),
    }
    json.dump(report, sys.stdout)
