"""`fp4train rank` on a tiny run: the table, what goes on where it stopped, equal numbers, and what
it refuses.
"""

import json
import multiprocessing
import re
import signal
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command_line import STEADY, Cli, Outcome
from stand_in_forks import forks_by, killed_after_forks

import fp4train.lab.studies.forks as workers
from fp4train.lab.studies import MEASUREMENTS, Fork, bases

FAST = ("steps=2", "forks=2", "batches=1", "recipe=bf16,mxfp8", "step=3")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Forks without training: 5 nats, what the seed does, .01 times the candidate's place. Returns
    what was made.
    """
    made: list[tuple[str, int]] = []

    def fork(subject: Any, branch: Any, settings: Any, number: int) -> Fork:
        name = branch.candidate.name
        made.append((name, number))
        place = {"bf16": 0, "fp32": 0, "mxfp8": 1, "nvfp4": 2, "mxfp4": 3}[
            name.lower().partition(" ")[0]
        ]
        loss = 5 + 0.1 * number + 0.01 * place + 1e-4 * ((7 * number + 3 * place) % 5)
        parts = [loss] * settings.batches  # a pass for each
        return Fork(recipe=loss, high=loss, train=loss, problem=None, seconds=0.01, parts=parts)

    forks_by(monkeypatch, fork)
    return made


def numbers(folder: Path) -> dict[str, Any]:
    """What two rankings must have in common: everything but the seconds, and the checksum over
    them.
    """
    found: dict[str, Any] = json.loads((folder / "rank.json").read_text())
    del found["sha256"]
    for candidate in found["candidates"]:
        for each in candidate["forks"]:
            del each["seconds"]
    return found


def rows(shown: str) -> list[list[str]]:
    """The cells of the table's lines."""
    return [line.split() for line in shown.splitlines() if re.match(r" ?\d  ", line)]


