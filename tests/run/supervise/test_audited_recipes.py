"""Audits of runs whose operands have scales of earlier steps or two terms, or whose blocks are
compiled: no clean run has a fault or other bits, and planted ones are found and named.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import STEADY, Cli, events, losses
from families import tiny_run
from held_recipe import write_held
from pretended import Machine

from fp4train.nn import HeldAmax
from fp4train.nn.executors import Outer, terms

Arguments = Callable[[Path], tuple[str, ...]]
SILENT = ("audit.every=0", "audit.sums=0")
AUDITED = ("audit.every=1", "audit.sums=0")


def recipe(name: str, *options: str) -> Arguments:
    return lambda folder: (f"recipe={name}", "policy=all", *STEADY, *options)


OUTLIERS = (
    "recipe.outliers.multiple=8",
    "recipe.outliers.start=1",
    "recipe.outliers.steps=2",
)
"""Channels of small layers that are chosen early."""


def held(*options: str) -> Arguments:
    return lambda folder: (*write_held(folder), *options)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        held("train.microbatch=2"),
        recipe("averis", "model.recompute=true", "train.microbatch=2"),
        recipe("chon"),
        recipe("tetrajet_v2_outliers", *tiny_run("moe"), "train.microbatch=2", *OUTLIERS),
        held(*tiny_run("moe"), "train.microbatch=2"),
        recipe("averis", *tiny_run("moe")),
        recipe("flux_residual", *tiny_run("moe")),
    ],
    ids=[
        "held scales",
        "means",
        "residuals",
        "outlier channels of experts",
        "held scales of experts",
        "means of experts",
        "residuals of experts",
    ],
)
def test_a_clean_run_has_no_fault_and_the_same_bits(
    cli: Cli, tmp_path: Path, arguments: Arguments
) -> None:
    options = (*arguments(tmp_path), "train.steps=4")
    assert cli("run.name=plain", *options, *SILENT).code == 0
    assert cli("run.name=audited", *options, *AUDITED).code == 0
    assert losses("runs/plain") == losses("runs/audited")
    assert events("runs/audited", "audit fault") == []
    assert events("runs/audited", "audit failed") == []
    audits = events("runs/audited", "audit")
    assert len(audits) == 4 and all(len(entry["gemms"]) >= 2 for entry in audits)
    assert not any(entry["uncovered"] for entry in audits)


def measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldAmax, "holds", lambda self, steps, number: number == self.step)


def other_means(monkeypatch: pytest.MonkeyPatch) -> None:
    original = terms.mean_of
    monkeypatch.setattr(terms, "mean_of", lambda x_MK: original(x_MK[1:]))


def means_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = terms.as_row
    monkeypatch.setattr(terms, "as_row", lambda mean_K: original(mean_K * 0))


def residuals_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    original = terms.tensor_of
    monkeypatch.setattr(
        terms,
        "tensor_of",
        lambda prepared, dtype: original(prepared, dtype) * (1 + (dtype is torch.float32)),
    )


def terms_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = terms.joined
    monkeypatch.setattr(terms, "joined", lambda operands: original(operands[:1]))


def terms_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "Outer", lambda column, row: Outer(column, 2 * row))


SUM = "the layer returns something else than the sum of its products"


@pytest.mark.parametrize(
    ("arguments", "plant", "words"),
    [
        (held(), measured_anew, "its own amax alone"),
        (recipe("averis"), other_means, "the mean of x is not that of its tokens"),
        pytest.param(
            recipe("averis"),
            means_left_out,
            SUM,
            marks=pytest.mark.long,
        ),
        (recipe("averis"), terms_doubled, SUM),
        pytest.param(recipe("chon"), residuals_doubled, SUM, marks=pytest.mark.long),
        pytest.param(recipe("chon"), terms_left_out, SUM, marks=pytest.mark.long),
    ],
    ids=["scales that are not held", "other means", "no means", "terms", "residuals", "no terms"],
)
def test_a_wrong_scale_mean_or_residual_is_found(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Arguments,
    plant: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    Machine(monkeypatch).lacks_instructions_for()
    plant(monkeypatch)
    cli("run.name=a", *arguments(tmp_path), *AUDITED, "train.steps=4")
    faults = events("runs/a", "audit fault")
    sentences = [text for fault in faults for text in (fault["what"], fault["cause"])]
    assert any(words in text for text in sentences), faults
    assert events("runs/a", "audit failed") == []


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_run_has_the_same_bits_with_audits_of_its_quantised_layers(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs are traced as for inductor, and run kernel by kernel."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    options = ("train.compile=true", "recipe=nvfp4", "policy=last15", *STEADY)
    cli.trained("run.name=plain", *options, *SILENT)
    ended: Any = cli("run.name=audited", *options, *AUDITED)
    assert losses("runs/plain") == losses("runs/audited")
    assert events("runs/audited", "audit fault") == []
    assert events("runs/audited", "audit failed") == []
    audits = events("runs/audited", "audit")
    assert len(audits) == 6 and all(len(entry["gemms"]) >= 2 for entry in audits)
    assert "train.compile: the compiler has the products in high precision" in ended.err
