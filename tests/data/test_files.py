"""Files that paths of the user's mean: parts of a data set that lie in one folder."""

from pathlib import Path

import pytest

from fp4train.data.files import input_files
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
