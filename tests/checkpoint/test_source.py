"""Which weights a text names: path, step and kind; and that it names no path outside of a folder."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fp4train.checkpoint import WeightSource
from fp4train.paths import lies_in, split_weights

PATHS = st.from_regex(r"[a-z./][a-zA-Z0-9_./ =@:-]{0,20}", fullmatch=True).filter(
    lambda path: ":/" not in path  # it may begin as that of another storage, which is refused
)
STEPS = st.none() | st.integers(min_value=0, max_value=10**9)
KINDS = st.sampled_from(["weights", "ema", "other_kind"])


@given(path=PATHS, step=STEPS, kind=KINDS)
def test_what_is_written_is_read_again(path: str, step: int | None, kind: str) -> None:
    named = Path(path)
    if split_weights(str(named))[0] != str(named):  # it ends like a step or a kind itself
        named /= "x"
    source = WeightSource(path=named, step=step, kind=kind)
    again = WeightSource.parse(str(source))
    assert again == source
    assert WeightSource.parse(str(source.path), step).step == step


@given(st.text(max_size=30))
def test_every_text_is_a_path_with_or_without_more(text: str) -> None:
    path, step, kind = split_weights(text)
    assert text.startswith(path) and (path or not text)
    assert (path == text) == (step is None and kind is None)


def test_a_folder_that_is_there_is_meant_whatever_is_in_its_name(tmp_path: Path) -> None:
    run = tmp_path / "a@5:ema"
    assert WeightSource.parse(str(run)) == WeightSource(path=tmp_path / "a", step=5, kind="ema")
    run.mkdir()
    assert WeightSource.parse(str(run)) == WeightSource(path=run)
    assert WeightSource.parse(f"{run}@7").step == 7


def test_a_source_says_the_words_that_go_on_from_it() -> None:
    source = WeightSource(path=Path("runs/a"))
    assert source.resume_words == ["resume=runs/a"]
    assert source.at(200).resume_words == ["resume=runs/a", "resume_step=200"]


def test_two_steps_for_one_source_are_refused() -> None:
    with pytest.raises(ValueError, match="runs/a@5 names the step 5, and step 6 is named beside"):
        WeightSource.parse("runs/a@5", 6)


@pytest.mark.parametrize("text", ["{run}/..@5", "{run}/link:ema", "{run}/link@5:ema", "{run}/.."])
def test_no_step_or_kind_leads_out_of_a_folder(tmp_path: Path, text: str) -> None:
    """A configuration that somebody else wrote may name what lies in its run alone."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (run / "link").symlink_to(tmp_path / "elsewhere")
    assert not lies_in(text.format(run=run), run)
    assert lies_in(f"{run}/inside@5:ema", run)
