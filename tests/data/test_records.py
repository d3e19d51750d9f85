"""Records in local files: one column of Parquet, Arrow and JSON, whatever others hold; errors that
name the place.
"""

import datetime
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fp4train.data import DataError, HuggingFace, Tokens, local_files, read_rows

TEXTS = [f"document {number}, about nothing" for number in range(40)]
HALVES = TEXTS[:20], TEXTS[20:]


def read(path: Path | list[str], column: str = "text") -> list[str]:
    named = path if isinstance(path, list) else str(path)
    return [piece.text for piece in read_rows(local_files(named), column, named)]


def lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def parquet(path: Path, **columns: object) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def json_folder(
    first: Callable[[int], dict[str, object]], second: Callable[[int], dict[str, object]]
) -> Callable:
    def write(folder: Path) -> None:
        for name, half, more in (("a.jsonl", HALVES[0], first), ("b.jsonl", HALVES[1], second)):
            lines(
                folder / name, [{"text": text, **more(number)} for number, text in enumerate(half)]
            )

    return write


def parquet_folder(
    first: dict[str, list[object]], second: dict[str, list[object]]
) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        parquet(folder / "a.parquet", text=HALVES[0], **first)
        parquet(folder / "b.parquet", text=HALVES[1], **second)

    return write


def beside(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        lines(folder / "a.jsonl", [{"text": text} for text in TEXTS])
        (folder / name).write_text(content)

    return write


def without_rows(folder: Path) -> None:
    parquet_folder({}, {})(folder)
    empty = pyarrow.table(
        {"text": pyarrow.array([], pyarrow.string()), "id": pyarrow.array([], pyarrow.int64())}
    )
    pyarrow.parquet.write_table(empty, folder / "0.parquet")
    pyarrow.parquet.write_table(pyarrow.table({}), folder / "1.parquet")


def of_types(folder: Path) -> None:
    for name, half, kind in (
        ("a", HALVES[0], pyarrow.large_string()),
        ("b", HALVES[1], pyarrow.string_view()),
    ):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": pyarrow.array(half, kind)}), folder / f"{name}.parquet"
        )
    encoded = pyarrow.table({"text": pyarrow.array(TEXTS[:3]).dictionary_encode()})
    pyarrow.parquet.write_table(encoded.slice(0, 0), folder / "0.parquet")


def packed(folder: Path) -> None:
    content = "".join(json.dumps({"text": text}) + "\n" for text in HALVES[0]).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:]))
    content = "".join(json.dumps({"text": text}) + "\n" for text in HALVES[1]).encode()
    parts = [
        pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:100], content[100:])
    ]
    passed_over = b"\x50\x2a\x4d\x18\4\0\0\0\1\0\0\0"  # as pzstd begins a file
    (folder / "b.jsonl.zst").write_bytes(passed_over + b"".join(parts))


def saved(folder: Path) -> None:
    datasets.Dataset.from_dict({"id": list(range(40)), "text": TEXTS}).save_to_disk(
        str(folder), num_shards=3
    )


def mixed(folder: Path) -> None:
    parquet(folder / "a.parquet", text=HALVES[0])
    lines(folder / "b.jsonl", [{"text": text} for text in HALVES[1]])


def in_another_order(folder: Path) -> None:
    parquet(folder / "a.parquet", text=HALVES[0], id=list(range(20)))
    parquet(folder / "b.parquet", id=list(range(20)), text=HALVES[1])


