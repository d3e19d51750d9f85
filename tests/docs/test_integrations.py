"""docs/integrations.md: its Python runs, in order, in one process; its table has all arguments."""

import inspect
import re
from pathlib import Path

import pytest
from small_transformers import framework

from fp4train.integrations import Precision

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text(
    encoding="utf-8"
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # peft asks for the old name
    # the Trainer's loader asks for it on a machine without a GPU
    "ignore:.*pin_memory.*:UserWarning",
    "ignore:.*does not have many workers:UserWarning",  # the rows are made in no time
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's use of a name that torch deprecates
)


@pytest.mark.long
def test_all_python_of_the_page_runs(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("accelerate", "peft", "lightning.pytorch", "transformers.trainer"):
        framework(name)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "integrations.md", "exec"), names)
    assert names["precision"].step == 8 and (working_folder / "accelerate").is_dir()  # type: ignore[attr-defined]
    shown = capsys.readouterr().out
    assert "fprop" in shown and "adapter (lora_A): kept in high precision by its name" in shown


def test_the_table_has_all_arguments() -> None:
    table = PAGE.partition("\n| argument |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(
        inspect.signature(Precision).parameters
    )
