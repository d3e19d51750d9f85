"""docs/moe.md: its commands run, on a smaller model, and its keys exist; so do the policies that
are ranked.
"""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from family_pages import check_commands, listed_keys

from fp4train.cli import main
from fp4train.models.moe import Balance, ExpertShape


@pytest.mark.long
def test_every_command_works_in_the_order_of_the_page(working_folder: Path) -> None:
    np.zeros(1000, dtype="<u2").tofile("tokens.bin")
    check_commands("moe.md", 7)


def test_the_page_names_every_key_that_is_the_family_s_own() -> None:
    parts = {"experts": ExpertShape, "balance": Balance}
    keys = {f"model.{part}.{each.name}" for part, kind in parts.items() for each in fields(kind)}
    assert listed_keys("moe.md") == keys | {"model.dense", "model.hidden"}


def test_the_policies_that_are_ranked_keep_the_layers_that_the_table_names(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "moe_policies.md").read_text(
        encoding="utf-8"
    )
    for line in re.findall(r"^printf .*$", page, re.MULTILINE):
        (_, _, *lines, _, name) = shlex.split(line)
        Path(name).write_text("\n".join(lines))
    (policies,) = re.findall(r"^fp4train rank .* policy=(\S+)", page, re.MULTILINE)
    (model,) = re.findall(r"^fp4train (model=\S+) .* run.name=", page, re.MULTILINE)
    quantised: dict[str, set[str]] = {}
    for policy in policies.split(","):
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "plan",
                    model,
                    "recipe=nvfp4",
                    "phases=none",
                    f"policy={policy}",
                    "policy.last=0",
                    "--json",
                ]
            )
        assert ended.value.code == 0
        rows = json.loads(capsys.readouterr().out)["gemms"]
        found = (
            each["layer"].removeprefix("blocks.1.")
            for each in rows
            if each["elements"] == "E2M1·E2M1"
        )
        quantised[policy] = {
            layer.rpartition(".")[0] for layer in found if not layer.startswith("blocks.")
        }
    assert quantised == {
        "all": {"attention", "mlp", "mlp.shared"},
        "mxfp8_attention": {"mlp", "mlp.shared"},
        "experts.yaml": {"mlp"},
        "attention.yaml": {"attention"},
        "mxfp8.yaml": set(),
    }