DATE = datetime.date(2024, 1, 1)
SOUND: dict[str, Callable[[Path], None]] = {
    "one more column": json_folder(lambda _: {}, lambda _: {"score": 0.5}),
    "one more column in Parquet": parquet_folder({}, {"score": [0.5] * 20}),
    "id changes within a file": json_folder(
        lambda number: {"id": number if number % 2 else "a"}, lambda _: {}
    ),
    "meta is null, then an object in Parquet": parquet_folder(
        {"meta": [None] * 20}, {"meta": [{"u": 1}] * 20}
    ),
    "a date and a text": parquet_folder({"date": [DATE] * 20}, {"date": list("x" * 20)}),
    "columns in another order": in_another_order,
    "a file without rows": without_rows,
    "kinds of text": of_types,
    "stats.json beside the texts": beside("stats.json", '{"documents": 40, "tokens": 12}'),
    "gzip and zstd of several members": packed,
    "save_to_disk": saved,
    "Parquet and JSON Lines": mixed,
    "a tenth of the rows has no text": lambda folder: lines(
        folder / "a.jsonl",
        [
            record
            for text in TEXTS
            for record in ({"text": text}, {"id": 1}, {"text": None}, {"text": ""})
        ],
    ),
}


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_folder_is_read_whatever_its_other_columns_hold(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    SOUND[kind](folder)
    assert read(folder) == TEXTS


def test_a_file_that_is_passed_over_is_named_and_one_that_is_named_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside("stats.json", '{"documents": 40}')(tmp_path)
    (tmp_path / "about.json").write_text('{\n"text": "a"\n}')
    assert read(tmp_path) == TEXTS
    assert f"{tmp_path / 'about.json'}, line 1: it begins a value over several" in caplog.text
    assert (
        f"data.column=text is not in {tmp_path / 'stats.json'}. Its columns: documents. The file"
        in caplog.text
    )
    with pytest.raises(
        DataError, match=r"data\.column=text is not in .*stats\.json\. Its columns: documents\."
    ):
        read([str(tmp_path / "a.jsonl"), str(tmp_path / "stats.json")])
    (tmp_path / "zz.json").write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match=r"zz\.json, line 1: it begins a list"):
        read(tmp_path)
    lines(tmp_path / "b.jsonl", [{"body": "x"}])
    with pytest.raises(
        DataError, match=r"data\.column=text is not in .*b\.jsonl\. Its columns: body\."
    ):
        read(tmp_path)


