"""Norms and gates that quantise their results in an estimate: bytes of the page's table, and where
they are charged.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_shapes import executed

from fp4train.backends.te import translate
from fp4train.config import composition, to_config
from fp4train.hardware import find_gpu
from fp4train.lab.costs import mesh_plan
from fp4train.lab.costs.cluster import ClusterCost
from fp4train.lab.costs.estimate import estimate
from fp4train.lab.costs.links import interconnect
from fp4train.lab.costs.mesh_plan import MeshPlan
from fp4train.lab.costs.quantising import own_passes, own_seconds, te_seconds
from fp4train.lab.costs.rows import GemmCost, made_by
from fp4train.lab.costs.workload import workload
from fp4train.models.common.liger import MOVED
from fp4train.parallel.config import Mesh
from fp4train.precision import MXFP8, NVFP4, FP8Current, Recipe
from fp4train.quantize import quantizer, triton
from fp4train.quantize.produced import ADDED, NORM_BACKWARD, STRIP, SUM
from fp4train.run.build import build_model
from fp4train.run.produced import ProducedNorms, produced_in
from fp4train.run.timeline import build_timeline

B200 = find_gpu("B200")
PAGE = Path(__file__).parents[3] / "benchmarks" / "cost_model.md"
KINDS = {
    "x + y at the end of a block, then RMSNorm, forward": "norm after a sum",
    "x + y within a block, then RMSNorm, forward": "norm of a sum",
    "silu(gate) ⊙ up, forward": "gate",
    "its two gradients, one element of each": "gradients",
}
WRITTEN = {
    "norm after a sum": 6 + MOVED["rms_norm"][0],
    "norm of a sum": MOVED["add_rms_norm"][0],
    "gate": MOVED["silu_product"][0],
    "gradients": MOVED["silu_product"][1],
}
"""Bytes per element of kernels that write BF16."""
WIDTH = 256
HIDDEN = 512
TOKENS = 512


@pytest.fixture(autouse=True)
def other_quantizers() -> Iterator[None]:
    """They are kept by device."""
    quantizer.cache_clear()
    yield
    quantizer.cache_clear()


def moved(recipe: Recipe, kind: str) -> tuple[float, float]:
    """Bytes per element where it is quantised where it is made, and where it is written first."""
    table = recipe.table()
    large = 1 << 30
    of_dy = kind == "gradients"
    forms = (
        (table["dgrad"].first, table["wgrad"].first)
        if of_dy
        else (table["fprop"].first, table["wgrad"].second)
    )
    sources = kind.partition(" ")[0], None
    made, plain = (
        sum(map(sum, own_passes(*forms, large, codes=True, source=source))) for source in sources
    )
    return made + SUM * ("sum" in kind), WRITTEN[kind] + (2 if of_dy else 1) * plain


def one_place(number: float) -> str:
    return f"{math.floor(10 * number + 0.5) / 10:.1f}".removesuffix(".0")


def test_the_bytes_of_the_page_are_those_that_an_estimate_charges() -> None:
    page = PAGE.read_text("utf-8")
    table = page.partition("| fused, bytes per element |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", table, re.MULTILINE))
    sizes = {"gate": 14336, "gradients": 14336}
    columns = []
    saved = []
    for recipe in (NVFP4(), MXFP8(), FP8Current()):
        each = {kind: moved(recipe, kind) for kind in KINDS.values()}
        each["back"] = NORM_BACKWARD + ADDED, MOVED["rms_norm"][1] + 6
        each["back of a sum"] = NORM_BACKWARD + ADDED, MOVED["add_rms_norm"][1]
        lines = {kind: sizes.get(kind, 4096) / 1e3 for kind in each}
        totals = [(a * lines[kind], b * lines[kind]) for kind, (a, b) in each.items()]
        columns.append([f"{one_place(a)} ({one_place(b)})" for a, b in each.values()])
        columns[-1].append(", ".join(f"{a:.0f} ({b:.0f})" for a, b in totals))
        saved.append(round(sum(b - a for a, b in totals)))
    names = [
        *KINDS,
        "RMSNorm, backward, and the sum of the stream's gradients",
        "x + y, then RMSNorm, backward",
    ]
    names.append("KB per token and layer, in the order of the rows")
    assert (
        rows.items()
        >= {
            n: " | ".join(c) for n, c in zip(names, zip(*columns, strict=True), strict=True)
        }.items()
    )
    assert (
        f"saves {saved[0]} KB per token and layer of NVFP4 and of FP8, and {saved[1]} of MXFP8"
        in page
    )
    assert saved[0] == saved[2]


def planned(*words: str) -> tuple[MeshPlan, Any]:
    shape = [
        "model=llama_tiny",
        f"model.width={WIDTH}",
        f"model.hidden={HIDDEN}",
        "model.layers=2",
        "model.heads=4",
    ]
    sizes = [f"train.seq_len={TOKENS}", "train.batch_size=1", "gpu=B200", "policy=all"]
    config = to_config(composition.compose([*shape, *sizes, *words]))
    model = build_model(config, 257, torch.device("meta"))
    wanted = MeshPlan(config, 1, None, model, build_timeline(config), B200, ())
    return wanted, wanted.plan(1, 1)


@pytest.mark.parametrize("backend", ["native", "te"])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_what_is_quantised_where_it_is_made_is_charged_once_from_its_sources(
    recipe: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x to its readers in equal parts, the gradients of gate and up together; the rest as where
    BF16 is written. The machine has neither Triton nor Transformer Engine.
    """
    monkeypatch.setattr(triton, "why_not_here", lambda _: "triton is not installed")
    monkeypatch.setattr(translate, "version", lambda: None)
    wanted, plan = planned(f"recipe={recipe}", f"backend={backend}", "phases=none")
    layers = plan.stretches[0].layers
    found = made_by(wanted.produced(plan)[0].producers.values())
    assert len(found) == 2 * (3 + 2 + 1 + 2)
    fused, plain = (estimate(plan, B200, produced=made).stretches[0].rows for made in ([found], ()))
    table = layers["blocks.0.mlp.up"].table
    x = table["fprop"].first, table["wgrad"].second
    dy = table["dgrad"].first, table["wgrad"].first

    def quantised(part: str, rows: tuple[GemmCost, ...]) -> float:
        return sum(
            row.quantise
            for row in rows
            if row.layer.startswith("blocks.0.") and row.layer.endswith(f".{part}")
        )

    def own(count: int, specs: Any, source: str | None) -> float:
        return own_seconds(B200, count, *specs, codes=True, source=source)

    def written(count: int, specs: Any) -> float:
        return te_seconds(B200, count, *specs) if backend == "te" else own(count, specs, None)

    norm = own(TOKENS * WIDTH, x, "norm") - written(TOKENS * WIDTH, x)
    gradients = own(TOKENS * HIDDEN, dy, "gradients") / 2 - written(TOKENS * HIDDEN, dy)
    changed = {
        "wq": norm / 3,
        "up": norm / 2 + gradients,
        "down": own(TOKENS * HIDDEN, x, "gate") - written(TOKENS * HIDDEN, x),
        "wo": 0.0,
    }
    for part, difference in changed.items():
        assert quantised(part, fused) - quantised(part, plain) == pytest.approx(
            difference, abs=1e-15
        )


