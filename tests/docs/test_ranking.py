"""docs/ranking.md: its commands run, its table has every key of `fp4train rank`, its shares are those of the code."""

import re
import shlex
from pathlib import Path

import pytest

from fp4train.cli import main
from fp4train.cli.rank import OPTIONS
from fp4train.studies.rank import Request
from fp4train.studies.sequential import looks, share

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "ranking.md").read_text(encoding="utf-8")
SMALL = (
    *("model.width=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.hidden=64"),
    *("train.batch_size=4", "train.seq_len=32", "eval.batches=1", "track=jsonl"),
)
FEW = {"steps": "steps=2", "forks": "forks=1", "batches": "batches=1"}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


@pytest.mark.long
def test_every_command_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fp4train.analysis.curves.draw_curves", lambda run: Path(run) / "curves.png")
    assert len(commands()) > 4
    for words in commands():
        few = [v for k, v in FEW.items() if not (k == "steps" and "schedule=own" in words)]  # else no cooldown is in it
        short = [word for word in words if word.partition("=")[0] not in FEW]
        with pytest.raises(SystemExit) as ended:
            main([*short, *(few if words[0] == "rank" else SMALL)])
        assert ended.value.code == 0, shlex.join(words)


def test_the_table_has_every_key_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TEXT, re.MULTILINE))
    assert list(rows) and set(rows) == set(OPTIONS)
    defaults = {name: field.default for name, field in Request.__dataclass_fields__.items()}
    for name in ("forks", "schedule", "margin", "stop", "processes"):
        assert rows[name] == str(defaults[name]).lower(), name


def test_the_shares_of_the_looks_are_those_of_the_code() -> None:
    shown = re.search(r"after ([\d, ]+), … forks\. .*?\(([\d., \n]+), …; the sum is 1\)", TEXT, re.DOTALL)
    assert shown is not None
    numbers = [int(each) for each in shown[1].split(",")]
    assert numbers == looks(numbers[-1])
    assert [float(each) for each in shown[2].split(",")] == [share(n) for n in numbers]
