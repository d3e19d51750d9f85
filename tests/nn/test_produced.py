"""Norms and gates that are quantised where they are made, in a model: against the same model
without, in Triton's interpreter, with recorded products in the place of scaled_mm; and where they
are left to the model.
"""

import functools
import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from interpreted import interpreted

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.models.common import OF_TORCH, ExpertShape, Liger, RMSNorm, StreamTerms, SwiGLU
from fp4train.models.llama import Llama
from fp4train.models.moe import MixtureOfExperts
from fp4train.nn import Linear
from fp4train.nn.executors import make_executor
from fp4train.nn.fused_layers import why_not
from fp4train.nn.gated_mlp import GatedMLP
from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, FP8Row, Layer, Recipe, resolve
from fp4train.precision.context import state

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import json, sys
import liger_on_cpu
import native_on_cpu
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import fp4train as f4
from fp4train.config import TrainSettings
from fp4train.models.common.router import ExpertShape
from fp4train.models.common.liger import use_liger
from fp4train.models.hybrid import Hybrid, ScanShape
from fp4train.models.hyena import FilterShape, Hyena
from fp4train.models.llama import Llama
from fp4train.models.moe import MixtureOfExperts
from fp4train.nn import weight_form, weights
from fp4train.models.common.stream import summed
from fp4train.nn.normed_linears import NormedLinears
from fp4train.precision import MXFP8, NVFP4, FP8Current, LayerPolicy
from fp4train.precision import autocast
from fp4train.run.fuse import fuse

sys.modules |= liger_on_cpu.modules()
native_on_cpu.install()
launched = native_on_cpu.launched
tokens = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(1))
SMALL = {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "tied": False}
SCAN = ScanShape(heads=32, head_dim=2, state=16, chunk=16)
EXPERTS = ExpertShape(count=2, top=1, hidden=32, shared=1)

class Sums(TorchDispatchMode):  # of two residual streams, or of their gradients, by torch
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.count += function.overloadpacket is torch.ops.aten.add and made.shape == (2, 16, 64)
        return made

def called(self, x, cos, sin, *_):  # a block that calls its norms as modules
    x = x + self.attention(self.attention_norm(x), cos, sin)
    return x + self.mlp(self.mlp_norm(x))

class Apart(NormedLinears):  # torch adds beside its kernels
    def forward(self, stream, *arguments, **options):
        h = summed(stream)
        return super().forward(h, *arguments, **options)[0], h

def trained(recipe, kernels, hooked=False, keep=None, shape=Llama, **options):
    native_on_cpu.quantise_by("auto" if kernels == "torch" else "triton")
    native_on_cpu.quantise_by("auto", weight_form, weights)  # the interpreter takes long, and has x and dy to quantise
    torch.manual_seed(0)
    small = SMALL | ({"layers": 1} if "pattern" not in options else {}) | options
    model = f4.convert(shape(**small).build(vocab_size=60, seq_len=16), backend="native").train()
    names = "torch" if kernels == "torch" else "auto"
    fuse(model, TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=16, kernels=names), "cpu")
    for module in model.modules() if kernels == "apart" else ():
        if isinstance(module, NormedLinears):
            module.__class__ = Apart
    if kernels == "called":
        type(model.blocks[0]).forward, whole = called, type(model.blocks[0]).forward
    if hooked:
        model.blocks[0].mlp.down.register_forward_hook(lambda *_: None)
        model.blocks[0].mlp.gate.register_forward_hook(lambda *_: None)
    if keep is not None:  # Liger has what is not quantised where it is made
        use_liger(model, spare=[] if kernels == "auto" else [model.blocks[1]])
    policy = LayerPolicy(last=0, keep=keep or ())
    liger_on_cpu.calls.clear(), launched.clear()
    with Sums() as sums:
        for _ in range(2 if shape is Llama else 1):
            with autocast(recipe, policy=policy, step=0):
                loss = model(tokens, tokens.flip(1))
            loss.backward()
    counts = launched.copy()
    if kernels == "called":
        type(model.blocks[0]).forward = whole
    counts["sums"] = sums.count
    for name, _ in liger_on_cpu.calls:
        counts[name] += 1
    with torch.no_grad(), autocast(recipe, policy=policy, step=0):
        evaluated = model(tokens, tokens.flip(1))
    return {"loss": loss, "evaluated": evaluated} | {n: p.grad for n, p in model.named_parameters()}, counts

