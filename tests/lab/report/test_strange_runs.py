"""Reports of damaged, hostile and unfinished runs: each is named; names and values of other people
are text only.
"""

from __future__ import annotations

import json
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from made import (
    sealed_lines,
    write_history,
    write_ranking,
    write_run,
    write_sensitivity,
)
from report_page import report

from fp4train.sealed import sealed, unsealed

HOSTILE = '"><script>alert(1)<?script><img src=x onerror=alert(2)>&$x_1$'
"""What a name may be; no "/", because one is a folder's name."""
HTML = re.compile(
    "html|head|meta|title|style|body|main|nav|section|a|p|h[123]|ul|li|div|span|figure|figcaption|"
    "img|table|thead|tbody|tr|th|td|details|summary|code"
)


@pytest.mark.long
def test_names_and_values_of_other_people_are_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / HOSTILE,
        seed=0,
        recipe=HOSTILE,
        errors=True,
        settings={HOSTILE: HOSTILE},
        data=HOSTILE,
    )
    write_ranking(run, HOSTILE)
    write_sensitivity(run, HOSTILE)
    page = report(tmp_path, run, write_run(tmp_path / "plain", seed=0))
    assert all(HTML.fullmatch(tag) for tag, _ in page.found)
    assert not [key for _, attributes in page.found for key in attributes if key.startswith("on")]
    (policy,) = [
        a["content"] for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy
    assert page.text.count(HOSTILE) > 5, "it is shown as it is"


@pytest.mark.long
def test_characters_that_cannot_be_seen_or_encoded_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a\u202eb\x1b[31m\udcff", recipe="x\u2066y\u0000z")
    write_ranking(run, "c\u0001d\ud800")
    write_sensitivity(run, "e\u0001f\ud800")
    page = report(tmp_path, run)
    for name in (r"a\u202eb\u001b[31m\udcff", r"x\u2066y\u0000z", r"c\u0001d\ud800", r"e\u0001f"):
        assert name in page.text


@pytest.mark.usefixtures("sketched")
def test_damaged_and_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", seed=0, errors=True)
    write_ranking(good).write_text('{"step": 30')
    (good / "studies" / "sensitivity-bf16-30").mkdir()
    damaged = write_run(tmp_path / "damaged", seed=0)
    (damaged / "metrics.jsonl").write_text("zeros\n" * 3)
    old = write_run(tmp_path / "old", seed=0)
    (old / "history.jsonl").write_text("{}\n")
    strange = write_run(tmp_path / "strange")
    (strange / "studies").symlink_to(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    huge = tmp_path / "huge"
    huge.mkdir()
    (huge / "metrics.jsonl").write_bytes(sealed_lines([{"step": 1, "train/loss": 10**400}]))
    page = report(tmp_path, good, damaged, old, strange, empty, huge, tmp_path / "none", good)
    assert "1 run;" in page.text
    for sentence in (
        f"{damaged / 'metrics.jsonl'}, line 1",
        f"{old / 'history.jsonl'} is of an older fp4train: it has lines without the checksums "
        "of today",
        f"{empty} is not a run directory (it has no config.yaml)",
        f"{tmp_path / 'none'} is not a run directory",
        "rank-30-ab cannot be read",
        "sensitivity-bf16-30 has no result: the study is not finished",
        "good is named twice",
        "studies",
        "int too large",
    ):
        assert sentence in page.text, sentence


@pytest.mark.long
def test_results_of_studies_that_were_changed_or_are_of_another_run_are_left_out(
    tmp_path: Path,
) -> None:
    config = tmp_path / "a/config.yaml"
    config.parent.mkdir()
    config.write_text(
        f"# fp4train run {'a' * 16} sha256 {sha256(b'run: {}').hexdigest()}\nrun: {{}}"
    )
    run = write_run(tmp_path / "a")
    path = write_sensitivity(run)
    whole = path.read_bytes()
    assert "blocks.0.mlp.up" in report(tmp_path, run).text
    path.write_bytes(whole.replace(b'"batches": 8', b'"batches": 9'))
    page = report(tmp_path, run)
    assert "its checksum differs" in page.text and "blocks.0.mlp.up" not in page.text
    body = unsealed(whole)
    path.write_bytes(sealed(body | {"identity": {"run": "b" * 16}}))
    page = report(tmp_path, run)
    assert "it is of another run" in page.text and "blocks.0.mlp.up" not in page.text
    path.write_text(json.dumps(body))
    page = report(tmp_path, run)
    assert (
        "it has no checksum: it was made by an older fp4train" in page.text
        and "blocks.0.mlp.up" not in page.text
    )


@pytest.mark.long
@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("opening", ["[", "- "])
def test_a_deeply_nested_configuration_stalls_nothing(tmp_path: Path, opening: str) -> None:
    run = write_run(tmp_path / "a", seed=0)
    (run / "config.yaml").write_text(f"run: {opening * (20_000 // len(opening))}")
    began = time.monotonic()
    assert "The runs have the same" not in report(tmp_path, run).text
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rank.json", "[" * 100000),
        ("sensitivity.json", '{"policy": {"keep": []}, "step": NaN}'),
    ],
)
def test_a_study_that_is_no_study_is_named(tmp_path: Path, file: str, text: str) -> None:
    run = write_run(tmp_path / "a")
    path = run / "studies" / "x" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert f"{path.parent} cannot be read" in report(tmp_path, run).text


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    "stretch",
    [
        {"start": -(10**400), "stop": 10**400},
        {"start": 0, "stop": 10**17},
        {
            "start": 0,
            "stop": 40,
            "kinds": [[[10**200] * 3, "x", "y", "z"]],
            "layers": {"a": [0, 0, 0]},
        },
        {"start": 0, "stop": 40, "kinds": [], "layers": {}},
    ],
)
def test_a_strange_plan_leaves_a_report(tmp_path: Path, stretch: dict[str, Any]) -> None:
    run = write_run(tmp_path / "a", seed=0)
    config = {"train": {"batch_size": 10**400, "microbatch": 1}, "data": {"path": "text"}}
    write_history(run, config, 40, "NVFP4", **stretch)
    page = report(tmp_path, write_run(tmp_path / "b", seed=0), run)
    assert "Cost" in page.text
    assert ("history.jsonl, line 1 is damaged (" in page.text) is bool(stretch.get("kinds", True))
