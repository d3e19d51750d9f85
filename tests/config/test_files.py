"""A YAML file that stands for an option of a group: policy=FILE.yaml."""

from pathlib import Path

import pytest

from fp4train.config import composition, overrides, to_config
from fp4train.errors import UserError
from fp4train.precision import LayerPolicy

POLICY = "_target_: fp4train.precision.LayerPolicy\nlast: 0\nkeep: ['blocks.0', 'mlp.down:fprop']\n"


def composed(*arguments: str) -> LayerPolicy:
    (made,) = composition.composed(overrides.with_files(["run.name=a", "run.dir=a", *arguments]))
    return to_config(made.cfg).policy


def test_a_file_is_an_option_whose_keys_can_be_set_as_those_of_any_other(tmp_path: Path) -> None:
    path = tmp_path / "studied.yaml"
    path.write_text(POLICY)
    assert composed(f"policy={path}") == LayerPolicy(last=0, keep=("blocks.0", "mlp.down:fprop"))
    assert composed(f"policy={path}", "policy.first=2").first == 2
    assert composed(f"policy='{path}'").last == 0, "quoted for the shell"


@pytest.mark.long
def test_files_of_one_name_and_of_an_options_name_are_kept_apart(tmp_path: Path) -> None:
    for index, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        for stem in ("same", "last15"):
            (tmp_path / name / f"{stem}.yaml").write_text(
                POLICY.replace("last: 0", f"last: {index + 3}")
            )
    for stem in ("same", "last15"):
        assert [
            composed(f"policy={tmp_path / name / stem}.yaml").last for name in ("a", "b", "a")
        ] == [3, 4, 3]
    assert composed("policy=last15").last == 0.15


def test_a_sweep_takes_files_and_names_together(tmp_path: Path) -> None:
    path = tmp_path / "swept.yaml"
    path.write_text(POLICY)
    assert overrides.with_files([f"policy={path},last15", "train.steps=3"]) == [
        "policy=swept,last15",
        "train.steps=3",
    ]
    (tmp_path / "b").mkdir()
    (tmp_path / "b/swept.yaml").write_text(POLICY)
    (both,) = overrides.with_files([f"policy={path},{tmp_path / 'b/swept.yaml'}"])
    assert len(set(both.removeprefix("policy=").split(","))) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("- a\n- b\n", "must hold keys and values"),
        ("a: [", "cannot be read"),
        pytest.param(f"a: {'[' * 2_000}", "cannot be read", marks=pytest.mark.long),
        ("_target_: os.system\n", "os.system"),
        ("_target_: fp4train.precision.BF16\n", "BF16 cannot stand here"),
        (POLICY.replace("last", "lst"), "unknown key 'policy.lst'; did you mean 'policy.last'"),
        (POLICY.replace("fprop", "forward"), "'forward' is no GEMM"),
    ],
)
def test_a_file_that_is_no_option_is_one_message(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        composed(f"policy={path}")