told = {}
for name, recipe, options in (
    ("NVFP4", NVFP4(), {}),
    ("MXFP8", MXFP8(), {}),
    ("FP8", FP8Current(), {}),
    ("recomputed", MXFP8(), {"recompute": True, "layers": 2}),
    ("biases", MXFP8(), {"qkv_bias": True}),
    ("watched", MXFP8(), {"hooked": True}),
    ("liger", MXFP8(), {"layers": 2, "keep": ("blocks.0.mlp.up",)}),
    ("hybrid", MXFP8(), {"shape": Hybrid, "pattern": "M*-", "scan": SCAN}),
    ("hyena", NVFP4(), {"shape": Hyena, "pattern": "S*", "kv_heads": 4, "filters": FilterShape(groups=16)}),
    ("mixture", MXFP8(), {"shape": MixtureOfExperts, "layers": 2, "dense": 1, "experts": EXPERTS}),
):
    (plain, _), (fused, counts) = (trained(recipe, kernels, **options) for kernels in ("torch", "auto"))
    apart = {n: float((fused[n] - g).norm() / g.norm()) for n, g in plain.items() if not torch.equal(fused[n], g)}
    codes = counts["quantize_produced"] + counts["turned_produced"]
    told[name] = [counts["amax_produced"], codes, counts["norm_backward"], apart]
    told[name].append({each: counts[each] for each in ("sum and norm", "product")})
    if name in ("recomputed", "hybrid", "hyena", "mixture"):
        apart, others = trained(recipe, "apart", **options)
        assert all(torch.equal(g, apart[n]) for n, g in fused.items()), name
        told[name].append([counts["sums"], others["sums"]])
    if name == "MXFP8":
        apart, others = trained(recipe, "called", **options)
        assert all(torch.equal(g, apart[n]) for n, g in plain.items()), name
        told["called"] = [others["quantize_produced"] + others["turned_produced"], others["norm_backward"]]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def trained() -> Any:
    """Of each case the launches of two microbatches, of families other than Llama of one; which
    tensors are not those of the model without, by how much; and calls of Liger's kernels.
    """
    run = interpreted("-c", PROGRAM, timeout=1500)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "launches"),
    [
        ("NVFP4", [8, 8, 4]),
        ("MXFP8", [0, 8, 4]),
        ("FP8", [8, 8, 4]),
        ("recomputed", [0, 28, 8]),
        ("biases", [0, 8, 4]),
        ("watched", [0, 2, 2]),
        ("hybrid", [0, 3, 3]),
        ("hyena", [4, 4, 4]),
        ("mixture", [0, 7, 3]),
    ],
)
def test_a_model_has_the_gradients_of_one_that_writes_norms_and_gates(
    trained: Any, case: str, launches: list[int]
) -> None:
    """In every bit: the sum of squares rounds alike at this width. The weights' gradients of norms
    are not rounded to BF16 here, whose half ulp is 2^-9, and those of h, which reach the embedding,
    may have another last digit. A microbatch takes two norms, a gate and its gradients of a block
    of Llama; three norms of a hybrid; four of a hyena; of a mixture, whose experts' norm is the
    router's, too, three norms and two gates with their gradients.
    """
    *counts, apart, _ = trained[case][:5]
    assert counts == launches
    assert apart.pop("embed.weight", 0.0) < 2**-12
    norms = {name for name in apart if name.endswith("norm.weight")}
    assert set(apart) == norms and all(error < 2**-8 for error in apart.values()), apart


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "sums", "apart"),
    [
        ("recomputed", 2, 2 + 2 + 4),
        ("hybrid", 1, 2 + 3),
        ("hyena", 9, 1 + 2 + 4),
        ("mixture", 6, 1 + 1 + 3),
    ],
)
def test_sums_in_the_kernels_of_norms_have_the_bits_of_torchs_beside_them(
    trained: Any, case: str, sums: int, apart: int
) -> None:
    """The program compares loss and gradients. Torch is left with the sum at the end of the last
    block (of each one where blocks are recomputed, which keep their input), and what experts and
    convolutions add; the gradients of layers that read one norm are added in their function. Beside
    the kernels it has, of a
    microbatch, the sums at the ends of blocks and those within them, these twice where blocks are
    recomputed, and the gradients of the stream, which each norm reads. Of the mixture a sum within
    a block is not counted, whose norm the router reads.
    """
    microbatches = 2 if case == "recomputed" else 1
    assert trained[case][5] == [microbatches * sums, microbatches * (sums + apart)]


