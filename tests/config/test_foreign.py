"""The table of other frameworks' words names what fp4train has, and no word twice."""

import pytest

from fp4train.config import composition, foreign, overrides, plain
from fp4train.config.schema import keys


def test_every_suggestion_is_a_key_a_group_or_an_option() -> None:
    have = set(keys(plain(composition.compose([]), resolve=False)))
    groups = overrides.groups()
    for ours, theirs, _ in foreign.words():
        key, equals, options = ours.partition("=")
        assert key in have or key in groups or not ours or key == "data.path", ours
        if equals:
            assert set(options.replace(" or ", ", ").split(", ")) <= set(groups[key]), ours
        assert not set(theirs) & {name.rpartition(".")[2] for name in have}, (
            "a key of our own comes first"
        )
    words = [word for _, theirs, _ in foreign.words() for word in theirs]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("grad_accum", "'train.microbatch'"),
        ("gradient_accumulation_steps", "'train.microbatch'"),
        ("learning_rate", "'optim.lr'"),
        ("optim.learning-rate", "'optim.lr'"),
        ("bs", "'train.batch_size'"),
        ("per_device_train_batch_size", "'train.microbatch'"),
        ("dropout", ": the models here have no dropout"),
        (
            "audit.repeat",
            ": steps are no longer computed twice: audit.every=1 compares a layer of every step, "
            "audit.sums=1 the state",
        ),
        ("max_steps", "'train.steps'"),
        ("epochs", "one epoch has tokens of the data"),
        ("warmup_steps", "'schedule.warmup'"),
        ("bf16", "'recipe=bf16'"),
        ("fp8", "fp8_current or fp8_delayed, fp8_block, fp8_row"),
        ("nothing_like_it", ""),
    ],
)
def test_words_of_other_frameworks(word: str, hint: str) -> None:
    found = foreign.suggestion(word)
    assert hint in found if hint else not found


def test_a_key_that_this_configuration_lacks_is_not_suggested() -> None:
    assert foreign.suggestion("model.d_model", ["model.size"]) == ""
