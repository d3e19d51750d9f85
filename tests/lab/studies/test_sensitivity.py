"""`fp4train sensitivity` from the command line to its files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from subjects import subject_of

from fp4train.config import to_config
from fp4train.errors import UserError
from fp4train.lab.studies import GradientMeter, RecipePart, open_record
from fp4train.lab.studies.sensitivity import identity_of
from fp4train.precision import NVFP4
from fp4train.run.record import directory as run_directory

QUICK = ("recipe=nvfp4", "batches=2", "repeats=1")


def result(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "sensitivity.json").read_text())
    return found


@pytest.fixture
def cli(cli: Cli, trained: Path) -> Cli:
    """The command line in a working directory that has a copy of the trained run, runs/a."""
    shutil.copytree(trained, "runs/a")
    return cli


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`killed_at(5)`: the process dies as the fifth measurement begins; `killed_at(-1)`: it does
    not.
    """
    original = GradientMeter.measure
    count = [0]
    at = [-1]

    def measure(self: GradientMeter, part: RecipePart, batches: range) -> Any:
        count[0] += 1
        if count[0] == at[0]:
            raise SystemExit(137)
        return original(self, part, batches)

    def choose(number: int) -> None:
        count[0] = 0
        at[0] = number

    monkeypatch.setattr(GradientMeter, "measure", measure)
    return choose


