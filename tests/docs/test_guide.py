"""docs/guide.md: every command in it is run, in order, its Python runs, and its glossary has the
keys that runs log.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from shown import SMALL, shortened

from fp4train.cli import main

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
VERBS = ("plan", "swap", "compare", "report", "formats")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def table(title: str) -> list[str]:
    """The first cells of the tables of a section."""
    section = GUIDE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)


def small(words: list[str]) -> list[str]:
    """A command that trains a new run, with a smaller model and fewer steps; another as it is."""
    if (words[:1] and words[0] in VERBS) or any(word.startswith("resume=") for word in words):
        return words
    return shortened(words)


@pytest.mark.long
def test_every_command_of_the_guide_works(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in [*blocks("python"), *blocks("yaml")]:
        if match := re.match(r"# (mine/[\w/.]+)\n", block):
            path = working_folder / match[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
    shown = {}
    for words in commands():
        if words[:1] != ["fp4train"]:
            words[0] = sys.executable if words[0] == "python" else words[0]
            subprocess.run(words, check=True)
            continue
        with pytest.raises(SystemExit) as ended:
            main(small(words[1:]))
        said = capsys.readouterr()
        assert ended.value.code == 0, f"{shlex.join(words)}: {said.err}"
        shown[" ".join(words)] = said.out
    told = shown["fp4train plan runs/longer"]
    assert "branch" in told and "train.steps: 90 → 100; policy.last: 0.15 → 0.5" in told
    assert "resume_step=40" in shown["fp4train resume=runs/long"]
    assert "mean over seeds" in next(
        text for command, text in shown.items() if command.count("seed=") == 4
    )
    assert json.loads(Path("gap.json").read_text())["runs"] and Path(
        "gap.csv"
    ).read_text().startswith("run,")


@pytest.mark.parametrize(
    "code", [code for code in blocks("python") if not code.startswith("# mine/")]
)
def test_python_of_the_guide_runs(code: str) -> None:
    exec(compile(code, "guide.md", "exec"), {})


def test_the_glossary_has_every_key_that_a_run_logs_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["train.steps=4", "eval.every=2", "eval.errors_every=2", "policy.last=0"]
    options += ["oscillation.every=2", "oscillation.watch=1", "train.ema=0.9"]
    seen: set[str] = set()
    for recipe in ("nvfp4", "fp16"):
        arguments = [
            *SMALL,
            *options,
            f"recipe={recipe}",
            "phases=none",
            f"run.dir={tmp_path / recipe}",
        ]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        for line in (tmp_path / recipe / "metrics.jsonl").read_text().splitlines():
            values = json.loads(line)
            seen |= (
                set() if "event" in values else set(values) - {"step", "nonfinite", "after", "crc"}
            )
    documented = {
        key for cell in table("Metric keys") for key in re.findall(r"`([^`]+)`", cell) if "/" in key
    }
    several = {"perf/tokens_per_s_per_rank", "perf/memory_gb_least", "perf/memory_rank"}
    several |= {"val/loss/NAME", "data/share/NAME", "data/passes/NAME"}  # tests/run/test_mixture.py
    several |= {"perf/slowest_rank", "perf/slowest_lag"}
    """tests/distributed looks for these."""
    assert seen == documented - several - {"perf/mfu"}, "perf/mfu needs a GPU whose peak is known"


def test_the_glossary_has_every_event_that_the_code_logs() -> None:
    source = Path(__file__).resolve().parents[2] / "fp4train"
    logged = set()
    for path in (source / "train.py", *(source / "run").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        logged |= set(re.findall(r'log_event\([^"{)]*?"([\w -]+)"', text)) | set(
            re.findall(r'event, .*= "([\w ]+)"', text)
        )
        logged |= set(re.findall(r'(?:append\(|\[)\("([a-z -]+)", ', text))  # of a start
    documented = set(
        re.findall(r"`([^`]+)`", " ".join(key for key in table("Metric keys") if "/" not in key))
    )
    assert {"resume", "rewind", "swap"} <= logged <= documented


def test_the_names_of_the_migration_table_exist() -> None:
    import fp4train.precision as precision

    for name in re.findall(r"\| `(FP8\w+|MXFP8|NVFP4)` \|", GUIDE):
        assert hasattr(precision, name), name
    for option in re.findall(r"`(hadamard|stochastic_rounding|two_d_weights)=False`", GUIDE):
        assert hasattr(precision.NVFP4(), option)