def test_the_parts_of_a_saved_data_set_are_named(tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(
        DataError, match=r"a data set in parts: test, train\. Name one, data\.path=.*/saved/train"
    ):
        read(tmp_path / "saved")
    assert read(tmp_path / "saved/train") == TEXTS


RECORDS = st.lists(
    st.fixed_dictionaries(
        {"text": st.none() | st.text(st.characters(codec="utf-8"), max_size=30)},
        optional={
            "meta": st.recursive(
                st.none() | st.integers() | st.text(max_size=5), st.lists, max_leaves=4
            )
        },
    ),
    max_size=12,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=RECORDS,
    ascii_only=st.booleans(),
    layout=st.sampled_from(["lines", "one line"]),
)
def test_json_of_any_layout_gives_the_texts_in_order(
    tmp_path: Path, records: list[dict[str, object]], ascii_only: bool, layout: str
) -> None:
    records = [{"text": "first"}, *records]
    parts = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    content = {
        "lines": "\r\n".join(parts),
        "one line": " ".join(parts),
    }[layout]
    (tmp_path / "a.json").write_text(content, encoding="utf-8", newline="")
    assert read(tmp_path / "a.json") == [record["text"] for record in records if record["text"]]


def broken(good: str, bad: str, count: int = 7) -> str:
    return (good + "\n") * (count - 1) + bad + "\n"


GOOD = '{"text": "fine", "id": 1}'
PLACES: dict[str, tuple[str, str]] = {
    "cut": (
        broken(GOOD, '{"text": "brok', 50_001),
        r"line 50001: it is no JSON \(Unterminated string",
    ),
    "no object": (broken(GOOD, "[1]"), "line 7: it is no JSON object but a list"),
    "a number": (broken(GOOD, '{"text": 7}'), r"line 7: data\.column=text holds int, not text"),
    "half a pair": (
        broken(GOOD, '{"text": "a\\ud83d"}'),
        "line 7: it holds half of a UTF-16 pair",
    ),
    "deep": (
        broken(GOOD, '{"text": "a", "x": ' + "[" * 100_000),
        "line 7: .*too deeply nested",
    ),
    "a long number": (
        broken(GOOD, '{"text": "a", "x": ' + "9" * 5000 + "}"),
        r"line 7: .*: an integer has more than 4,300 digits\. Write it as text, in quotes",
    ),
    "empty lines": (
        "\n" * 1_000_100 + GOOD,
        "line 1000001: 1,000,000 lines before it are empty",
    ),
    "a list": (
        '\n[{"text": "a"}]',
        r"line 2: it begins a list, .*: jq -c '\.\[\]' b\.json > b\.jsonl$",
    ),
    "a spread object": (
        '{\n"text": "a"\n}',
        r"line 1: it begins a value over several .*: jq -c '\.' b\.json > b\.jsonl$",
    ),
}


@pytest.mark.parametrize("kind", PLACES)
def test_an_error_in_json_names_file_and_line(tmp_path: Path, kind: str) -> None:
    content, words = PLACES[kind]
    (tmp_path / "rows").mkdir()
    lines(tmp_path / "rows/a.jsonl", [{"text": "fine"}])
    name = "b.json" if kind in ("a list", "a spread object") else "b.jsonl"
    (tmp_path / "rows" / name).write_text(content)
    with pytest.raises(DataError, match=rf"rows/{name}, {words}"):
        read(f"{tmp_path}/rows/b*")
    (tmp_path / "rows" / name).unlink()
    (tmp_path / "rows" / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    with pytest.raises(DataError, match=rf"rows/{name}\.gz, {words}"):
        read(f"{tmp_path}/rows/b*")


def test_other_encodings_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(broken(GOOD, '{"text": "caf\xe9"}', 7).encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.jsonl, line 7: it is not UTF-8 text .*iconv"):
        read(tmp_path / "a.jsonl")


def arrow_table(path: Path, table: pyarrow.Table) -> None:
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", lambda path, table: pyarrow.parquet.write_table(table, path)),
        ("a.arrow", arrow_table),
    ],
)
@pytest.mark.parametrize("source", ["hf", "tokens"])
def test_two_columns_of_one_name_are_refused(
    tmp_path: Path, name: str, write: Callable[[Path, pyarrow.Table], None], source: str
) -> None:
    columns = [TEXTS, TEXTS[::-1]] if source == "hf" else [[1, 2, 3], [3, 2, 1]]
    write(tmp_path / name, pyarrow.table(columns, names=["text", "text"]))
    message = rf"{re.escape(name)} has 2 columns of the name data\.column=text"
    with pytest.raises(DataError, match=message):
        if source == "hf":
            read(tmp_path / name)
        else:
            Tokens(
                path=str(tmp_path / name),
                vocab_size=9,
                column="text",
                cache_dir=str(tmp_path / "cache"),
            ).build(tmp_path / "run", 16, 0)


def test_an_error_in_parquet_names_file_row_group_and_row(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS, "id": list(range(40))})
    pyarrow.parquet.write_table(
        table, tmp_path / "a.parquet", row_group_size=10, compression="none"
    )
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    place = content.index(b"document 25")
    content[place - 40 : place + 80] = b"\xff" * 120
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet, row group 2"):
        read(tmp_path / "a.parquet")
    parquet(tmp_path / "b.parquet", text=[b"fine", b"caf\xe9"])
    with pytest.raises(
        DataError, match=r"data\.column=text of .*b\.parquet holds binary, not text"
    ):
        read(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and no more PAR1")
    with pytest.raises(DataError, match=r"c\.parquet cannot be read: "):
        read(tmp_path / "c.parquet")


def test_a_column_that_holds_no_text_is_refused_by_its_type(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=TEXTS, id=list(range(40)), tags=[["a"]] * 40)
    for column, kind in (("id", "int64"), ("tags", "list<")):
        with pytest.raises(
            DataError, match=rf"data\.column={column} of .*a\.parquet holds {kind}.*, not text"
        ):
            read(tmp_path / "a.parquet", column)


def test_a_list_of_paths_and_patterns_is_read_in_order(tmp_path: Path) -> None:
    json_folder(lambda _: {}, lambda _: {})(tmp_path)
    assert read([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]) == [*HALVES[1], *HALVES[0]]
    assert read(tmp_path / "*.jsonl") == TEXTS
    source = HuggingFace(
        path=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
        cache_dir=str(tmp_path / "cache"),
    )
    assert len(source.build(tmp_path / "run", 8, 0).train) > 800


def test_a_file_and_its_packed_copy_are_not_both_read(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz and .*a\.jsonl have one name"):
        read(tmp_path)
