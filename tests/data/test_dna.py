"""data=dna: FASTA records become documents; validation shares no base with training."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fp4train.data import PIECE_CHARACTERS, DataError, Dna, TokenData
from fp4train.data.dna import other_strand, pieces

TWO = ">one the first\nACGT\nacgtn\n\n>two\r\nGGGGCCCCAAAATTTT\r\n"


def build(path: Path, tmp_path: Path, *, seq_len: int = 2, **settings: Any) -> TokenData:
    return Dna(path=str(path), cache_dir=str(tmp_path / "cache"), **settings).build(
        tmp_path / "run", seq_len, 0
    )


def fasta(tmp_path: Path, text: str, name: str = "a.fa") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def documents(data: TokenData) -> tuple[list[str], list[str]]:
    """Those of training and of validation."""

    def of(ids: Any) -> list[str]:
        text = bytes(10 if i == 256 else i for i in ids[: len(ids)].tolist()).decode()
        assert text.endswith("\n")
        return text[:-1].split("\n")

    return of(data.train.ids), of(data.val.ids)


def test_a_record_is_a_document_and_validation_has_the_last_bases(tmp_path: Path) -> None:
    data = build(fasta(tmp_path, TWO), tmp_path, val=5)
    assert documents(data) == (["ACGTACGTN", "GGGGCCCCAAA"], ["ATTTT"])
    assert "1 file: 22 training and 6 validation tokens, vocabulary 257" in data.description


def test_lower_case_can_be_kept(tmp_path: Path) -> None:
    assert documents(build(fasta(tmp_path, TWO), tmp_path, val=5, case="keep"))[0][0] == "ACGTacgtn"


def test_unknown_bases_can_end_a_document(tmp_path: Path) -> None:
    path = fasta(tmp_path, ">a\nNNACGT\nNNN\nnGGA\nNCCNN\n>b\nAAAA\n")
    assert documents(build(path, tmp_path, val=4, unknown="split")) == (
        ["ACGT", "GGA", "CC"],
        ["AAAA"],
    )


@pytest.mark.parametrize(
    ("text", "settings"), [(">a\nNNNN\n", {}), (">a\nNN\n>b\nACGT\n", {"held_out": ["b"]})]
)
def test_a_file_of_unknown_bases_alone_is_refused_by_the_key_that_leaves_them_out(
    tmp_path: Path, text: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(
        DataError, match=r"data.unknown=split leaves nothing of .*a.fa to train on: .* are unknown"
    ):
        build(fasta(tmp_path, text), tmp_path, unknown="split", **settings)


def test_held_out_records_are_all_that_validation_has(tmp_path: Path) -> None:
    path = fasta(tmp_path, ">chr1 x\nACGT\n>chr2\nTTTT\n>chr3\nGGGG\n")
    train, val = documents(build(path, tmp_path, held_out=["chr2"]))
    assert (train, val) == (["ACGT", "GGGG"], ["TTTT"])
    with pytest.raises(DataError, match=r"has no record 'chr22'; did you mean 'chr2'\?"):
        build(path, tmp_path, held_out=["chr22"])
    with pytest.raises(ValueError, match=r"a list of records is needed, data.held_out=\[chr2\]"):
        Dna(path="a", held_out="chr2")


def test_the_other_strand_is_read_by_training_alone_and_holds_no_base_of_validation(
    tmp_path: Path,
) -> None:
    path = fasta(tmp_path, ">a\nAACCGGRT\n>b\nACGTTTTGGGG\n")
    train, val = documents(build(path, tmp_path, val=4, reverse_complement=True))
    assert train == ["AACCGGRT", "AYCCGGTT", "ACGTTTT", "AAAACGT"]
    assert val == ["GGGG"]


@given(st.text("ACGTRYSWKMBDHVN-acgtryswkmbdhvn-", min_size=9, max_size=40), st.booleans())
def test_the_other_strand_of_the_other_strand_is_the_strand(bases: str, rna: bool) -> None:
    if rna:
        bases = f"A{bases}U".replace("T", "U").replace("t", "u")
    assert other_strand(other_strand(bases)) == bases


def test_the_other_strand_of_rna_is_rna(tmp_path: Path) -> None:
    path = fasta(tmp_path, ">a\nAACCGGRU\n>b\nACGUGGGG\n")
    train, _ = documents(build(path, tmp_path, val=4, reverse_complement=True))
    assert train == ["AACCGGRU", "AYCCGGUU", "ACGU", "ACGU"]


@given(st.lists(st.text("ACNn", max_size=6), max_size=6), st.booleans())
def test_pieces_are_the_documents_however_a_record_is_cut(texts: list[str], split: bool) -> None:
    whole = "".join(texts)
    expected = [part for part in (re.split("[Nn]+", whole) if split else [whole]) if part]
    found = [""]
    for piece in pieces(iter(texts), split=split):
        found[-1] += piece.text
        if piece.ends_document:
            found.append("")
    assert found == [*expected, ""]


def test_gzip_and_several_files_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "genome"
    folder.mkdir()
    (folder / "b.fna.gz").write_bytes(gzip.compress(b">b\nCCCC\n") + gzip.compress(b">c\nGGGG\n"))
    fasta(folder, ">a\nAAAA\n")
    assert documents(build(folder, tmp_path, val=4)) == (["AAAA", "CCCC"], ["GGGG"])


def test_a_long_record_in_one_line_or_many_is_the_same_document(tmp_path: Path) -> None:
    bases = "".join(np.random.default_rng(0).choice(list("ACGT"), 3 * PIECE_CHARACTERS + 17))
    lines = "\n".join(bases[i : i + 60] for i in range(0, len(bases), 60))
    found = []
    for name, text in (("line", bases), ("lines", lines)):
        path = fasta(tmp_path, f">a\n{text}\n", f"{name}.fa")
        found.append(documents(build(path, tmp_path, val=0.25, reverse_complement=True)))
    assert found[0] == found[1]
    (strand, other), (held,) = found[0]
    assert strand + held == bases and len(held) == len(bases) // 4
    assert len(other) == len(strand) and other[:20] == strand[-20:][::-1].translate(
        str.maketrans("ACGT", "TGCA")
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ACGT\n", r"a.fa, line 1: a record of FASTA begins with > and its name, not 'ACGT"),
        ("\n;\n", r"a.fa holds no record of FASTA"),
        (">a\nACGT\nACLGT\n", r"a.fa, line 3: 'L' is no base of DNA or RNA .* of proteins"),
        (">a\n>b\nACGT\n", r"a.fa, line 1: the record 'a' has no bases"),
        (">a" + "ACGT>" * 2000, r"line 1: the record 'aACGT>\S{54}' has no bases$"),
        (">a\nACGT\n>\nACGT\n", r"a.fa, line 3: the record has no name after >"),
        (">a\nAC\u00e4\n", r"a.fa is no FASTA file: it holds the byte 0xc3"),
        (">a\nACGT\n", r"the validation text is 0 tokens long"),
    ],
)
def test_what_is_no_dna_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        build(fasta(tmp_path, text), tmp_path)


def test_a_cut_off_archive_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.fa.gz").write_bytes(gzip.compress(b">a\n" + b"ACGT" * 5000)[:-20])
    with pytest.raises(DataError, match=r"a.fa.gz cannot be read: Compressed file ended"):
        build(tmp_path / "a.fa.gz", tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"holds no file with one of the suffixes .fa, .fasta"):
        build(tmp_path / "none", tmp_path)


@pytest.mark.parametrize(("key", "value"), [("case", "lower"), ("unknown", "drop")])
def test_unknown_settings_are_refused(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"data.{key}='{value}' is not one of"):
        Dna(path="a", **{key: value})
