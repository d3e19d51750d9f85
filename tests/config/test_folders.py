"""The groups that Hydra sees: fp4train's configs, the recipes, and the folders of users."""

import subprocess
from pathlib import Path

import pytest
import torch

from fp4train.config import CONFIGS, RECIPES, composition, overrides, plain, to_config
from fp4train.errors import UserError
from fp4train.quantize import RandomKey, quantize

ROOT = Path(__file__).parents[2]


def test_in_a_checkout_both_folders_stand_beside_the_package() -> None:
    assert (CONFIGS, RECIPES) == (ROOT / "configs", ROOT / "recipes")
    assert CONFIGS.is_dir() and RECIPES.is_dir()


def test_the_tree_has_no_links() -> None:
    """A link becomes a text file in a zip, and where the file system has none."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "100644" in listed
    assert [line for line in listed.splitlines() if line.startswith("120000")] == []


@pytest.mark.long
def test_every_recipe_is_an_option_of_the_group() -> None:
    for path in RECIPES.glob("*.yaml"):
        found = plain(composition.compose([f"recipe={path.stem}", "run.name=x"]))["recipe"]
        assert found["_target_"].startswith("fp4train.precision.")


def test_a_folder_of_the_users_adds_groups_and_options_and_builds_on_ours(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "house.yaml").write_text("defaults: [nvfp4, _self_]\nhadamard: false\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /recipe: house\ntrain: {steps: 7}\n"
    )
    assert overrides.groups([tmp_path])["recipe"] == [*overrides.groups()["recipe"], "house"]
    arguments = ["--config-dir", str(tmp_path), "experiment=mine"]
    list(composition.composed(arguments))
    found = plain(composition.compose(["experiment=mine", "run.name=x"], [tmp_path]))
    assert found["recipe"]["hadamard"] is False and found["recipe"]["stochastic_rounding"] is True
    assert found["train"]["steps"] == 7


def test_a_folder_with_neither_options_nor_plugins_is_refused_with_what_is_expected(
    tmp_path: Path,
) -> None:
    (tmp_path / "sysctl.d").mkdir()
    (tmp_path / "sysctl.d/10.yaml").write_text("{}")
    with pytest.raises(
        UserError, match=r"no options and no plugins: .*recipe/NAME.yaml, in folders named data"
    ):
        list(composition.composed(["--config-dir", str(tmp_path), "train.steps=2"]))
    (tmp_path / "mylab.py").touch()
    list(composition.composed(["--config-dir", str(tmp_path), "train.steps=2"]))


@pytest.mark.parametrize("option", ["recipe/nvfp4", "model/llama_tiny", "data/tokenizer/bytes"])
def test_an_option_of_our_name_is_refused_and_not_ignored(tmp_path: Path, option: str) -> None:
    (tmp_path / option).parent.mkdir(parents=True)
    (tmp_path / f"{option}.yaml").write_text("{}")
    group, _, name = option.rpartition("/")
    with pytest.raises(
        UserError,
        match=rf"{option}.yaml: fp4train has a {group}={name} already; give the file another",
    ):
        list(composition.composed(["--config-dir", str(tmp_path), "train.steps=2"]))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["train.steps=2"], []),
        (["plugins=[a,b.c]"], ["a", "b.c"]),
        (["plugins=a"], ["a"]),
        (["plugins=[a]", "plugins=[b]"], ["b"]),
        (["++plugins=['a']"], ["a"]),
        (["plugins=[mine/lab.py]"], ["mine/lab.py"]),
        (["plugins=null"], []),
        (["plugins=[a]", "~plugins"], []),
    ],
)
def test_the_plugins_of_a_command(arguments: list[str], names: list[str]) -> None:
    assert overrides.plugins(arguments) == names


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("plugins=a,b", "a list has brackets"),
        ("plugins={a:1}", "must be a list"),
    ],
)
def test_what_is_no_list_of_plugins(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        overrides.plugins(["-m", argument])


def test_a_loss_scale_grows_in_no_recipe_whose_gradients_saturate() -> None:
    """After 50,000 steps it were 2^41, which makes gradients of 1e-6 too large for UE5M3 scales
    alone, and nothing overflows that would lower it.
    """
    recipe = to_config(composition.compose(["recipe=nvfp4_ue5m3", "run.name=x"])).recipe
    dy = recipe.table()["dgrad"].first
    assert dy is not None and recipe.loss_scaling is not None
    scale = recipe.loss_scaling.initial
    good_steps = 0
    for _ in range(50_000):
        scale, good_steps = recipe.loss_scaling.update(scale, good_steps, finite=True)
    gradient = 1e-6 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    key = RandomKey(seed=0, step=0, layer=0, operand=2)
    error = quantize(gradient * scale, dy, key=key).dequantize() / scale - gradient
    assert error.norm() < 0.2 * gradient.norm()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: [1\n", r"cannot be read: line 2: expected ',' or '\]'"),
        (b"a: 1\n b: 2\n", r"cannot be read: line 2: mapping values"),
        (b"a: \xff\n", "a file of options is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_the_line(
    tmp_path: Path, text: bytes, message: str
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "house.yaml").write_bytes(text)
    with pytest.raises(UserError, match=message):
        list(composition.composed(["recipe=house", "--config-dir", str(tmp_path)]))
