"""docs/evaluation.md: its commands run."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from lengths import long_but

from fp4train.cli import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


FILES = {
    name: body
    for name, body in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
}


@pytest.fixture
def files(working_folder: Path, monkeypatch: pytest.MonkeyPatch, small_run: Path) -> None:
    """A working directory with the files that the page shows, a README and a copy of a run."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", working_folder / "cache")
    for name, body in FILES.items():
        Path(name).write_text(body, encoding="utf-8")
    Path("quotes.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("to be", "or not"))
    )
    Path("README.md").write_text("the quick brown fox", encoding="utf-8")
    shutil.copytree(small_run, "runs/a")


# of lm_eval and datasets, as they are imported and read files
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    long_but([words for words in COMMANDS if "task=task.yaml" not in words], COMMANDS),
    ids=shlex.join,
)
def test_every_command_works(words: list[str], files: None) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
