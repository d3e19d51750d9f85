"""`fp4train gate` on a tiny run: verdicts and their exit codes, what goes on where it stopped, what is
recorded, and what it refuses.
"""

import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Outcome
from finished_runs import FinishedRuns
from stand_in_forks import forks_by

import fp4train.cli.gate as command
from fp4train.lab.studies import Fork

FAST = ("steps=1", "batches=1", "recipe=mxfp8")
Pretend = Callable[..., list[tuple[str, int]]]


@pytest.fixture
def trained(finished: FinishedRuns) -> Path:
    """A run directory with checkpoints of steps 3 and 6; tests leave it as it is."""
    return finished("checkpoint.every=3")


@pytest.fixture
def here(cli: Cli, trained: Path) -> str:
    """A copy of `trained` in the working directory."""
    shutil.copytree(trained, "runs/a")
    return "runs/a"


@pytest.fixture
def run(cli: Cli, small_run: Path) -> str:
    """A copy of a finished run, from which no fork is really trained: it keeps what is asked."""
    shutil.copytree(small_run, "asked/small", symlinks=True)
    return "asked/small"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """`pretend(gap)`: forks without training, 5 nats, what the seed does, and `gap` in the recipe;
    gives what was made. `problem`: (recipe, seed) of a fork that diverges.
    """
    made: list[tuple[str, int]] = []

    def choose(gap: float, problem: tuple[str, int] | None = None) -> list[tuple[str, int]]:
        def fork(subject: Any, branch: Any, settings: Any, number: int) -> Fork:
            name = branch.candidate.name
            made.append((name, number))
            if (name, number) == problem:
                why = "step 1: loss is nan in MXFP8; first non-finite: blocks.0.mlp.down"
                return Fork(recipe=None, high=None, train=None, problem=why, seconds=0.1)
            loss = 5 + 0.1 * number + (gap + 1e-4 * (number % 3)) * (name != "bf16")
            return Fork(recipe=loss, high=loss, train=loss, problem=None, seconds=0.1, parts=[loss])

        forks_by(monkeypatch, fork)
        return made

    return choose


def saved(folder: str = "found") -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((Path(folder) / "gate.json").read_text())
    return contents


def gate(cli: Cli, run: str, *words: str) -> Outcome:
    return cli.raw("gate", run, *FAST, "out=found", *words)


def test_real_forks_end_in_a_number_beforehand_an_answer_and_its_exit_code(
    cli: Cli, run: str, text: Path
) -> None:
    ended = gate(cli, run, "margin=3", "bound=4", "forks=4", f"data.path={text}")
    assert ended.code == 0, ended.err
    assert "pairs of forks over 1 checkpoint" in ended.out and "(assumed), bound 4" in ended.out
    assert "WITHIN: mxfp8 against bf16, margin ±3 nats per token" in ended.out
    answer = saved()
    assert answer["verdict"] == "within" and answer["pairs"] == 4 == len(answer["differences"])
    low, high = answer["interval"]
    assert -3 < low < answer["gap"] < high < 3


@pytest.mark.parametrize(
    ("gap", "verdict", "code"),
    [
        (0.001, "WITHIN", 0),
        (-0.05, "BEYOND", 1),
        pytest.param(0.0099, "UNDECIDED", 2, marks=pytest.mark.long),
    ],
)
def test_the_exit_code_is_that_of_the_verdict(
    cli: Cli, run: str, pretend: Pretend, gap: float, verdict: str, code: int
) -> None:
    made = pretend(gap)
    ended = gate(cli, run, "margin=0.01")
    assert ended.code == code and f"\n{verdict}: mxfp8 against bf16" in ended.out
    assert f"{gap + 1e-4:+.5f}"[:6] in ended.out
    asked = re.search(r"\+0.00500 +within +(\d+)", ended.out)
    assert asked and len(made) // 2 <= int(asked[1]), "no more than it said"
    if code == 2:
        assert (
            len(made) // 2 == int(asked[1]) and "no number of forks that can be made" in ended.out
        )


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
def test_a_report_shows_the_answers_of_gates(cli: Cli, here: str, pretend: Pretend) -> None:
    pretend(0.001)
    assert cli.raw("gate", here, *FAST, "margin=0.01").code == 0
    ended = cli.raw("report", here, "out=report.html")
    assert ended.code == 0 and "not finished" not in ended.out + ended.err
    page = re.sub(r"<[^>]+>", " ", Path("report.html").read_text())
    assert "mxfp8 against bf16" in page and "within" in page and "+0.00110" in page


