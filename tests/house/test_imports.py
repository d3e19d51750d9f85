"""What is imported when: nothing that a user may lack, or not want, before it is used."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fp4train

ROOT = Path(__file__).parents[2]

STAGES = {
    "fp4train": "transformer_engine triton torchao wandb datasets tokenizers matplotlib "
    "hydra omegaconf fsspec s3fs",
    "fp4train.data": "datasets tokenizers pyarrow hydra omegaconf fsspec s3fs",
    "fp4train.quantize.triton": "triton",
    "fp4train.backends.te": "transformer_engine",
    "fp4train.lab.analysis.compare": "matplotlib",
    "fp4train.lab.analysis.curves": "matplotlib",
    "fp4train.run.build": "matplotlib wandb datasets transformer_engine triton tokenizers "
    "transformers",
    "fp4train.train": "matplotlib wandb datasets transformer_engine triton tokenizers transformers",
    "fp4train.cli": "matplotlib wandb datasets transformer_engine triton tokenizers transformers",
    "fp4train.cli.export": "matplotlib wandb datasets transformer_engine triton tokenizers "
    "transformers",
    "fp4train.integrations.loop": "transformers accelerate lightning peft",
}
"""Modules in the order in which one process imports them, and what is not loaded by then."""

PROGRAM = """
import importlib, json, sys
found = {}
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    found[module] = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps(found))
"""


@pytest.mark.long
def test_importing_a_module_loads_nothing_that_a_user_may_lack_or_not_want() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(STAGES))]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    for module, loaded in json.loads(run.stdout).items():
        unwanted = set(STAGES[module].split()) & set(loaded)
        assert not unwanted, (
            f"import {module} loads {', '.join(sorted(unwanted))}: import it where it is used"
        )


def test_no_function_hides_a_package() -> None:
    """`import fp4train.NAME.… as x` would give attributes of the function."""
    specs = [importlib.util.find_spec(f"fp4train.{name}") for name in fp4train.__all__]
    assert not [spec.name for spec in specs if spec and spec.origin], (
        "a folder without files is none"
    )