@pytest.mark.long
def test_norms_that_a_model_calls_as_modules_give_true_tensors(trained: Any) -> None:
    """The program compares loss and gradients with the model without; the gate is quantised."""
    assert trained["called"] == [4, 0]


@pytest.mark.long
def test_liger_has_the_sums_whose_norms_not_all_readers_take_quantised(trained: Any) -> None:
    """In the first of two blocks `up` stays in high precision: a microbatch takes three norms, a
    gate and its gradients, and of Liger's kernels a sum with its norm, and a gate. The model beside
    it has Liger's in the first block.
    """
    *counts, apart, of_liger = trained["liger"]
    assert counts == [0, 10, 6] and of_liger == {"sum and norm": 2, "product": 2}
    norms = (
        "blocks.0.attention_norm.weight",
        "blocks.1.attention_norm.weight",
        "blocks.1.mlp_norm.weight",
    )
    assert set(apart) == set(norms) and all(error < 2**-8 for error in apart.values()), apart


def executor(recipe: Recipe, name: str, backend: str = "auto") -> Any:
    layer = Layer(name=name, in_features=128, out_features=128, block=0, blocks=1)
    return make_executor(
        resolve(layer, recipe, None, backend, Device.elsewhere(find_gpu("B200"))), "cuda"
    )


@pytest.mark.parametrize(
    ("readers", "writers", "reason"),
    [
        ((NVFP4(), NVFP4()), (), None),
        ((NVFP4(),), (NVFP4(), NVFP4()), None),
        ((MXFP8(),), (MXFP8(), MXFP8()), None),
        ((FP8Current(),), (FP8Current(), FP8Current()), None),
        (
            (FP8Row(),),
            (),
            "the input x of b0: no kernel makes both forms of E4M3 in blocks of (1, None) at once",
        ),
        ((NVFP4(), MXFP8()), (), "b0 and b1 do not quantise x alike"),
        ((NVFP4(),), (NVFP4(), MXFP8()), "a0 and a1 do not quantise dy alike"),
        ((FP8Delayed(),), (), "the input x of b0: its amax enters a history of delayed scaling"),
        (
            (NVFP4().with_high_precision("wgrad"),),
            (),
            "a GEMM of b0 is in high precision and needs the values of x",
        ),
        (
            (NVFP4(),),
            (NVFP4().with_high_precision("dgrad"),) * 2,
            "a GEMM of a0 is in high precision and needs the values of dy",
        ),
    ],
)
def test_who_reads_says_why_it_does_not_take_codes(
    readers: tuple[Recipe, ...], writers: tuple[Recipe, ...], reason: str | None
) -> None:
    groups = {"b": readers, "a": writers}
    made = [
        [executor(each, f"{name}{i}", "native") for i, each in enumerate(group)]
        for name, group in groups.items()
    ]
    assert why_not(*made) == reason


def test_layers_that_emulate_or_run_elsewhere_take_none() -> None:
    assert "emulation multiplies its values, not its codes" in str(
        why_not([executor(NVFP4(), "w", "emulate")])
    )
    plain = executor(f4.precision.BF16(), "w")
    assert why_not([plain]) == "w is in high precision and needs values, not codes"
    layer = Layer(name="w", in_features=128, out_features=128, block=0, blocks=1, experts=2)
    of_experts = make_executor(
        resolve(layer, NVFP4(), None, "auto", Device.elsewhere(find_gpu("B200"))), "cuda"
    )
    assert str(why_not([of_experts])).startswith("w quantises its operands in parts (of experts")


