"""data=hf on local Parquet and JSON Lines, without a network."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from fp4train.data import DataError, HuggingFace, TokenData

ROWS = [f"document number {i}, about nothing" for i in range(100)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets  # noqa: F401
    import huggingface_hub.constants  # noqa: F401

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(ROWS))
    )
    return path


def build(path: Path, *, seq_len: int = 16, **settings: Any) -> TokenData:
    root = path.parent
    source = HuggingFace(
        **{"path": str(path), "cache_dir": str(root / "cache"), "val": 0.1} | settings
    )
    return source.build(root / "run", seq_len, 0)


def texts(data: TokenData) -> list[str]:
    ids = np.concatenate([data.train.ids, data.val.ids])
    return bytes(0 if i == 256 else int(i) for i in ids).decode().split("\0")


def test_json_lines_are_streamed_in_their_order(jsonl: Path) -> None:
    assert texts(build(jsonl)) == [*ROWS, ""]


def test_parquet_is_read_from_the_column_that_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"body": [*ROWS, None, ""], "n": list(range(102))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert texts(build(tmp_path / "rows.parquet", column="body")) == [*ROWS, ""]


def test_a_folder_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name, part in (("b", ROWS[50:]), ("a", ROWS[:50])):
        (tmp_path / f"rows/{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )
    assert texts(build(tmp_path / "rows")) == [*ROWS, ""]


def test_a_cache_of_datasets_is_read_once(
    jsonl: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    cache = str(tmp_path / "hf")
    rows = datasets.load_dataset("json", data_files=str(jsonl), cache_dir=cache, split="train")
    rows.map(lambda row: {"text": row["text"].upper()})
    version = Path(rows.cache_files[0]["filename"]).parent
    assert len(list(version.glob("*.arrow"))) == 2
    with caplog.at_level("INFO"):
        assert texts(build(version)) == [*ROWS, ""]
    assert caplog.messages[0].endswith("is left out (1 file)"), "the description goes unsaid"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    shutil.copytree(version, version.with_name("another"))
    with pytest.raises(DataError, match=r"hold one data set twice: name one of them"):
        build(version.parent)


def test_bounds_cut_the_stream_and_say_so(jsonl: Path) -> None:
    assert texts(build(jsonl, max_documents=20)) == [*ROWS[:20], ""]
    data = build(jsonl, max_tokens=500)
    assert len(data.train) + len(data.val) == 500
    assert "cut off at data.max_tokens=500" in data.description


def test_tokenised_once(jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(jsonl)
    monkeypatch.setattr("fp4train.data.huggingface.read_rows", lambda *_: pytest.fail("read again"))
    assert build(jsonl).fingerprint == first.fingerprint


def test_other_settings_have_another_cache_entry(jsonl: Path) -> None:
    for settings in ({}, {"max_documents": 50}, {"max_tokens": 1000}):
        build(jsonl, **settings)
    assert len(list((jsonl.parent / "cache").glob("*/*.bin"))) == 3


def test_a_wrong_column_lists_those_there_are(jsonl: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.column=body is not in .*rows\.jsonl. Its columns: id, text\."
    ):
        build(jsonl, column="body")
    with pytest.raises(
        DataError, match=r"rows\.jsonl, line 1: data\.column=id holds int, not text"
    ):
        build(jsonl, column="id")


def test_broken_files_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": brok')
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 2: it is no JSON \(Expecting value, column 10\)"
    ):
        build(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        build(tmp_path / "a.parquet")
    assert not list((tmp_path / "cache").glob("*/*.*")), "no entry, whole or half"


def test_other_kinds_of_files_are_sent_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"holds \.txt: data=hf reads .*text is for data=text"):
        build(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"Did you mean .*a\.txt\?"):
        build(tmp_path / "aa.txt")


def test_too_few_rows_are_refused(jsonl: Path) -> None:
    with pytest.raises(DataError, match="validation text is"):
        build(jsonl, max_documents=2)


def test_a_hub_name_without_a_network_says_what_else_there_is(tmp_path: Path) -> None:
    source = HuggingFace(name="somebody/nothing", config="small", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(
        DataError, match=r"somebody/nothing small train cannot be read: .* or data=text"
    ):
        source.build(tmp_path / "run", 16, 0)


def test_of_a_data_set_of_the_hub_the_column_alone_is_read(tmp_path: Path) -> None:
    """As `datasets` reads it: a folder stands for the hub. A column that cannot be cast is not
    looked at.
    """
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "set").mkdir()
    for name, part, ids in (("a", ROWS[:50], list(range(50))), ("b", ROWS[50:], list("x" * 50))):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": part, "id": ids}), tmp_path / f"set/{name}.parquet"
        )
    (tmp_path / "lines").mkdir()
    rows = "".join(json.dumps({"text": text}) + "\n" for text in ROWS)
    (tmp_path / "lines/a.jsonl").write_text(rows)
    for name in ("set", "lines"):
        source = HuggingFace(name=str(tmp_path / name), cache_dir=str(tmp_path / "cache"), val=0.1)
        assert texts(source.build(tmp_path / "run", 16, 0)) == [*ROWS, ""]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one is needed"):
        HuggingFace()
    with pytest.raises(ValueError, match="exactly one is needed"):
        HuggingFace(name="a/b", path="c")
    with pytest.raises(ValueError, match=r"data\.max_tokens=0"):
        HuggingFace(name="a/b", max_tokens=0)


@pytest.mark.parametrize("key", ["split", "config", "revision"])
def test_what_only_a_hub_data_set_has_is_refused_for_local_files(key: str) -> None:
    with pytest.raises(
        ValueError, match=rf"data.{key}=test: local files \(data.path\) have no {key}"
    ):
        HuggingFace(path="x.jsonl", **{key: "test"})


def test_a_table_without_rows_says_that_it_has_none(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet"
    )
    source = HuggingFace(path=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"a\.parquet: no record has text in data\.column=text"):
        source.build(tmp_path / "run", 16, 0)
