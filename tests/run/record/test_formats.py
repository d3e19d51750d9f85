"""A resume refuses another format or rounding of a name that the run was trained with."""

from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli

from fp4train import formats
from fp4train.formats import Registry
from fp4train.run.record import journal

STEADY = ("phases=none", "schedule=constant")


def test_a_format_of_the_same_name_and_other_values_does_not_go_on(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("run.name=a", "train.steps=2", "recipe=mxfp4", *STEADY).code == 0
    (start,) = journal.read_journal(Path("runs/a"))
    e2m1 = {"exponent_bits": 2, "mantissa_bits": 1, "bias": 1, "has_inf": 0, "has_nan": 0}
    assert start.values["formats"] == {"e2m1": e2m1}
    namesake = replace(formats.E2M1, exponent_bits=1, mantissa_bits=2)
    others = tuple(fmt for fmt in formats.ELEMENT_FORMATS if fmt != formats.E2M1)
    changed = Registry("element format", (namesake, *others))
    monkeypatch.setattr(formats, "ELEMENT_FORMATS", changed)
    refused = cli("resume=runs/a", "train.steps=4")
    assert refused.code != 0
    assert "another element format e2m1 (exponent_bits=2, mantissa_bits=1" in refused.err
    assert "now: exponent_bits=1, mantissa_bits=2" in refused.err and "recipe=…" in refused.err
    assert len(journal.read_journal(Path("runs/a"))) == 1
    assert cli("resume=runs/a", "train.steps=4", "recipe=bf16").code == 0
