"""The pages of docs: links lead somewhere and names exist; pages without a test of their own:
commands and tables.
"""

import importlib
import json
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from configured import points_of
from shown import commands as shown_commands, shortened, write_shown

from fp4train import backends
from fp4train.cli import help as screens, main
from fp4train.cli.main import VERBS
from fp4train.cli.prepare import PrepareOptions
from fp4train.config import bind, own_options
from fp4train.config.command_line import option_names
from fp4train.data import Chat, Dna, HuggingFace, Mixture, Stdlib, Text, Tokens
from fp4train.data.tokenizers import BytePairs
from fp4train.lab.doctor.report import HEADER
from fp4train.precision import LayerPolicy, Recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
SMALL = ["train.steps=2", "train.batch_size=2", "train.seq_len=32", "eval.batches=1", "track=jsonl"]


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    return [words[1:] for words in shown_commands(page) if words[:1] == ["fp4train"]]


def first_cells(page: str, header: str) -> list[str]:
    """The names in the first column of the table that has this header."""
    table = text(page).partition(f"\n| {header} |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return [name for cell in cells for name in (re.findall(r"`([^`]+)`", cell) or [cell])]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_titles(page: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text(page)):
        name, _, anchor = target.partition("#")
        path = DOCS / name if name else DOCS / page
        assert path.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
            }, target


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_of_the_package_exist(page: str) -> None:
    for name in set(re.findall(r"`(fp4train(?:\.\w+)+)(?<!\.json)`", text(page))):
        module, _, last = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ImportError:
            assert hasattr(importlib.import_module(module), last), name


def test_the_index_lists_every_page() -> None:
    assert set(re.findall(r"^\| \[([\w-]+\.md)\]", text("README.md"), re.MULTILINE)) == set(
        PAGES
    ) - {"README.md"}


@pytest.mark.parametrize("page", ["configuration.md", "data.md"])
def test_commands_name_existing_options_and_keys(page: str) -> None:
    found = [words for words in commands(page) if not words[0].startswith("--")]
    assert found
    for words in found:
        if words[0] == "help":
            assert screens.of_words(words[1:], VERBS)
        else:
            own = option_names(PrepareOptions) if words[0] == "prepare" else []
            keys = [word for word in words if word.partition("=")[0] not in own]
            assert points_of(keys[1:] if words[0] in VERBS else keys)


def test_configuration_names_every_option_of_a_group_and_every_field_of_a_policy() -> None:
    options = own_options()
    page = text("configuration.md")
    for group in ("model", "policy", "phases", "data", "optim", "schedule", "track"):
        row = re.search(rf"^\| `{group}=` \|.*$", page, re.MULTILINE)
        assert row and set(options[group]) <= set(re.findall(r"[\w]+", row[0])), group
    assert set(re.findall(r"`policy\.(\w+)`", page)) == {f.name for f in fields(LayerPolicy)}
    choices = re.search(r"^\| `backend=` \|.*$", page, re.MULTILINE)
    assert choices and set(backends.CHOICES) <= set(re.findall(r"\w+", choices[0]))
    keys = [key for key in first_cells("configuration.md", "key") if re.fullmatch(r"[\w.]+=", key)]
    assert points_of([f"{key}null" for key in keys if "." in key])


def test_data_names_every_key_of_a_source_and_every_source() -> None:
    keys = {name.removeprefix("data.") for name in first_cells("data.md", "key")}
    sources = {
        f.name
        for source in (Chat, Dna, HuggingFace, Mixture, Stdlib, Text, Tokens)
        for f in fields(source)
    }
    assert keys == sources - {"tokenizer"}
    assert {name.split()[0] for name in first_cells("data.md", "`data=`")} - {"hf"} >= {
        "stdlib",
        "text",
        "tokens",
        "chat",
        "dna",
        "mixture",
    }
    assert {f"data.tokenizer.{f.name}" for f in fields(BytePairs)} <= set(
        re.findall(r"`([\w.]+)`", text("data.md"))
    )


def test_the_columns_of_doctor_are_explained() -> None:
    assert tuple(first_cells("doctor.md", "column")) == HEADER


@pytest.fixture
def mine(working_folder: Path) -> Path:
    """A working directory with the folder `mine/` that plugins.md shows; "continued" adds to a
    file.
    """
    write_shown(working_folder)
    return working_folder


def test_the_recipe_in_yaml_is_one(mine: Path) -> None:
    found = bind(yaml.safe_load((mine / "mine/recipe/house.yaml").read_text()), Recipe, "recipe")
    assert isinstance(found, Recipe)


def test_the_table_of_a_family_names_the_six_methods_that_a_model_may_have() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "fp4train").rglob("*.py"))
    methods = {
        name
        for source in sources
        for name in re.findall(r"""(?:def |"|getattr\(\w+, ")(fp4train_[a-z]+)\b""", source)
    }
    assert methods == set(re.findall(r"`(fp4train_\w+)", text("plugins.md")))
    assert len(methods) == 6


@pytest.mark.long
def test_own_classes_train_and_resume(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option that plugins.md shows, by the commands that it shows; the class is imported by
    each anew.
    """
    shown = sorted(str(path.relative_to(mine / "mine")) for path in (mine / "mine").rglob("*.*"))
    assert shown == [
        "data/counting.yaml",
        "data/file_by_file.yaml",
        "model/shift.yaml",
        "model/shifted_tiny.yaml",
        "mylab.py",
        "optim/momentum.yaml",
        "recipe/four_bit_gradients.yaml",
        "recipe/house.yaml",
        "recipe/powers.yaml",
        "schedule/inverse_root.yaml",
        "shifted/__init__.py",
        "shifted/hf.py",
        "shifted/model.py",
    ]
    (mine / "texts").mkdir()
    for name in "abc":
        (mine / f"texts/{name}.txt").write_text(f"{name} is a letter, " * 1000)
    first, again, streamed, hooked = commands("plugins.md")
    for words in (
        [*first, *SMALL],
        [*first, *SMALL, "recipe=four_bit_gradients"],
        [*first, *SMALL, "recipe=powers"],
        [word.replace("=400", "=3") for word in again],
        [*streamed, *SMALL],
        shortened(hooked),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, shlex.join(words)
        assert sys.modules.pop("mylab")
    metrics = (mine / "runs/shift-house/metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in map(json.loads, metrics) if "train/loss" in line] == [1, 2, 3]
    plan = (mine / "runs/shift-four_bit_gradients/plan.txt").read_text()
    assert "blocks.0" in plan and "E2M1·E4M3" in plan
    assert "E3M0·E3M0" in (mine / "runs/shift-powers/plan.txt").read_text()
    spikes = (mine / "runs/watched/hooks/Spikes/spikes.txt").read_text().splitlines()
    lines = (mine / "runs/watched/metrics.jsonl").read_text().splitlines()
    watched = [json.loads(line) for line in lines]
    counts = [line["mine/spikes"] for line in watched if "train/loss" in line]
    assert len(spikes) == counts[-1] > 0


def test_own_formats_roundings_and_transforms_are_listed(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["formats", "plugins=[mylab]", "--config-dir", "mine"])
    sys.modules.pop("mylab")
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert {"e3m0", "ue4m4"} <= {line.split()[0] for line in lines if line}
    shown = " ".join(lines)
    assert "stochastic_8_midpoint, towards_zero" in shown
    assert "fp4train.quantize.Rotation, mylab.Pairs" in shown
    with pytest.raises(SystemExit):
        main(["formats"])
    assert "mylab" not in capsys.readouterr().out
