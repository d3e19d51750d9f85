"""The sweep of a ranking: which candidates it makes, their names, and what it refuses."""

from pathlib import Path

import pytest

from fp4train.config import Config, plain, to_config
from fp4train.errors import UserError
from fp4train.lab.studies import RecipeCandidate, candidates, sweep_axes
from fp4train.precision import MXFP8, NVFP4
from fp4train.run.record.directory import read_config


def of(run: Path, *words: str) -> list[RecipeCandidate]:
    return candidates(sweep_axes(words), plain(read_config(run)))


def config(run: Path) -> Config:
    return to_config(read_config(run))


def test_every_combination_is_a_candidate_in_the_order_of_the_sweep_and_the_floor_is_added(
    trained: Path,
) -> None:
    found = of(trained, "policy=last15,all", "recipe=nvfp4,mxfp8")
    assert [(each.name, each.asked) for each in found] == [
        ("nvfp4 policy=last15", True),
        ("mxfp8 policy=last15", True),
        ("nvfp4 policy=all", True),
        ("mxfp8 policy=all", True),
        ("BF16", False),
        ("FP32", False),
    ]
    made = found[3].applied(config(trained))
    assert made.recipe == MXFP8() and made.policy.last == 0


def test_keys_of_a_section_are_swept_on_top_of_the_chosen_option_or_of_the_runs_own(
    trained: Path,
) -> None:
    first, second, *_ = of(trained, "recipe.hadamard=false,true", "policy.last=2")
    assert (first.name, second.name) == ("recipe.hadamard=false", "recipe.hadamard=true")
    made = first.applied(config(trained))
    assert made.recipe == NVFP4(hadamard=False) and made.policy.last == 2
    chosen, *_ = of(trained, "recipe.scale_rounding=ceil", "recipe=mxfp4", "policy.keep=[wk,wv]")
    assert chosen.applied(config(trained)).policy.keep == ("wk", "wv")
    assert chosen.recipe["scale_rounding"] == "ceil"


def test_what_is_not_named_is_the_runs_own(trained: Path) -> None:
    first, *_ = of(trained)
    own = config(trained)
    made = first.applied(own)
    assert (made.recipe, made.policy, dict(made.phases)) == (
        own.recipe,
        own.policy,
        dict(own.phases),
    )


def test_options_of_the_users_own_folder_are_candidates(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "house.yaml").write_text(
        "_target_: fp4train.precision.NVFP4\nhadamard: false\n"
    )
    first, *_ = candidates(sweep_axes(["recipe=house"], [tmp_path]), plain(read_config(trained)))
    assert first.name == "house" and first.applied(config(trained)).recipe == NVFP4(hadamard=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=nvfp4,nvpf8"], "recipe=nvpf8: there is no such recipe; did you mean 'nvfp4'?"),
        (["policy=last51"], "policy=last51: there is no such policy; did you mean 'last15'?"),
        (
            ["recipes=nvfp4"],
            "recipes=nvfp4: a ranking sweeps over recipe, policy, phases and their keys; did "
            "you mean",
        ),
        (["optim.lr=1,2"], "optim.lr=1,2: a ranking sweeps over"),
        (["~recipe"], "~recipe: a ranking sweeps over"),
        (
            ["recipe=bf16", "recipe=nvfp4"],
            "recipe= is given twice: several values are separated by commas",
        ),
    ],
)
def test_what_is_no_candidate_is_refused(trained: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        of(trained, *words)
    assert message in str(raised.value)


def test_a_key_that_the_class_does_not_have_is_refused_where_it_is_bound(trained: Path) -> None:
    first, *_ = of(trained, "policy.lats=1,2")
    with pytest.raises(UserError, match=r"unknown key 'policy.lats'; did you mean 'policy.last'"):
        first.applied(config(trained))


def test_the_baseline_is_the_candidate_that_comes_first(trained: Path) -> None:
    axes = sweep_axes(("recipe=bf16,nvfp4,mxfp8",))
    saved = plain(read_config(trained))
    assert [each.name for each in candidates(axes, saved, "mxfp8") if each.asked] == [
        "mxfp8",
        "bf16",
        "nvfp4",
    ]
    with pytest.raises(
        UserError,
        match=r"baseline=mxfp9 is no candidate; did you mean 'mxfp8'\? \(candidates: bf16",
    ):
        candidates(axes, saved, "mxfp9")
