"""A resume refuses another format or rounding of a name that the run was trained with."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli

from fp4train import formats
from fp4train.formats import Registry
from fp4train.quantize import ROUNDINGS
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


def test_a_rounding_of_a_plugin_that_changed_does_not_go_on(cli: Cli, tmp_path: Path) -> None:
    """Neither does a scale format: a name stands for what the run was trained with."""
    code = (
        "from dataclasses import dataclass\n"
        "from fp4train.formats import ScaleFormat\n"
        "from fp4train.quantize import Rounding, register\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Down(Rounding):\n"
        "    share: float = SHARE\n"
        "    def integers(self, position, bits):\n"
        "        floor = position.floor()\n"
        "        return floor.add_(position.sub_(floor) >= self.share)\n"
        "register(Down(name='down'), ScaleFormat.unsigned(name='ue4m4', exponent_bits=4, "
        "mantissa_bits=4, bias=7, needs_global=False))\n"
    )
    operand = (
        "{_target_: fp4train.quantize.QuantSpec, scale: ue4m4, global_scale: null, rounding: down}"
    )
    (tmp_path / "mine/recipe").mkdir(parents=True)
    (tmp_path / "mine/recipe/down.yaml").write_text(
        "_target_: fp4train.precision.Custom\nlabel: down\n"
        f"fprop: {{_target_: fp4train.precision.Operands, first: {operand}}}\n"
    )
    words = ("--config-dir", "mine", "plugins=[own_lab]")
    module = tmp_path / "mine/own_lab.py"
    for share, code_of_end in (("1.0", 0), ("0.5", 1)):
        module.write_text(code.replace("SHARE", share))
        sys.modules.pop("own_lab", None)
        for registry in (ROUNDINGS, formats.SCALE_FORMATS):
            for name in set(registry.names) & {"down", "ue4m4"}:
                registry.remove(name)
        if code_of_end:
            ended = cli("resume=runs/a", "train.steps=4", *words)
            assert "another rounding down (class=own_lab.Down" in ended.err
        else:
            ended = cli("run.name=a", "train.steps=2", "recipe=down", *STEADY, *words)
        assert ended.code == code_of_end, ended.err
    (start,) = journal.read_journal(Path("runs/a"))
    assert {"scale ue4m4", "rounding down", "e2m1"} == set(start.values["formats"])
