"""Tensor and sequence parallelism on gloo ranks: losses and norms do not depend on how the layers
are cut.
"""

import json
from typing import Any

import llama_steps
import pytest
import torch

Ranks = Any

RARE = 5e-4
"""Sums of another order round to other neighbours now and then: BF16 numbers in backward, codes of
float32 numbers in forward too. How often depends on the CPU. Amaxes of single ranks differ by more,
see below.
"""
PROGRAM = """
import json

import llama_steps
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from fp4train.nn.executors.cut import CutGemms, GatheredForms
from fp4train.nn import Ranks
from fp4train.parallel.tensor import cut_tensors

made = CutGemms.__init__

def sending_activations(self, *arguments, **options):
    made(self, *arguments, **options)
    for forms in (self.x, self.dy):
        if isinstance(forms, GatheredForms):
            forms.sent = None

data = int(arguments[1])
mesh = init_device_mesh("cpu", (data, world // data), mesh_dim_names=("dp", "tp"))
dp = Ranks.of(mesh["dp"])
for case in json.loads(arguments[0]):
    model = llama_steps.model(**case["model"])
    CutGemms.__init__ = made if case["codes"] else sending_activations
    cut_tensors(model, mesh["tp"], sequence=case["sequence"])
    if case.get("compile"):
        for block in model.blocks:
            block.compile()
    if data > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    rows = 4 // data
    recipe = llama_steps.RECIPES[case["recipe"]]()
    logits = 0.0
    if data == 1:  # FSDP leaves the root whole after a forward pass, and an optimizer would take those parameters
        with torch.no_grad():
            logits = float(model(llama_steps.batch(0, 4)[0]).double().square().sum())
    found = llama_steps.train(model, recipe, sequences=rows, first=rows * dp.rank, share=1 / data, total=dp.sum)
    report({**case, **found, "logits": [logits]})
"""