def test_a_block_writes_neither_the_norms_nor_the_gate() -> None:
    """Only the sum that a norm is of, and a norm's gradients with those of the residual stream, are
    elementwise; of the latter torch adds those of Liger's norm of a stream that comes as one tensor.
    The first norm of the second block makes the sum at the end of the first. A block keeps the same for backward: h
    or the sum, gate and up, and codes.
    """
    wanted, plan = planned("recipe=nvfp4", "backend=native", "phases=none")
    fused, plain = (
        wanted.workloads(plan, 1, each)[0][2]
        for each in (wanted.produced(plan), [ProducedNorms({}, {})])
    )
    (one, last), (other, end) = ([kind.cost for kind in each.kinds] for each in (fused, plain))
    elements = TOKENS * WIDTH
    gates = TOKENS * HIDDEN
    # a float32 factor per row of each norm, which NORM_BACKWARD does not count
    rows = 2 * 4 * TOKENS
    forward = other.forward.kernels - one.forward.kernels
    assert forward == (4 + 8 - SUM) * elements + 6 * gates
    backward = other.backward.kernels - one.backward.kernels - rows
    assert backward == (6 + 8 - 2 * (NORM_BACKWARD + ADDED)) * elements + 10 * gates
    assert (SUM, NORM_BACKWARD, ADDED) == (4, 6 + 2 * 4 / STRIP, 2)
    casts = 2 * 6 * WIDTH  # of the norms' weights
    assert other.forward.operators - one.forward.operators == casts
    assert end.forward.operators - last.forward.operators == casts
    assert last.forward.operators - one.forward.operators == 6 * elements
    assert last.forward.kernels - one.forward.kernels == SUM * elements
    assert other.backward.operators - one.backward.operators == 6 * elements
    assert end.backward.operators == last.backward.operators
    assert one.saved == other.saved
    costs = [
        ClusterCost(replace(fused, produced=made), B200, interconnect(B200), Mesh())
        for made in (fused.produced, {})
    ]
    assert costs[0].parts["quantising"] != costs[1].parts["quantising"]
    assert {each.parts["elementwise"] for each in costs} == {costs[0].parts["elementwise"]}


