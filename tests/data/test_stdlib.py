"""The default data: there on every machine, quick, the same every time."""

from pathlib import Path

import pytest

from fp4train.data import DataError, Stdlib
from fp4train.data.stdlib import modules


def test_it_is_real_text_of_some_megabytes_and_the_same_on_every_start(tmp_path: Path) -> None:
    first, second = (Stdlib().build(tmp_path, 256, seed) for seed in (0, 1))
    assert first.vocab_size == 257
    assert len(first.train) > 5_000_000
    assert len(first.val) == pytest.approx(0.05 * (len(first.train) + len(first.val)), rel=0.1)
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer is not None
    text = first.tokenizer.decode(first.train.ids[:100_000].tolist())
    assert "import" in text
    assert list(tmp_path.iterdir()) == []


def test_validation_starts_with_a_new_document(tmp_path: Path) -> None:
    data = Stdlib().build(tmp_path, 256, 0)
    assert data.tokenizer is not None
    assert data.train.ids[-1] == data.val.ids[-1] == data.tokenizer.end_of_document


def test_tests_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "test/b.py",
        "pkg/c.py",
        "pkg/tests/d.py",
        "site-packages/e.py",
        "__pycache__/f.py",
        "g.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert {path.name for path in modules(tmp_path)} == {"a.py", "c.py"}


def test_an_interpreter_without_sources_says_what_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"data=text data\.path="):
        Stdlib().build(tmp_path, 256, 0)


@pytest.mark.parametrize("val", [0, -0.1, 1.5])
def test_a_validation_part_that_makes_no_sense_is_refused(val: float) -> None:
    with pytest.raises(ValueError, match=r"data\.val="):
        Stdlib(val=val)
