"""The stand-in of TE's extension has the names and values of the real one, where that is installed.

TE_SITE names the folder that `install.sh` of a carried Transformer Engine filled, and TE_PYTHON a
Python with the torch that its extension is for; neither a GPU nor a driver is needed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = os.environ.get("TE_SITE")
ENUMS = {
    "DType": "DType",
    "NVTE_Fused_Attn_Backend": "FusedAttention",
    "FP8FwdTensors": "ForwardSlot",
    "FP8BwdTensors": "BackwardSlot",
}
"""Enum of the extension → its stand-in."""
VALUES = """
import json, sys, torch
{before}
import {module} as module
print(json.dumps({{
    name: {{member: int(value) for member, value in getattr(module, name).__members__.items()}}
    for name in sys.argv[1:]
}}))
"""


def values(
    python: str, place: Path, module: str, names: list[str], before: str = ""
) -> dict[str, dict[str, int]]:
    """Enum → its members, of a module in a folder; `before`: what is executed before its import."""
    code = VALUES.format(module=module, before=before)
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run(
        [python, "-c", code, *names], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(SITE is None, reason="TE_SITE names no folder with a Transformer Engine")
def test_the_stand_ins_enums_have_members_and_values_of_the_real_extension() -> None:
    python = os.environ.get("TE_PYTHON", sys.executable)
    # Transformer Engine loads its core library, whose symbols the extension takes
    loads = "import transformer_engine.pytorch"
    real = values(python, Path(SITE or ""), "transformer_engine_torch", list(ENUMS), loads)
    here = Path(__file__).parent
    stand_in = values(sys.executable, here, "te_on_cpu", list(ENUMS.values()))
    for name, ours in ENUMS.items():
        missing = stand_in[ours].items() - real[name].items()
        assert not missing, f"{name}: {sorted(missing)} beside {real[name]}"
