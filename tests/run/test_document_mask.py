"""`train.document_mask=true`: runs with it resume to the bit, evaluations know it, and what cannot
have it says so.
"""

from pathlib import Path

import numpy as np
import pytest
from command_line import TINY, Cli, besides, lines, losses

from fp4train.exchange import held_out, load_trained


@pytest.fixture
def words(text: Path, tmp_path: Path) -> tuple[str, ...]:
    """Of a run on many short documents."""
    folder = tmp_path / "documents"
    folder.mkdir()
    body = text.read_text(encoding="utf-8")
    for start in range(0, 6000, 20):
        (folder / f"{start:04}.txt").write_text(body[start : start + 20], encoding="utf-8")
    return (
        f"data.path={folder}",
        "train.document_mask=true",
        "checkpoint.every=3",
        "checkpoint.keep=4",
        "data.val=0.2",
    )


def test_a_run_resumes_to_the_bit_and_differs_from_one_without(
    cli: Cli, words: tuple[str, ...]
) -> None:
    assert cli("run.name=a", *words).code == 0
    assert cli("run.name=b", *words, "train.document_mask=false").code == 0
    whole = losses("runs/a")
    assert whole[1] != losses("runs/b")[1]
    assert cli.raw("resume=runs/a", "resume_step=3").code == 0
    assert losses("runs/a") == whole


def test_an_evaluation_attends_within_documents_as_the_run_does(
    cli: Cli, words: tuple[str, ...]
) -> None:
    assert cli("run.name=a", *words).code == 0
    trained = load_trained(Path("runs/a"))
    (score,) = held_out(trained, [trained.high_precision], trained.config.eval.batches)
    assert (
        score.values["loss"]
        == [line["val/loss"] for line in lines("runs/a") if "val/loss" in line][-1]
    )
    assert score.values["bytes"] < score.values["tokens"]


def test_token_files_do_not_say_where_documents_end(cli: Cli) -> None:
    (np.arange(4000) % 50).astype(np.uint16).tofile("ids.bin")
    given = ("data=tokens", "data.path=ids.bin", "data.vocab_size=50", "train.document_mask=true")
    found = cli.raw("run.name=a", *given, "track=jsonl", "train.steps=1", "train.seq_len=32")
    assert "token files without a tokenizer do not say which id ends a document" in found.message


def test_token_files_have_documents_where_a_key_says_what_divides_them(cli: Cli) -> None:
    (np.arange(4000) % 50).astype(np.uint16).tofile("ids.bin")
    tiny = besides(TINY, {"data"})
    given = (
        *tiny,
        "data=tokens",
        "data.path=ids.bin",
        "data.vocab_size=50",
        "track=jsonl",
        "train.steps=2",
    )
    masked = ("train.document_mask=true", "data.end_id=7")
    assert cli.raw("run.name=a", *given, *masked).code == 0
    assert cli.raw("run.name=b", *given, "data.end_id=7").code == 0
    assert losses("runs/a")[2] != losses("runs/b")[2]
    trained = load_trained(Path("runs/a"))
    (score,) = held_out(trained, [trained.high_precision], trained.config.eval.batches)
    assert (
        score.values["loss"]
        == [line["val/loss"] for line in lines("runs/a") if "val/loss" in line][-1]
    )


def test_later_stages_of_a_pipeline_do_not_know_the_documents(cli: Cli) -> None:
    found = cli("plan", "train.document_mask=true", "parallel.pp=2", "gpu=B200", "gpus=2")
    assert "later stages of a pipeline see no tokens" in found.message
