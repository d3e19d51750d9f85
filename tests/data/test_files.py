"""Files that paths of the user's mean: parts of a data set that lie in one folder."""

import logging
from pathlib import Path

import pytest

from fp4train.data import files_of, input_files
from fp4train.errors import DataError

HUB = [
    "train-00000-of-00002.parquet",
    "train-00001-of-00002.parquet",
    "validation-00000-of-00001.parquet",
]


def folder_of(place: Path, names: list[str]) -> str:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"x")
    return str(place)


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (HUB, "{}/*train*"),
        ([f"data/{name}" for name in HUB], "{}/data/*train*"),
        (["train/a.jsonl", "test/a.jsonl"], "{}/train"),
        (["train.jsonl.gz", "dev.jsonl.gz"], "{}/*train*"),
        (["wiki.train.txt", "wiki.valid.txt", "wiki.test.txt"], "{}/*train*"),
        (["corpus_training.bin", "corpus_test.bin"], "{}/*training*"),
    ],
)
def test_a_folder_with_parts_for_training_and_for_tests_is_refused(
    tmp_path: Path, names: list[str], meant: str
) -> None:
    """Validation would be trained on."""
    place = folder_of(tmp_path / "hub", names)
    suffixes = (".parquet", ".jsonl", ".txt", ".bin")
    with pytest.raises(
        DataError, match=r"holds files for training and for (validation|a test) .* one text"
    ) as refused:
        input_files(place, suffixes, "data.path")
    pattern = meant.format(place)
    assert str(refused.value).endswith(
        f"data.path='{pattern}'" if "*" in pattern else f"data.path={pattern}"
    )
    chosen = input_files(pattern, suffixes, "data.path")
    assert chosen and all("train" in str(file.relative_to(place)) for file in chosen)


def test_an_empty_path_is_not_the_working_directory() -> None:
    """A shell leaves one where a variable is not set."""
    with pytest.raises(DataError, match=r"data\.path= is empty"):
        input_files("", (".txt",), "data.path")


@pytest.mark.parametrize(
    "names",
    [
        ["train.py", "test.py", "tests/test_train.py"],
        ["training.txt", "latest.txt", "values.txt"],
        ["test-0.txt", "validation-0.txt"],
        ["train-0.txt", "train-1.txt"],
    ],
)
def test_other_folders_are_read_whole(tmp_path: Path, names: list[str]) -> None:
    place = folder_of(tmp_path / "texts", names)
    assert len(input_files(place, (".py", ".txt"), "data.path")) == len(names)


RUN = b"# fp4train run 0123 sha256 4567\nrun: {}\n"


def folder_with(place: Path, config: bytes) -> Path:
    """A folder of texts, and two below it that have the files of a run directory."""
    folder_of(place, ["a.txt", "notes/b.txt"])
    for number in range(2):
        folder_of(place / "runs" / f"r{number}", ["plan.txt", "logs/out.txt", "history.jsonl"])
        (place / "runs" / f"r{number}" / "config.yaml").write_bytes(config)
    return place


def named(path: str) -> list[Path]:
    return input_files(path, (".txt",), "data.path")


@pytest.mark.parametrize("path", ["", "**/*.txt", "*", "[anr]*"])
def test_run_directories_below_a_folder_or_a_pattern_are_left_out(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = folder_with(tmp_path / "texts", RUN)
    with caplog.at_level(logging.INFO, "fp4train"):
        chosen = {str(file.relative_to(place)) for file in named(f"{place}/{path}")}
    assert chosen == {"a.txt", "notes/b.txt"}
    (message,) = caplog.messages
    runs = f"{place}/runs/r0, {place}/runs/r1"
    assert message == f"data.path: run directories are left out ({runs})"


def test_patterns_are_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_with(tmp_path / "texts", RUN))
    for pattern in ("**/*.txt", "./**/*.txt", "../texts/**/*.txt"):
        assert [file.name for file in named(pattern)] == ["a.txt", "b.txt"]


def test_a_run_directory_that_a_path_names_is_read(tmp_path: Path) -> None:
    place = folder_with(tmp_path / "texts", RUN)
    for path in ("runs/r0", "runs/r0/**/*.txt"):
        names = [file.name for file in named(f"{place}/{path}")]
        assert sorted(names) == ["out.txt", "plan.txt"]
    for path in ("runs/*/plan.txt", "runs"):
        with pytest.raises(DataError, match="all of its files lie in run directories"):
            named(f"{place}/{path}")


@pytest.mark.parametrize("config", [b"", b"model: {}\n", b"# fp4train\n"])
def test_a_folder_that_has_the_names_of_a_run_alone_is_read(tmp_path: Path, config: bytes) -> None:
    place = folder_with(tmp_path / "texts", config)
    for path in (str(place), f"{place}/**/*.txt"):
        assert len(named(path)) == 6
    assert len(files_of(str(place), (".txt",), "text")) == 6


def test_a_folder_among_the_matches_gives_its_files_with_the_suffixes(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "t", ["b/z.txt", "b/.h/a.txt", "b/y.md", "c/x.png", "a.bin"])
    (tmp_path / "t/b/none.txt").touch()
    (tmp_path / "t/b/again").symlink_to(tmp_path / "t/b")
    assert [file.name for file in named(f"{place}/*")] == ["a.bin", "z.txt"]
    with pytest.raises(DataError, match=r"suffixes \.txt; it holds 1 with \.png"):
        named(f"{place}/c*")
    with pytest.raises(DataError, match=r"none\*: each of its files is empty"):
        named(f"{place}/b/none*")
