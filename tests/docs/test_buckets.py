"""docs/buckets.md: its commands run in their order, on an S3 server of this machine."""

import json
from pathlib import Path

import fsspec
import pytest
from object_store import serving
from shown import commands, in_tenths, shortened, write_shown

from fp4train.cli import main


@pytest.mark.long
def test_the_way_from_json_lines_in_a_bucket_to_an_export_runs(
    working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = write_shown(working_folder, "buckets.md") / "data/blend.yaml"
    mixture.write_text(mixture.read_text().replace("start: 200", "start: 20"))
    with serving(monkeypatch):
        store = fsspec.filesystem("s3")
        store.pipe("lake/web/a.jsonl", b'{"text": "some words of a page"}\n' * 2000)
        store.pipe("lake/code/a.jsonl", b'{"content": "def add(a, b): return a + b"}\n' * 1000)
        for words in commands("buckets.md"):
            command = in_tenths(words[1:], ("train.steps", "data.stages"))
            if "data=blend" in command:
                caches = [f"data.parts.{name}.source.cache_dir=cache" for name in ("web", "code")]
                trains = words[1] != "prepare"
                command = [*(shortened(command) if trains else command), *caches]
            with pytest.raises(SystemExit) as ended:
                main(command)
            assert ended.value.code == 0, words
        assert store.exists("lake/models/first/config.json")
    events = [
        json.loads(line)
        for name in ("first", "more_code")
        for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()
        if '"stage"' in line
    ]
    assert [event["step"] for event in events if event["event"] == "stage"] == [20, 20, 40]