@pytest.mark.parametrize("change", [None, torch.ones(4, 64)])
def test_a_norm_that_hooks_watch_runs_as_a_module(change: torch.Tensor | None) -> None:
    """A kernel that adds, too, is not asked."""
    norm = RMSNorm(64, eps=1e-5)
    seen = list[torch.Tensor]()
    norm.operators = Mock(spec=Liger, side_effect=AssertionError)
    norm.operators.rms_norm = OF_TORCH.rms_norm
    norm.register_forward_hook(lambda module, given, y: seen.append(y))
    x = torch.randn(4, 64)
    y, _ = norm.of_stream(x if change is None else StreamTerms(x, change))
    assert len(seen) == 1 and seen[0] is y
    assert not norm.operators.add_rms_norm.called


def hook(module: torch.nn.Module, seen: list[Any]) -> None:
    module.register_forward_hook(lambda module, given, y: seen.append((given[0], y)))


def replace_forward(module: torch.nn.Module, seen: list[Any]) -> None:
    """As accelerate does."""
    forward = module.forward

    @functools.wraps(forward)
    def noted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        y = forward(x, *arguments)
        seen.append((x, y))
        return y

    module.forward = noted


@pytest.mark.parametrize("watch", [hook, replace_forward])
@pytest.mark.parametrize("watched", ["attention_norm", "attention", "attention.wk"])
def test_modules_that_other_code_watches_are_called_with_true_tensors(
    watched: str, watch: Any
) -> None:
    """The norm, the module that reads it, and each of its layers: executors are not asked for codes,
    as they are where nobody watches.
    """
    model = f4.convert(Llama(width=64, layers=1, heads=2).build(vocab_size=60, seq_len=8))
    block = model.blocks[0]
    block.attention_in.enabled = True
    block.attention_in.resolve = Mock(side_effect=LookupError)
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    angles = model.positions(0, 8, torch.bfloat16)
    with f4.autocast(NVFP4(), step=0):
        with pytest.raises(LookupError):
            block.attention_in(x, *angles)
        seen = list[Any]()
        watch(block.get_submodule(watched), seen)
        y, h = block.attention_in(x, *angles)
    assert len(seen) == 1 and {type(tensor) for tensor in seen[0]} == {torch.Tensor}
    assert h is x and y.shape == x.shape


def test_a_module_whose_forward_pass_is_not_ours_gets_true_tensors_and_the_plan_says_so() -> None:
    block = f4.convert(Llama(width=64, layers=1, heads=2).build(vocab_size=60, seq_len=8)).blocks[0]
    assert block.mlp_in.why_never() is None
    block.mlp = type("Doubled", (type(block.mlp),), {"forward": lambda self, x: x + x})(64, 64)
    f4.convert(block)
    assert block.mlp_in.why_never() == (
        "the forward pass of Doubled takes no outputs of its layers"
    )
    block.mlp_in.enabled = True
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    y, _ = block.mlp_in(x)
    assert torch.equal(y, 2 * block.mlp_norm(x))