@pytest.mark.long
def test_a_study_from_the_command_to_a_policy_that_train_takes(cli: Cli) -> None:
    said = cli.raw("sensitivity", "runs/a", *QUICK)
    assert said.code == 0, said.err
    assert "runs/a, step 6: gradients in NVFP4 against FP32, 2 batches of 128 tokens" in said.out
    for title in (
        "everything",
        "under the run's policy",
        "fprop.w alone",
        "under the chosen policy",
        "damage by block",
    ):
        assert title in said.out
    folder = "runs/a/studies/sensitivity-nvfp4-6"
    found = result(folder)
    judged = found["policy"]["judged"]
    assert (
        judged["batches"] == 2 and "judged on the 2 batches after those that chose it" in said.out
    )
    recorded = (Path(folder) / "measurements.jsonl").read_text()
    assert '"reference 2-3"' in recorded and '"everything 2-3"' in recorded, (
        "others than those that chose it"
    )
    assert judged["everything"]["nmse"]["mean"] != found["parts"]["everything"]["nmse"]["mean"]
    assert (
        found["parts"]["everything"]["nmse"]["mean"] > found["parts"]["nothing"]["nmse"]["mean"] > 0
    )
    assert set(found["shares"]) == {"GEMMs", "operands", "layers"} and len(found["pareto"]) > 1
    assert (Path(folder) / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    kept = found["policy"]["keep"]
    plan = cli.raw(
        "plan",
        "resume=runs/a",
        "run.name=b",
        f"policy={folder}/policy.yaml",
        "phases=none",
        "full=true",
    )
    assert plan.code == 0, plan.err
    for pattern in kept:
        assert f"policy.keep={pattern}" in plan.out
    again = cli.raw("resume=runs/a", "run.name=b", f"policy={folder}/policy.yaml", "train.steps=7")
    assert again.code == 0, again.err
    assert list(to_config(run_directory.read_config(Path("runs/b"))).policy.keep) == kept


@pytest.mark.usefixtures("sketched")
@pytest.mark.long
def test_two_studies_are_equal_to_the_bit_and_a_killed_one_goes_on(
    cli: Cli, killed_at: Any
) -> None:
    assert cli.raw("sensitivity", "runs/a", *QUICK, "out=whole").code == 0
    killed_at(9)
    assert cli.raw("sensitivity", "runs/a", *QUICK, "out=cut").code == 137
    measured = (Path("cut") / "measurements.jsonl").read_bytes()
    assert measured.count(b'"key"') == 9, "the reference and eight parts"
    killed_at(-1)
    assert cli.raw("sensitivity", "runs/a", *QUICK, "out=cut").code == 0
    assert result("cut") == result("whole")
    assert (Path("cut") / "measurements.jsonl").read_bytes() == (
        Path("whole") / "measurements.jsonl"
    ).read_bytes()
    killed_at(1)
    assert cli.raw("sensitivity", "runs/a", *QUICK, "out=whole").code == 0, (
        "nothing is measured again"
    )


@pytest.mark.long
def test_one_batch_has_no_interval_and_another_recipe_is_refused_in_its_folder(cli: Cli) -> None:
    said = cli.raw("sensitivity", "runs/a", "recipe=mxfp8", "batches=1", "keep=0.2")
    assert said.code == 0, said.err
    assert (
        "1 batch of 128 tokens" in said.out
        and "A single batch has no interval; give more batches." in said.out
    )
    assert "|G|²" not in said.out, "it needs products of two batches"
    folder = "runs/a/studies/sensitivity-mxfp8-6"
    everything = result(folder)["parts"]["everything"]
    assert everything["nmse"]["error"] is everything["bias2"] is None
    refused = cli.raw("sensitivity", "runs/a", *QUICK, f"out={folder}").message
    assert "another study (recipe: MXFP8 there, NVFP4 here" in refused and "out=…" in refused


@pytest.mark.usefixtures("sketched")
@pytest.mark.long
def test_an_earlier_step_and_a_fresh_model(cli: Cli) -> None:
    assert cli.raw("sensitivity", "runs/a", "recipe=mxfp8", "batches=1", "step=3").code == 0
    run_directory.Folder.open(Path("runs/a")).remove_folder("checkpoints")
    said = cli.raw("sensitivity", "runs/a", *QUICK)
    assert "no checkpoint yet; step=0 studies its model as it was initialised" in said.message
    assert cli.raw("sensitivity", "runs/a", "recipe=mxfp8", "batches=1", "step=0").code == 0
    names = sorted(path.name for path in Path("runs/a/studies").iterdir())
    assert names == ["sensitivity-mxfp8-0", "sensitivity-mxfp8-3"]


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
@pytest.mark.long
def test_a_model_without_a_run_is_studied_as_one_is_that_a_run_initialised(cli: Cli) -> None:
    """The same keys and seed: the same weights, batches and numbers, whether a run began with them
    or not.
    """
    keys = [*cli.tiny(), "data/tokenizer=bpe", "data.tokenizer.vocab_size=300"]
    said = cli.raw("sensitivity", "model=llama_tiny", *keys, *QUICK)
    assert said.code == 0, said.message
    assert "llama_tiny-nvfp4, not trained, step 0: gradients in NVFP4" in said.out
    folder = Path("runs/studies/sensitivity-llama_tiny-nvfp4")
    assert cli.raw("sensitivity", "runs/a", "step=0", *QUICK).code == 0
    found, of_run = (
        json.loads((each / "sensitivity.json").read_text())
        for each in (folder, Path("runs/a/studies/sensitivity-nvfp4-0"))
    )
    assert found["parts"] == of_run["parts"] and found["policy"] == of_run["policy"]
    again = cli.raw(
        "sensitivity",
        "model=llama_tiny",
        *(key for key in keys if "seq_len" not in key),
        "train.seq_len=16",
        *QUICK,
    )
    assert again.code == 1 and "another study" in again.message, (
        "another configuration of that name"
    )


BAD = {
    "no run": (
        ["recipe=nvfp4"],
        "sensitivity needs one run directory, or model=…: fp4train sensitivity RUN",
    ),
    "a sweep": (["runs/a", "-m", "recipe=nvfp4,mxfp8"], "one recipe at a time"),
    "a recipe that quantises nothing": (["runs/a", "recipe=fp32"], "quantises nothing"),
    "an unknown step": (["runs/a", "step=4"], "no checkpoint of step 4; it has 3, 6"),
    "more batches than there are": (
        ["runs/a", "batches=999"],
        "the policy is judged on some that did not choose it",
    ),
    "a budget": (["runs/a", "budget=1h"], "unknown key 'budget': batches=N says how many"),
    "a GPU": (["runs/a", "gpu=B200"], "unknown key 'gpu': times of a GPU are those of"),
    "another model": (["runs/a", "model.width=64"], "model.width: 32 → 64"),
}


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_studied_is_one_message_and_leaves_no_folder(
    cli: Cli, words: list[str], message: str
) -> None:
    said = cli.raw("sensitivity", *words)
    assert said.code == 1 and message in said.message
    assert not Path("runs/a/studies").exists()


@pytest.mark.usefixtures("sketched")
def test_a_study_cannot_go_on_with_other_weights(trained: Path, tmp_path: Path) -> None:
    for step, message in ((3, None), (6, "another study")):
        subject = subject_of(trained, step=step)
        try:
            with open_record(tmp_path, identity_of(subject, NVFP4(), 4), subject.step):
                assert message is None
        except UserError as error:
            assert message is not None and message in str(error)
