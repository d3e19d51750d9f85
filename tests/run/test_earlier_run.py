"""A run directory that an earlier version wrote goes on: of commits 24397fc, whose checkpoints are one file each, and
03d7f39, which also kept the swaps in a file of their own, swaps.json.

Each archive has `run`, a Llama of one block, killed in step 10 of 12 after its checkpoint of step 8. A swap from NVFP4
to another recipe was asked for while it ran, and began at step 6. `resumed.jsonl` holds the metrics after the same
commit has resumed it, `text.txt` its data. The files are text, and tensors as safetensors.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, events, lines, losses, recorded

from fp4train.run.record.journal import read_journal

FIXTURES = {"earlier_run": "fp8_delayed", "earlier_run_with_swaps_file": "mxfp8"}
"""Archives, and the recipe that each run was swapped to."""
STEPS = range(1, 13)
"""Steps of the run; the last four are those after its checkpoint."""
EXACT = ("train/lr", "train/tokens", "train/loss_scale", "precision/recipe")
SUMMED = {"train/loss": 1e-4, "train/grad_norm": 2e-3, "val/loss": 1e-4, "val/loss_recipe": 1e-4, "error/sqnr_db": 1e-3}
"""Sums of floats, whose last bits are the machine's, and how far they may be off, relatively: the run was made on a CPU
without instructions for BF16, whose products others round to BF16, half a unit of which is 2e-3."""


@pytest.fixture(params=FIXTURES)
def swapped(request: pytest.FixtureRequest, cli: Cli) -> str:
    """The recipe that the run was swapped to, whose directory is in the working directory."""
    with tarfile.open(Path(__file__).with_name(f"{request.param}.tar.gz")) as archive:
        archive.extractall(cli.folder, filter="data")
    return FIXTURES[request.param]


@pytest.fixture
def earlier(swapped: str) -> Path:
    return Path("run")


def of_steps(path: Path) -> dict[int, dict[str, Any]]:
    return {each["step"]: each for each in map(json.loads, path.read_text().splitlines()) if "train/loss" in each}


def test_it_goes_on_with_the_numbers_that_the_earlier_version_would_have_given(cli: Cli, earlier: Path) -> None:
    before, wanted = losses(earlier), of_steps(Path("resumed.jsonl"))
    assert 8 <= len(before) <= 9, "killed after the checkpoint of step 8"
    ended = cli("resume=run", "data.path=text.txt", "data.cache_dir=cache")
    assert ended.code == 0 and "going on from step 8 of run" in ended.err
    found = of_steps(earlier / "metrics.jsonl")
    assert list(found) == list(wanted) == list(STEPS)
    for step in STEPS:
        assert {key: found[step].get(key) for key in EXACT} == {key: wanted[step].get(key) for key in EXACT}
        for key in SUMMED.keys() & wanted[step].keys():
            assert found[step][key] == pytest.approx(wanted[step][key], rel=SUMMED[key]), (step, key)
    assert SUMMED.keys() <= wanted[12].keys()
    assert all(losses(earlier)[step] == before[step] for step in range(1, 9)), "what it had stays"


def test_its_swap_stays_on_record(cli: Cli, earlier: Path, swapped: str) -> None:
    assert recorded(earlier) == [(6, swapped)]
    assert [each["recipe"] for each in events(earlier, "swap")] == [swapped]
    ended = cli.raw("swap", "run")
    assert ended.code == 0 and swapped in ended.out


def test_it_can_be_swapped_again_and_its_journal_goes_on(cli: Cli, earlier: Path, swapped: str) -> None:
    kept = len(read_journal(earlier))
    assert cli("resume=run", "recipe=bf16", "data.path=text.txt", "data.cache_dir=cache").code == 0
    assert recorded(earlier) == [(6, swapped), (8, "bf16")]
    assert not (earlier / "swaps.json").exists(), "the journal has them now"
    assert len(read_journal(earlier)) > kept
    assert [line["precision/recipe"] for line in lines(earlier) if "train/loss" in line][-4:] == ["BF16"] * 4


def test_verbs_on_a_trained_model_read_its_checkpoint(cli: Cli, earlier: Path) -> None:
    paths = ("data.path=text.txt", "data.cache_dir=cache")
    assert cli.raw("sample", "run", "tokens=2", "prompt=the", *paths).code == 0
    ended = cli.raw("eval", "run", "recipe=bf16", "batches=1", *paths)
    assert ended.code == 0, ended.err
