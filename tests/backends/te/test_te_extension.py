"""The stand-in of TE's extension has the names and values of the real one, where that is installed.

TE_SITE names the folder that `install.sh` of a carried Transformer Engine filled, and TE_PYTHON a
Python with the torch that its extension is for; neither a GPU nor a driver is needed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SITE = os.environ.get("TE_SITE")
ENUMS = ("DType", "NVTE_Fused_Attn_Backend", "FP8FwdTensors", "FP8BwdTensors")
REAL = """
import torch  # loads NCCL
import transformer_engine.pytorch  # loads its core library, whose symbols the extension takes
import transformer_engine_torch as extension
"""
STAND_IN = """
import sys
import te_on_cpu
te_on_cpu.against_emulation()  # asks for what layers of every recipe call
extension = sys.modules["transformer_engine_torch"]
"""
WHAT = """
import json
enums = {enums}
print(json.dumps({{
    "names": [name for name in dir(extension) if not name.startswith("__")],
    "enums": {{
        name: {{member: int(value) for member, value in getattr(extension, name).__members__.items()}}
        for name in enums
    }},
}}))
"""


def contents(python: str, place: Path, module: str) -> dict[str, Any]:
    """The names of an extension, and its enums' members."""
    code = module + WHAT.format(enums=ENUMS)
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(SITE is None, reason="TE_SITE names no folder with a Transformer Engine")
def test_the_stand_in_has_names_and_enums_of_the_real_extension() -> None:
    real = contents(os.environ.get("TE_PYTHON", sys.executable), Path(SITE or ""), REAL)
    stand_in = contents(sys.executable, Path(__file__).parent, STAND_IN)
    called = {"generic_gemm"}  # by backends/te/observed.py, which watches TE's products
    assert not (called | set(stand_in["names"])) - set(real["names"])
    for name in ENUMS:
        missing = stand_in["enums"][name].items() - real["enums"][name].items()
        assert not missing, f"{name}: {sorted(missing)} beside {real['enums'][name]}"