def said(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome.err
    return outcome.out


@pytest.mark.long
def test_forks_are_evaluated_on_each_held_out_sequence_once(cli: Cli) -> None:
    """Seven sequences of 32 tokens, fewer than a batch of eight."""
    held_out = ("data.val=225", "train.batch_size=8", "eval.batches=1")
    base = cli.trained("run.name=small", "recipe=fp32", "policy=all", *held_out, *STEADY)
    scored = json.loads(cli.raw("eval", str(base), "record=false", "--json").out)["scores"][0]
    words = ("recipe=fp32", "steps=1", "forks=2", "lr=1e-12", "schedule=linear", "out=all")
    said(cli.raw("rank", str(base), *words))
    ranking = numbers(Path("all"))
    assert ranking["validation_tokens"] == scored["values"]["tokens"] == 7 * 32
    (fork, _) = ranking["candidates"][0]["forks"]
    assert fork["high"] == pytest.approx(scored["values"]["loss"], abs=1e-6)


def test_a_ranking_is_a_table_a_file_and_a_picture(cli: Cli, trained: Path) -> None:
    shown = said(cli.raw("rank", str(trained), *FAST, "out=first"))
    assert f"{trained}, step 3: 2 forks of 2 steps each, learning rate" in shown
    assert "gap to bf16, nats per token" in shown and "floor of the noise: FP32 − BF16 = " in shown
    screen = shown.replace(str(trained), "runs/a").splitlines()
    assert max(map(len, screen)) < 130 and len(screen) < 40, "one screen"
    found = numbers(Path("first"))
    assert [each["name"] for each in found["candidates"]] == ["bf16", "mxfp8", "FP32"]
    assert Path("first/rank.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # once more, in another place: everything is measured anew, to the same bits
    said(cli.raw("rank", str(trained), *FAST, "out=second"))
    assert numbers(Path("second")) == found


@pytest.mark.long
@pytest.mark.usefixtures("pretend")
def test_a_checkpoint_from_the_end_of_a_cooldown_is_a_warning(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=30", "checkpoint.every=6", "schedule.warmup=0")
    late = cli.raw("rank", "runs/a", *FAST[:-1])
    assert late.code == 0 and "step 30 is from the cooldown: forks begin at a" in late.err
    assert "(step=24 is from before the cooldown)" in late.err
    early = cli.raw("rank", "runs/a", *FAST[:-1], "step=24")
    assert early.code == 0 and "from the cooldown" not in early.err


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_two_processes_make_the_same_numbers_as_one(cli: Cli, trained: Path) -> None:
    said(cli.raw("rank", str(trained), *FAST, "out=one"))
    said(cli.raw("rank", str(trained), *FAST, "out=two", "processes=2"))
    assert numbers(Path("one")) == numbers(Path("two"))


@pytest.mark.usefixtures("sketched")
@pytest.mark.long
def test_a_killed_ranking_goes_on_where_it_stopped(
    cli: Cli, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(cli.raw("rank", str(trained), *FAST, "out=whole"))
    record = Path("killed") / MEASUREMENTS
    words = ["rank", str(trained), *FAST, "out=killed"]
    assert killed_after_forks(monkeypatch, 2, words) == -signal.SIGKILL
    done = record.read_bytes()
    assert done.count(b'"parts"') == 2, "its forks"
    assert not Path("killed/rank.json").exists()
    said(cli.raw(*words))
    assert record.read_bytes().startswith(done)
    assert numbers(Path("killed")) == numbers(Path("whole"))


@pytest.mark.usefixtures("sketched")
@pytest.mark.long
def test_a_process_that_is_killed_ends_the_ranking_with_a_reason(
    cli: Cli, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(futures: Any) -> Any:
        for process in multiprocessing.active_children():
            process.kill()
        return as_completed(futures)

    monkeypatch.setattr(workers, "as_completed", killed)
    outcome = cli.raw("rank", str(trained), *FAST, "processes=2", "out=a")
    assert outcome.code == 1 and "a process of the ranking ended: if the memory" in outcome.message


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_the_same_command_measures_nothing_and_more_forks_go_on(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    command = ("rank", str(trained), "step=3", "steps=2", "recipe=bf16,mxfp8,nvfp4", "out=a")
    first = said(cli.raw(*command, "forks=6"))
    assert len(pretend) == 24 and [number for _, number in pretend] == [
        k for k in range(6) for _ in range(4)
    ]
    assert said(cli.raw(*command, "forks=6")) == first and len(pretend) == 24
    said(cli.raw(*command, "forks=9"))
    assert sorted(pretend[24:]) == sorted(
        (n, k) for n in ("bf16", "mxfp8", "nvfp4", "FP32") for k in (6, 7, 8)
    )
    assert ": 9 forks of 2 steps" in said(cli.raw(*command, "forks=6")), (
        "all forks of the record are used"
    )
    said(cli.raw(*command[:4], "recipe=bf16,nvfp4,mxfp4", "out=a", "forks=9"))
    assert {name for name, _ in pretend[36:]} == {"mxfp4"}, "the others are known"


def p_of(folder: str, first: str, second: str) -> float:
    pairs = numbers(Path(folder))["pairs"]
    return next(
        float(pair["p"]) for pair in pairs if {pair["first"], pair["second"]} == {first, second}
    )


@pytest.mark.usefixtures("sketched")
def test_fewer_candidates_of_the_same_record_buy_no_significance(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    command = ("rank", str(trained), "step=3", "out=a", "forks=8")
    shown = said(cli.raw(*command, "recipe=bf16,mxfp8,nvfp4,mxfp4"))
    assert "corrected for 6 comparisons of all 4 candidates in the record\n" in shown
    before = p_of("a", "bf16", "nvfp4")
    shown = said(cli.raw(*command, "recipe=bf16,nvfp4"))
    assert p_of("a", "bf16", "nvfp4") == before
    assert "corrected for 6 comparisons of all 4 candidates in the record (2 not shown)" in shown
    assert "look 1 at this record" in shown and len(rows(shown)) == 2


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_candidates_that_are_added_are_further_looks_that_ask_for_more_and_other_references_are_none(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    command = ("rank", str(trained), "step=3", "out=a", "forks=9")
    for recipes, words in (
        ("bf16,mxfp8", "look 1 at this record has 80.0% of the 5%"),
        ("bf16,nvfp4", "look 2 at this record has 10.0% of the 5%"),
        ("nvfp4,bf16", "look 2 at this record has 10.0% of the 5%"),
        ("bf16,mxfp4", "from earlier looks: look 3 needs 11 forks"),
    ):
        shown = said(cli.raw(*command, f"recipe={recipes}"))
        assert words in shown
    assert "told apart here" in said(cli.raw(*command, "recipe=bf16,mxfp8")), (
        "what was found stays found"
    )


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_several_checkpoints_are_ranked_together_and_one_is_said_to_hold_for_itself(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    sweep = ("recipe=bf16,mxfp8,nvfp4", "forks=3", "out=a")
    alone = said(cli.raw("rank", str(trained), "step=3", *sweep[:2], "out=b"))
    assert "one checkpoint: all of this holds for it alone" in alone
    assert "no tests: look 1 at this record needs 6 forks; forks=6 makes them" in alone
    shown = said(cli.raw("rank", str(trained), "step=3,6", *sweep))
    assert (
        "step 3: 3 forks of" in shown
        and "step 6: 3 forks of" in shown
        and "trained in NVFP4" in shown
    )
    assert (
        "2 checkpoints of one run: the spread between its ages is in ±, that between runs is not"
        in shown
    )
    assert "12.7 errors of the mean of 2" in shown and "sign flips of 6 forks" in shown
    found = numbers(Path("a"))
    assert [each["step"] for each in found["checkpoints"]] == [3, 6] and found["units"] == 2
    reference, *others = found["candidates"]
    assert reference["gaps"] == [] and all(len(other["gaps"]) == 2 for other in others)
    assert all(len(candidate["forks"]) == 6 for candidate in found["candidates"])
    outcome = cli.raw("rank", str(trained), str(trained), *sweep)
    assert outcome.code == 1 and "are the same checkpoint: name it once" in outcome.message


@pytest.mark.usefixtures("sketched")
def test_candidates_that_run_alike_are_measured_once_and_told(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    sweep = ("recipe=bf16,nvfp4", "policy=last15,all", "forks=1", "out=a")
    shown = said(cli.raw("rank", str(trained), "step=3", *sweep))
    assert sorted(pretend) == [
        ("FP32", 0),
        ("bf16 policy=last15", 0),
        ("nvfp4 policy=all", 0),
        ("nvfp4 policy=last15", 0),
    ]
    assert "bf16 policy=last15 stands for bf16 policy=all, too: every GEMM runs alike" in shown


@pytest.mark.usefixtures("sketched")
def test_a_policy_file_is_a_candidate(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    Path("mine.yaml").write_text("_target_: fp4train.precision.LayerPolicy\nfirst: 1\nlast: 0\n")
    said(
        cli.raw(
            "rank",
            str(trained),
            "step=3",
            "recipe=nvfp4",
            "policy=all,mine.yaml",
            "forks=1",
            "out=a",
        )
    )
    assert ("nvfp4 policy=mine", 0) in pretend


@pytest.mark.usefixtures("sketched")
def test_one_recipe_is_compared_with_bf16(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    shown = said(cli.raw("rank", str(trained), "step=3", "recipe=nvfp4", "forks=6", "out=a"))
    assert "gap to nvfp4" in shown and [row[1] for row in rows(shown)] == ["BF16", "nvfp4"]


def test_one_fork_has_no_interval_and_says_so(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]]
) -> None:
    shown = said(cli.raw("rank", str(trained), "step=3", "recipe=bf16,nvfp4", "forks=1", "out=a"))
    assert "± –" in shown and "one fork: no interval, and nothing is told apart" in shown
    found = numbers(Path("a"))
    assert (
        found["pairs"][0]["difference"]["error"] is None and found["pairs"][0]["verdict"] == "open"
    )


def test_a_candidate_that_diverges_is_last_with_the_layer_and_not_compared(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def fork(subject: Any, branch: Any, settings: Any, number: int) -> Fork:
        if branch.candidate.name == diverging and number in (1, 3):
            why = "step 1: loss is nan in MXFP8; first non-finite: output of blocks.0.mlp.down"
            return Fork(recipe=None, high=None, train=None, problem=why, seconds=0.1)
        return whole(subject, branch, settings, number)

    whole = forks_by(monkeypatch, fork)
    diverging = "mxfp8"
    shown = said(
        cli.raw("rank", str(trained), "step=3", "recipe=bf16,mxfp8,nvfp4", "forks=4", "out=a")
    )
    assert (
        "mxfp8: 2 of 4 forks diverged, it is not compared; the first: step 1: loss is nan in MXFP8"
        in shown
    )
    assert "output of blocks.0.mlp.down" in shown
    found = numbers(Path("a"))
    assert found["order"] == ["bf16", "nvfp4"] and len(found["pairs"]) == 1
    diverging = "bf16"
    outcome = cli.raw("rank", str(trained), "step=3", "recipe=bf16,nvfp4", "forks=4", "out=b")
    assert (
        outcome.code == 1
        and "the reference bf16 diverged" in outcome.message
        and "blocks.0" in outcome.message
    )


@pytest.mark.usefixtures("sketched")
def test_a_full_disk_costs_the_files_and_not_the_table(
    cli: Cli, trained: Path, pretend: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def fork(*arguments: Any) -> Fork:
        monkeypatch.setattr("os.write", full)
        return whole(*arguments)

    whole = forks_by(monkeypatch, fork)
    outcome = cli.raw("rank", str(trained), "step=3", "recipe=bf16,nvfp4", "forks=4", "out=a")
    assert outcome.code == 1 and "No space left on device" in outcome.message
    assert "4 forks of 24 steps" in outcome.out and "high precision" in outcome.out
    monkeypatch.undo()


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=nvpf4"], "recipe=nvpf4: there is no such recipe; did you mean 'nvfp4'?"),
        (["step=4"], "step=4: {run} has no such checkpoint; it has 3, 6"),
        (["forks=0"], "forks=0 must be a whole number from 1"),
        (["steps=0"], "steps=0 must be a whole number from 1"),
        (["schedule=lineal"], "schedule='lineal' must be one of linear, own"),
        (
            ["schedule=own"],
            "schedule=own: the run ends at step 6, no step is left after step 6; give an "
            "earlier step=",
        ),
        (
            ["schedule=own", "step=3", "lr=1"],
            "schedule=own has the rates of the run: leave out lr=",
        ),
        (["schedule=own", "step=3", "steps=4"], "steps=4: the run has 3 steps left after step 3"),
        (["recipe=bf16"], "there is nothing to rank: bf16 is one candidate"),
        (["recipe=nvfp4,bf16", "baseline=mxfp4"], "baseline=mxfp4 is no candidate"),
        (
            ["recipe=bf16,nvfp4", "policy.last=1.0"],
            "bf16, nvfp4 run every GEMM of this model alike; nothing is quantised",
        ),
        (
            ["recipe=bf16,nvfp4", "policy.keep=[nothing]"],
            "bf16: policy.keep='nothing' matches no linear layer",
        ),
    ],
)
def test_what_cannot_be_ranked_is_refused(
    cli: Cli, trained: Path, words: list[str], message: str
) -> None:
    outcome = cli.raw("rank", str(trained), *words)
    assert outcome.code == 1
    assert message.format(run=trained) in outcome.message
    assert not (trained / "studies").exists()


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("verb", ["rank", "gate"])
def test_a_candidate_that_does_not_fit_is_refused_before_data_are_opened(
    cli: Cli, trained: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(bases, "open_subject", Mock(side_effect=AssertionError))
    words = ["margin=0.01", "recipe=nvfp4", "policy.last=-1"]
    assert "last=-1 must be a count of blocks" in cli.raw(verb, str(trained), *words).message


@pytest.mark.usefixtures("sketched")
def test_a_run_without_a_checkpoint_is_refused(cli: Cli, trained: Path) -> None:
    Path("empty").mkdir()
    Path("empty/config.yaml").write_bytes((trained / "config.yaml").read_bytes())
    assert "empty has no checkpoint yet" in cli.raw("rank", "empty").message
    assert "nowhere is not a run directory" in cli.raw("rank", "nowhere").message
    assert "rank needs run directories" in cli.raw("rank").message
