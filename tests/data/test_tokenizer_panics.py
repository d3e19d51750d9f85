"""A tokenizer whose library panics is one line on the terminal, and what others print stays."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from tokenizer_kinds import tokenizer_json

from fp4train.cli import main
from fp4train.data.tokenizers.panics import quiet_panics

HEAD = "\nthread '<unnamed>' (17) panicked at onig/src/lib.rs:647:23:\nretry-limit-in-match over\n"
SHORT = (
    "stack backtrace:\n   0: rust_begin_unwind\n   1: core::panicking::panic_fmt\n             "
    "at ./a.rs:3:5\n"
)
REPORTS = {
    "plain": HEAD
    + "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n",
    "backtrace": HEAD + SHORT + "note: Some details are omitted, run with `RUST_BACKTRACE=full`.\n",
    "full backtrace": HEAD + SHORT,
    "an older library": HEAD.replace(" (17)", "") + "note: run with `RUST_BACKTRACE=1`\n",
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_the_report_of_a_panic_is_left_out_and_nothing_else(
    capfd: pytest.CaptureFixture[str], report: str
) -> None:
    with pytest.raises(RuntimeError), quiet_panics():
        print("a warning", file=sys.stderr, flush=True)
        os.write(2, report.encode())
        raise RuntimeError
    print("later", file=sys.stderr)
    assert capfd.readouterr().err == "a warning\nlater\n"


def test_threads_that_encode_at_once_leave_standard_error_as_it_was(
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for turn in range(50):
            with quiet_panics():
                os.write(2, f"{number}.{turn}\n".encode() + REPORTS["plain"].encode())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"the end\n")
    written = capfd.readouterr().err.splitlines()
    assert sorted(written[:-1]) == sorted(
        f"{number}.{turn}" for number in range(4) for turn in range(50)
    )
    assert written[-1] == "the end"


def test_a_tokenizer_that_gives_up_on_a_text_is_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = json.loads(tokenizer_json("byte level"))
    table["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    (tmp_path / "tok.json").write_text(json.dumps(table))
    (tmp_path / "text.txt").write_text(("a" * 60 + "!\n") * 200)
    words = [
        "data=text",
        f"data.path={tmp_path / 'text.txt'}",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    words += ["data/tokenizer=pretrained", f"data.tokenizer.name={tmp_path / 'tok.json'}"]
    with pytest.raises(SystemExit) as ended:
        main([*words, f"run.dir={tmp_path / 'run'}"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert line.startswith(
        f"fp4train: {tmp_path / 'tok.json'} cannot encode the text: Onig: Regex search error"
    )