def trained(
    ranks: Ranks,
    world: int,
    recipes: list[str],
    *,
    data: int = 1,
    tokens: tuple[bool, ...] = (False, True),
    **options: Any,
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(on several ranks, on one) for each recipe, with and without cut tokens (`tokens`)."""
    given = {"codes": True, **options}
    given["model"] = {"layers": 2, **given.get("model", {})}
    cases = [
        {"recipe": recipe, "sequence": sequence, **given}
        for recipe in recipes
        for sequence in tokens
    ]
    found = ranks.program(PROGRAM, world, json.dumps(cases), str(data))[0]
    assert len(found) == len(cases)
    torch.set_num_threads(1)
    one = {}
    for name in recipes:
        model = llama_steps.model(**given["model"])
        with torch.no_grad():
            logits = float(model(llama_steps.batch(0, 4)[0]).double().square().sum())
        one[name] = {**llama_steps.train(model, llama_steps.RECIPES[name]()), "logits": [logits]}
    return [(each, one[each["recipe"]]) for each in found]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_in_float32_losses_norms_and_logits_are_those_of_one_rank(ranks: Ranks, world: int) -> None:
    for ours, one in trained(ranks, world, ["fp32"]):
        assert llama_steps.difference(ours, one, "logits", 0) <= 1e-6, ours
        for step in range(2):
            assert llama_steps.difference(ours, one, "losses", step) <= 1e-6, ours
            assert llama_steps.difference(ours, one, "norms", step) <= 1e-6, ours


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_in_every_recipe_the_first_loss_is_that_of_one_rank(ranks: Ranks, world: int) -> None:
    recipes = [
        "bf16",
        "nvfp4",
        "nvfp4_fused",
        "nvfp4_dequantised",
        "fp8_row_dequantised",
        "mxfp8",
        "fp8_current",
        "fp8_row",
        "fp8_delayed",
        "mxfp8_fp32",
    ]
    tokens: tuple[bool, ...] = (False, True)
    if world == 4:
        recipes = ["nvfp4", "fp8_delayed", "mxfp8_fp32"]
        tokens = (True,)
    for ours, one in trained(ranks, world, recipes, tokens=tokens):
        losses = RARE if ours["recipe"].endswith("fp32") else 1e-6
        assert llama_steps.difference(ours, one, "losses", 0) <= losses, ours
        assert llama_steps.difference(ours, one, "norms", 0) <= RARE, ours


@pytest.mark.long
def test_what_is_requantised_and_turned_by_signs_of_the_step_is_that_of_one_rank(
    ranks: Ranks,
) -> None:
    """Amaxes over the ranks of both roundings; shards of whole groups of the recipes' transforms
    and outer scales.
    """
    model = {"width": 256, "hidden": 512, "layers": 1}
    for ours, one in trained(ranks, 2, ["quartet_ii", "tetrajet_v2"], model=model):
        assert llama_steps.difference(ours, one, "losses", 0) <= 1e-6, ours
        assert llama_steps.difference(ours, one, "norms", 0) <= RARE, ours


@pytest.mark.long
def test_recomputation_changes_nothing(ranks: Ranks) -> None:
    plain = trained(ranks, 2, ["nvfp4"])
    again = trained(ranks, 2, ["nvfp4"], model={"recompute": True})
    for (ours, _), (recomputed, _) in zip(plain, again, strict=True):
        assert ours["losses"] == recomputed["losses"] and ours["norms"] == recomputed["norms"]


@pytest.mark.long
def test_tokens_sent_as_codes_change_no_bit(ranks: Ranks) -> None:
    recipes = ["nvfp4", "mxfp8", "fp8_row", "nvfp4_dequantised", "fp8_row_dequantised"]
    codes = trained(ranks, 2, recipes, tokens=(True,))
    activations = trained(ranks, 2, recipes, tokens=(True,), codes=False)
    for (ours, _), (theirs, _) in zip(codes, activations, strict=True):
        assert ours["losses"] == theirs["losses"] and ours["norms"] == theirs["norms"]


@pytest.mark.long
def test_grouped_queries_and_an_untied_head_are_cut_too(ranks: Ranks) -> None:
    for ours, one in trained(ranks, 2, ["fp32"], model={"kv_heads": 2, "tied": False}):
        assert llama_steps.difference(ours, one, "losses", 1) <= 1e-6, ours
        assert llama_steps.difference(ours, one, "norms", 0) <= 1e-6, ours


@pytest.mark.long
def test_fsdp_over_two_and_tensors_over_two(ranks: Ranks) -> None:
    for ours, one in trained(ranks, 4, ["fp32", "mxfp8_fp32"], data=2):
        limit = 1e-6 if ours["recipe"] == "fp32" else RARE
        assert llama_steps.difference(ours, one, "losses", 1) <= limit, ours
        assert llama_steps.difference(ours, one, "norms", 0) <= limit, ours


@pytest.mark.long
def test_compiled_blocks_are_as_close_to_eager_ones_as_on_one_rank(ranks: Ranks) -> None:
    """Compiled blocks keep float32 between fused operations, which changes roundings."""
    for ours, one in trained(
        ranks, 2, ["nvfp4"], tokens=(True,), compile=True, model={"layers": 1}
    ):
        assert llama_steps.difference(ours, one, "losses", 0) <= 1e-3, ours


BIASES = """
import fp4train as f4
import llama_steps
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from fp4train.nn.ranks import all_rows
from fp4train.parallel.tensor import cut_tensors
from fp4train.parameters import Split, linear

class Part(torch.autograd.Function):  # this rank's rows in forward; in backward the gradients of all rows
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return ranks.part(x).clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.ranks.gather_rows(dy), None

class Two(nn.Module):
    tensor = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def fp4train_parameters(self):
        return [*linear("up", "up", cut=Split.OUT, bias=True), *linear("down", "down", cut=Split.IN, bias=True)]

    def forward(self, x):
        cut = self.tensor is not None and self.tensor.sequence
        x = Part.apply(x, self.tensor.ranks) if cut else x
        y = self.down(torch.relu(self.up(x)))
        return all_rows(y, self.tensor.ranks) if cut else y

mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
for recipe in ("fp32", "mxfp8_fp32", "fp8_row"):
    found = []
    for sequence in (None, False, True):
        torch.manual_seed(0)
        model = f4.convert(Two())
        x = torch.randn(128, 64).requires_grad_()
        if sequence is not None:
            cut_tensors(model, mesh, sequence=sequence)
        with f4.autocast(llama_steps.RECIPES[recipe](), step=0):
            y = model(x)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(llama_steps.whole(p.grad) for p in model.parameters())])
    one, *cut = found
    report([float((a - b).norm() / b.norm()) for each in cut for a, b in zip(each, one, strict=True)])
"""


@pytest.mark.long
def test_biases_and_a_model_of_a_users_own(ranks: Ranks) -> None:
    """Outputs and the gradients of x, w and bias, with and without cut tokens."""
    reported = ranks.program(BIASES, 2)[0]
    assert [len(differences) for differences in reported] == [12, 12, 12]
    fp32, mxfp8, fp8_row = reported
    assert max(fp32) <= 1e-6 and max(mxfp8) <= 1e-6
    assert max(fp8_row) <= 1e-3  # BF16: some sums are rounded to the other neighbour
