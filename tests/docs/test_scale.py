"""docs/scale.md: commands of one machine are run, those of a cluster parsed; its keys are those of
the section.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from configured import points_of
from shown import SMALL
from torch.distributed.run import get_args_parser

from fp4train.cli import main
from fp4train.errors import LostError
from fp4train.parallel import Parallel

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
TINY = (*SMALL, "train.steps=2")
SBATCH = {"--nodes", "--time", "--account", "--export"}


def commands(*programs: str) -> list[list[str]]:
    """What the documentation and the README show of these programs."""
    shown = re.findall(r"^```bash\n(.*?)^```$", TEXT + README, re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for block in shown for line in block.splitlines()]
    return [words for words in lines if words and words[0] in programs]


def runs_here(words: list[str]) -> bool:
    return words[0] == "torchrun" and "device=cpu" in words


def check_torchrun(words: list[str]) -> None:
    read = get_args_parser().parse_args(words)
    assert read.module and read.training_script == "fp4train"
    assert points_of(read.training_script_args)


def test_every_command_is_of_a_program_that_is_checked_here() -> None:
    shown = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    programs = {line.split()[0] for block in shown for line in block.splitlines()}
    assert programs == {"torchrun", "fp4train", "sbatch", "kubectl"}


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [each for each in commands("torchrun") if runs_here(each)], ids=" ".join
)
def test_commands_of_one_machine_work(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:], *TINY]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # older torchruns of one machine all meet at port 29500
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 2, done" in done.stdout


@pytest.mark.parametrize("words", commands("torchrun"), ids=" ".join)
def test_torchrun_and_fp4train_read_their_commands(words: list[str]) -> None:
    check_torchrun(words[1:])


@pytest.mark.long
def test_the_plan_of_a_mesh_is_made_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    plans = [
        words
        for words in commands("fp4train")
        if "plan" in words and "parallel." in " ".join(words)
    ]
    assert len(plans) == 4, "three of docs/scale.md and one of the README"
    for words in plans:
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        said = capsys.readouterr()
        assert (
            ended.value.code == 0
            and "tokens/s per GPU" in said.out
            and "does not fit" not in said.out
        ), said


def test_sbatch_is_given_options_that_it_has() -> None:
    found = commands("sbatch")
    assert len(found) >= 2 and "#SBATCH" in (ROOT / "scripts/slurm.sbatch").read_text()
    for words in found:
        place = words.index("scripts/slurm.sbatch")
        assert {word for word in words[1:place] if word.startswith("-")} <= SBATCH
        assert points_of(words[place + 1 :])


def test_it_says_which_network_ranks_take_and_what_launchers_start_again() -> None:
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= set(re.findall(r"`(\w+_IFNAME)`", TEXT))
    script = (ROOT / "scripts/slurm.sbatch").read_text(encoding="utf-8")
    codes = re.findall(r"^  ([\d |]+)\)", script, re.MULTILINE)
    assert [set(each.split(" | ")) for each in codes] == [{"138"}, {"75", "134", "142"}]
    told = TEXT.partition("## Endings\n")[2].partition("\n## ")[0]
    assert (
        all(f"{code} " in told or f"{code}," in told for code in (75, 134, 138, 142, 143))
        and LostError.exit_code == 75
    )


def test_kubectl_is_given_a_jobset() -> None:
    ((program, verb, flag, file),) = commands("kubectl")
    assert (program, verb, flag) == ("kubectl", "apply", "-f")
    assert yaml.safe_load((ROOT / file).read_text())["kind"] == "JobSet"


def test_the_table_of_the_mesh_has_every_key() -> None:
    section = TEXT.partition("## The mesh\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `parallel\.(\w+)` \|", section, re.MULTILINE)) == {
        f.name for f in fields(Parallel)
    }


def test_the_files_of_a_checkpoint_have_the_names_of_the_code() -> None:
    from fp4train.checkpoint import STATE, directory_name

    assert directory_name(100) in TEXT and STATE in TEXT


def test_its_links_exist() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