class Halved:
    """A base class that halves what the forward pass of the next one gives."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        y: torch.Tensor = super().forward(*arguments) / 2  # type: ignore[misc]
        return y


@pytest.mark.parametrize("by", ["base class", "class"])
def test_a_forward_pass_that_a_base_class_gives_or_that_is_set_later_is_called(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = f4.convert(Llama(width=64, layers=1, heads=2).build(vocab_size=60, seq_len=8)).blocks[0]
    if by == "base class":
        block.mlp.__class__ = type("HalvedMLP", (Halved, SwiGLU), {}, kernel="gate")
    else:
        forward = SwiGLU.forward
        monkeypatch.setattr(SwiGLU, "forward", lambda self, x: forward(self, x) / 2)
    assert "takes no outputs of its layers" in str(block.mlp_in.why_never())
    block.mlp_in.enabled = True
    block.mlp_in.ready = Mock(side_effect=AssertionError)
    block.bfloat16()
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    n = block.mlp_norm(x)
    y, _ = block.mlp_in(x)
    assert torch.equal(y, block.mlp.mixed(block.mlp.gate(n), block.mlp.up(n)) / 2)


class ShiftedNorm(RMSNorm):
    """RMSNorm with the weight 1 + w, as Gemma has."""

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], 1 + self._weight(x.dtype), self.eps)


class NamedShiftedNorm(ShiftedNorm, kernel="norm"):
    pass


class GatedByGelu(SwiGLU):
    def mixed(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.down(torch.nn.functional.gelu(gate) * up)
        return product


class NamedGelu(GatedByGelu, kernel="gelu"):
    pass


class NamedGate(GatedByGelu, kernel="gate"):
    pass


def test_a_subclass_that_computes_otherwise_inherits_no_kernels() -> None:
    """Unless it says which compute it."""
    model = Llama(width=64, layers=1, heads=2).build(vocab_size=60, seq_len=8)
    block = model.blocks[0]
    block.attention_norm = ShiftedNorm(64, eps=1e-5)
    block.mlp = GatedByGelu(64, 96)
    f4.convert(block)
    assert block.attention_in.why_never() == "no kernel computes ShiftedNorm"
    assert block.mlp_in.why_never() is None
    assert block.mlp.fused.why_never() == "no kernel computes GatedByGelu"
    named = f4.convert(NamedGelu(64, 96)).fused
    assert named.why_never() == "no kernel computes NamedGelu"
    assert f4.convert(NamedGate(64, 96)).fused.why_never() is None
    block.attention_in.enabled = True
    x = torch.randn(1, 8, 64, requires_grad=True)
    block.attention_in.ready = Mock(side_effect=AssertionError)
    block.attention.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    seen = list[torch.Tensor]()
    block.attention_in(x, *model.positions(0, 8, torch.float32))
    assert torch.equal(seen[0], block.attention_norm.normalised(x))
    block.attention_norm.operators = Mock(spec=Liger)
    y, _ = block.attention_norm.of_stream(StreamTerms(x, x))
    assert torch.equal(y, block.attention_norm.normalised(x + x))
    assert not block.attention_norm.operators.add_rms_norm.called
    block.attention_norm = NamedShiftedNorm(64, eps=1e-5)
    assert block.attention_in.why_never() is None


def test_a_gated_mlp_with_biases_writes_its_product_and_the_plan_says_so() -> None:
    mlp = SwiGLU(64, 96)
    mlp.up = torch.nn.Linear(64, 96)
    f4.convert(mlp)
    assert mlp.fused.why_never() == (
        "the gradients of the biases of its layers need the values of dy, not its codes"
    )
    mlp.up.bias.requires_grad_(False)
    assert mlp.fused.why_never() is None


def test_a_layer_of_experts_gets_true_tensors_whoever_reads_them() -> None:
    shape = MixtureOfExperts(
        width=64, layers=1, heads=2, experts=ExpertShape(count=2, top=1, hidden=32, shared=1)
    )
    block = f4.convert(shape.build(vocab_size=60, seq_len=8)).blocks[0]
    assert "Router reads the same values, and takes no codes" in str(block.mlp_in.why_never())
    block.mlp.input_layers = ("shared.gate", "shared.up")
    assert block.mlp_in.why_never() == (
        "the forward pass of ExpertLayer takes no outputs of its layers"
    )


def test_a_gated_mlp_whose_layers_saw_different_tokens_says_what_to_do() -> None:
    """Both gradients are rounded by the random bits of one place."""
    sizes = {"in_features": 32, "out_features": 32}
    layers = [
        Linear(**sizes, bias=False, layer=Layer(name=name, block=0, blocks=1, **sizes))
        for name in "abc"
    ]
    gated = GatedMLP(torch.nn.ModuleDict(dict(zip("abc", layers, strict=True))), *"abc")
    gated.enabled = True
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    with f4.autocast(NVFP4(), step=0):
        layers[0](x)
        executors = [layer.executor_now(x.device, x.dtype)[0] for layer in layers]
        gated.ready = Mock(return_value=([executors[2], *executors[:2]], state()))  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match=r"a and b have been called .* token_offset"):
            gated(x)