def test_the_number_of_forks_is_said_before_any_is_made_and_alone_with_none(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    made = pretend(0.001)
    ended = gate(cli, run, "margin=0.01", "forks=0", "deviation=0.004")
    assert (
        ended.code == 2 and not made and "deviation from seed to seed 0.004 (as given)" in ended.out
    )
    assert "no forks were made" in ended.out
    gate(cli, run, "margin=0.02", "forks=4")
    assert len(made) == 8, "a question without forks set no bound"
    ended = gate(cli, run, "margin=0.02", "forks=0")
    assert "(measured on 4 pairs), bound 0.2" in ended.out and len(made) == 8


def test_asking_again_measures_nothing_and_a_verdict_stands(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    made = pretend(0.001)
    first = gate(cli, run, "margin=0.01")
    pairs = len(made)
    pretend(0.5)
    again = gate(cli, run, "margin=0.01", "forks=200")
    assert again.code == first.code == 0 and len(made) == pairs
    assert again.out.partition("WITHIN")[2] == first.out.partition("WITHIN")[2]


@pytest.mark.long
def test_forks_that_are_added_go_on_with_the_same_sequence(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    pretend(0.001)
    assert gate(cli, run, "margin=0.01", "forks=5").code == 2
    assert gate(cli, run, "margin=0.01", "forks=30").code == 2
    assert gate(cli, run, "margin=0.01").code == 0
    in_pieces = saved()
    assert cli.raw("gate", run, *FAST, "margin=0.01", "out=whole").code == 0
    whole = saved("whole")
    assert in_pieces["pairs_at_verdict"] == whole["pairs_at_verdict"]


@pytest.mark.long
def test_another_margin_on_the_same_forks_is_recorded_and_said(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    pretend(0.004)
    assert gate(cli, run, "margin=0.005", "forks=20").code == 2
    ended = gate(cli, run, "margin=0.02", "forks=20")
    assert ended.code == 0 and ", bound 0.05:" in ended.out, "the bound of the first question"
    assert "asked before on these forks: margin 0.005 at " in ended.out
    assert ": undecided after 20 pairs" in ended.out
    assert [answer["margin"] for answer in saved()["earlier"]] == [0.005]
    refused = gate(cli, run, "margin=0.02", "bound=0.2")
    assert refused.code == 3 and "the record began with bound=0.05, which stays" in refused.message
    refused = gate(cli, run, "margin=0.06")
    assert "must be below the bound of the record, 0.05" in refused.message
    assert "out=" not in refused.message, "the same forks under another bound would be tuning"


@pytest.mark.long
def test_several_checkpoints_are_one_question_and_share_the_forks(
    cli: Cli, here: str, pretend: Pretend
) -> None:
    made = pretend(0.001)
    ended = cli.raw("gate", here, *FAST, "margin=0.01", "step=3,6")
    assert ended.code == 0 and "over 2 checkpoints" in ended.out
    assert "runs/a, step 3" in ended.out and "holds the mean at these 2 checkpoints" in ended.out
    assert "one base run: this holds for it alone" in ended.out
    assert 2 * 2 * 36 < len(made) < 2 * 2 * 50, "at each, as one checkpoint would take"
    records = list(Path("runs/a/studies").glob("gate-*/gate.json"))
    assert len(records) == 2
    ended = cli.raw("gate", "runs/a", *FAST, "margin=0.01", "step=6", "forks=20")
    assert ended.code == 0 and "runs/a, step 3; runs/a, step 6: within after" in ended.out


def test_a_recipe_that_diverges_in_a_fork_is_never_within(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    pretend(0.001, problem=("mxfp8", 2))
    ended = gate(cli, run, "margin=0.01", "forks=60")
    assert ended.code == 2 and '"within" cannot be said any more' in ended.out
    assert "seed 2: step 1: loss is nan in MXFP8" in ended.out and saved()["differences"][2] == [
        None
    ]
    pretend(0.001, problem=("bf16", 1))
    refused = cli.raw("gate", run, *FAST, "out=b", "margin=0.01", "forks=60")
    assert refused.code == 3 and "the reference bf16 diverged at" in refused.message


@pytest.mark.parametrize("forks", [1, 2])
def test_one_or_two_forks_say_what_their_gap_needs_not_what_no_gap_needs(
    cli: Cli, run: str, pretend: Pretend, forks: int
) -> None:
    pretend(0.03)
    ended = gate(cli, run, "margin=0.01", f"forks={forks}")
    pairs = re.search(r"if the gap is as it looks, (\d+) pairs decide", ended.out)
    assert ended.code == 2 and pairs and int(pairs[1]) < 30, "beyond .03 it takes 25, within 0 40"
    again = gate(cli, run, "margin=0.01", "forks=0")
    assert re.search(r"\+0.030\d\d +beyond +2\d", again.out)


@pytest.mark.long
def test_forks_without_any_scatter_are_measured_as_such(
    cli: Cli, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(subject: Any, branch: Any, settings: Any, number: int) -> Fork:
        loss = 5.0 + 0.25 * (branch.candidate.name != "bf16")
        return Fork(recipe=loss, high=loss, train=loss, problem=None, seconds=0.1, parts=[loss])

    forks_by(monkeypatch, fork)
    ended = gate(cli, run, "margin=1", "forks=4")
    assert ended.code == 2 and "if the gap is as it looks, " in ended.out
    again = gate(cli, run, "margin=1", "forks=0")
    assert "deviation from seed to seed 0 (measured on 4 pairs)" in again.out
    assert "+0.25000  within" in again.out


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "gate.json"), "gate.json: No space left on device"),
        (RuntimeError("a kernel\nfailed"), "RuntimeError: a kernel ("),
        (BrokenPipeError(), "the reader of the output has gone"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_crash_has_the_exit_code_of_no_verdict(
    cli: Cli,
    run: str,
    pretend: Pretend,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    pretend(0.001)

    def crash(*arguments: Any) -> Fork:
        raise error

    monkeypatch.setattr(command, "discard_output", lambda: 0)
    forks_by(monkeypatch, crash)
    ended = gate(cli, run, "margin=0.01")
    assert ended.code == 3 and message in ended.message and "Traceback" not in ended.err


def test_an_interruption_says_that_the_command_goes_on(
    cli: Cli, run: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pretend(0.001)

    def interrupted(*arguments: Any) -> Fork:
        if len(made) == 9:
            raise KeyboardInterrupt
        return fork(*arguments)

    fork = forks_by(monkeypatch, interrupted)
    ended = gate(cli, run, "margin=0.01")
    assert ended.code == 128 + signal.SIGINT and "the same command goes on" in ended.err
    forks_by(monkeypatch, fork)
    assert gate(cli, run, "margin=0.01").code == 0
    assert sorted(set(made)) == sorted(made), "no fork was made twice"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=mxfp8"], "gate needs margin=…: fp4train gate RUN… recipe=nvfp4 margin=0.01"),
        (["margin=0.01"], "gate needs recipe=…"),
        (["recipe=mxfp8", "margin=0"], "margin=0 must be a number of nats per token above 0"),
        (["recipe=mxfp8", "margin=1e308"], "margin=1e+308 must be a number of nats per token"),
        (["recipe=mxfp8", "margin=0.01", "bound=0.01"], "bound=0.01 must be larger than margin"),
        (["recipe=mxfp8", "margin=0.01", "against=bf61"], "against: recipe=bf61: there is no such"),
        (["recipe=mxfp8,nvfp4", "margin=0.01"], "a gate is of one recipe; fp4train rank compares"),
        (["recipe=bf16", "margin=0.01"], "there is nothing to test: bf16 and bf16 run every GEMM"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_question_that_cannot_be_answered_is_refused_with_a_code_of_its_own(
    cli: Cli, run: str, pretend: Pretend, words: list[str], message: str
) -> None:
    made = pretend(0.001)
    ended = cli.raw("gate", run, *words, "out=found")
    assert ended.code == 3 and message.format(run=run) in ended.message
    assert not made and not Path("found").exists()


@pytest.mark.long
def test_runs_without_checkpoints_or_of_different_models_are_refused(
    cli: Cli, here: str, pretend: Pretend
) -> None:
    made = pretend(0.001)
    assert cli("run.name=b", "model.layers=1", "train.steps=1").code == 0
    ended = cli.raw("gate", "runs/a", "runs/b", *FAST, "margin=0.01")
    assert ended.code == 3 and "the runs have different models (model.layers)" in ended.message
    ended = cli.raw("gate", "runs/a", "runs/a", *FAST, "margin=0.01")
    assert "are the same checkpoint: name it once" in ended.message
    for folder in Path("runs/b/checkpoints").iterdir():
        folder.rename(folder.with_name(f"old_{folder.name}"))
    ended = cli.raw("gate", "runs/b", *FAST, "margin=0.01")
    assert ended.code == 3 and "runs/b has no checkpoint yet" in ended.message
    assert not made


def test_policy_and_keys_belong_to_the_recipe_that_is_tested(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    made = pretend(0.001)
    words = ("recipe=nvfp4", "policy=all", "against=nvfp4", "margin=0.01", "forks=1")
    ended = cli.raw("gate", run, *words, "out=found")
    assert ended.code == 2 and made == [("nvfp4", 0), ("nvfp4 policy=all", 0)]
    assert math.isclose(saved()["gap"], 0.001, abs_tol=1e-9) or saved()["gap"] == 0


@pytest.mark.long
def test_another_folder_does_not_begin_with_another_bound(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    pretend(0.001)
    assert cli.raw("gate", run, *FAST, "out=a", "margin=0.01", "forks=2").code == 2
    refused = cli.raw("gate", run, *FAST, "out=b", "margin=0.01", "bound=0.03", "forks=2")
    assert refused.code == 3 and "began with bound=0.1, which stays" in refused.message
    again = cli.raw("gate", run, *FAST, "out=b", "margin=0.02", "forks=2")
    assert again.code == 2 and "0.01" in again.out, "the earlier question is listed"
    assert cli.raw("gate", run, *FAST, "margin=0.01", "bound=0.05", "forks=2").code == 3


@pytest.mark.long
def test_the_swapped_question_has_the_same_bound(cli: Cli, run: str, pretend: Pretend) -> None:
    """Its forks are the same ones, of which the first question may have shown everything."""
    made = pretend(0.001)
    words = ("steps=1", "batches=1", "margin=0.01", "forks=2")
    asked = ("recipe=mxfp8", "against=bf16")
    swapped = ("recipe=bf16", "against=mxfp8")
    assert cli.raw("gate", run, *words, *asked, "out=a", "bound=0.5").code == 2
    for folder in ("out=a", "out=b"):
        refused = cli.raw("gate", run, *words, *swapped, folder, "bound=0.06")
        assert refused.code == 3 and "began with bound=0.5, which stays" in refused.message
    again = cli.raw("gate", run, *words, *swapped, "out=a")
    assert again.code == 2 and len(made) == 4, "on the recorded forks"


@pytest.mark.long
def test_other_batches_evaluate_the_same_forks_and_have_the_same_bound(
    cli: Cli, run: str, pretend: Pretend
) -> None:
    pretend(0.001)
    words = ("recipe=mxfp8", "forks=2")
    assert (
        cli.raw("gate", run, *words, "steps=1", "batches=1", "margin=0.01", "bound=0.5").code == 2
    )
    refused = cli.raw("gate", run, *words, "steps=1", "batches=2", "margin=0.01", "bound=0.06")
    assert refused.code == 3 and "began with bound=0.5, which stays" in refused.message
    again = cli.raw("gate", run, *words, "steps=1", "batches=2", "margin=0.02")
    assert again.code == 2 and "bound 0.5" in again.out
    other = cli.raw("gate", run, *words, "steps=2", "batches=2", "margin=0.01", "bound=0.06")
    assert other.code == 2, "forks of other steps are others"