@pytest.mark.parametrize(
    ("words", "number", "why"),
    [
        (("recipe=nvfp4",), 6, None),
        (("recipe=fp8_current", "backend=te"), 0, "Transformer Engine"),
        (("recipe=fp8_current", "backend=native"), 6, None),
        (("recipe=bf16",), 0, "is in high precision and needs values, not codes"),
        (("recipe=nvfp4", "train.kernels=torch"), 0, "train.kernels=torch asks"),
        (("recipe=nvfp4", "train.compile=true"), 0, "the compiler has the blocks"),
        (("recipe=mxfp8", "backend=te"), 6, None),
        (
            ("recipe=nvfp4", "backend=te", "train.seq_len=40"),
            0,
            "pads 40 tokens to a multiple of 32",
        ),
    ],
)
def test_a_plan_of_another_gpu_charges_what_a_run_there_quantises(
    words: tuple[str, ...], number: int, why: str | None
) -> None:
    wanted, plan = planned(*words, "phases=none")
    (found,) = wanted.produced(plan)
    assert len(found.producers) == number and len(found.writing) == 6 - number
    assert why is None or all(why in reason for reason in found.writing.values())


def test_phases_differ_in_what_they_quantise_and_each_is_charged_for_its_own() -> None:
    wanted, plan = planned("recipe=nvfp4", "phases=cooldown_bf16", "train.steps=100")
    first, last = (load.produced for _, _, load in wanted.workloads(plan, 1, wanted.produced(plan)))
    assert first and not last


def test_a_plan_asks_once_per_stretch_what_is_quantised_where_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer makes an executor of every layer that may take codes: hundreds in a large
    model.
    """
    asked = []

    def counted(model: object, stretch: object, *given: Any, **options: Any) -> ProducedNorms:
        asked.append(stretch)
        return produced_in(model, stretch, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(mesh_plan, "produced_in", counted)
    wanted, _ = planned("recipe=nvfp4", "phases=cooldown_bf16", "train.steps=100")
    plan, _ = wanted.costs()
    assert len(plan.stretches) == 2 and asked == list(plan.stretches)


def test_ranks_that_share_amaxes_or_cut_layers_quantise_none() -> None:
    wanted, plan = planned("recipe=nvfp4", "backend=native", "phases=none", "parallel.amax=data")
    assert [len(wanted.produced(plan, ranks)[0].producers) for ranks in (1, 2)] == [6, 0]
    cut = wanted.plan(1, 2)
    assert not wanted.produced(cut)[0].producers


@pytest.mark.parametrize("backend", ["native", "te"])
def test_an_x_that_layers_share_is_quantised_and_kept_once_unless_blocks_are_compiled(
    backend: str,
) -> None:
    """FP8 with the scale of the tensor: queries, keys and values, gate and up; a byte of each form.
    Layers of native products without names of a group (`readers`) share what they keep all the
    same.
    """
    wanted, plan = planned(
        "recipe=fp8_current", f"backend={backend}", "phases=none", "train.kernels=torch"
    )
    shared, apart = (
        estimate(plan, B200, sharing=each).stretches[0].quantise for each in (True, False)
    )
    table = plan.stretches[0].layers["blocks.0.mlp.up"].table
    specs = table["fprop"].first, table["wgrad"].second
    count = TOKENS * WIDTH
    one = (
        te_seconds(B200, count, *specs)
        if backend == "te"
        else own_seconds(B200, count, *specs, codes=True)
    )
    assert apart - shared == pytest.approx(2 * (2 + 1) * one)
    whole, alone = (
        workload(
            wanted.model,
            {
                n: replace(p, readers=readers or p.readers)
                for n, p in plan.stretches[0].layers.items()
            },
            plan.stretches[0].recipe,
            sequences=1,
            seq_len=TOKENS,
        )
        for readers in ((), ("itself",))
    )
    saved = alone.kinds[0].cost.saved - whole.kinds[0].cost.saved
    assert saved == ((2 + 1) * (count + 4) if backend == "te" else 0), (
        "codes, and a scale in float32"
    )
    costs = [
        ClusterCost(executed(whole, compiled=each), B200, interconnect(B200), Mesh()).parts[
            "quantising"
        ]
        for each in (False, True)
    ]
    assert costs[1] - costs[0] == pytest.approx(apart - shared)
