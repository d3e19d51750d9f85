"""The report says what the runs are, names what is missing, and shows names and values of other people as text only."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from made import LAYERS, write_history, write_ranking, write_run, write_sensitivity, write_statistics
from omegaconf import OmegaConf

from fp4train import files
from fp4train.cli import main
from fp4train.config import plain, to_config
from fp4train.config.composition import compose
from fp4train.data.source import planned_vocab_size
from fp4train.errors import UserError
from fp4train.hardware import Device, find_gpu
from fp4train.lab.analysis.figure import VARIABLES
from fp4train.lab.costs.estimate import estimate, time_text
from fp4train.lab.report import page
from fp4train.lab.report.page import write_report
from fp4train.precision.layers import find_layers
from fp4train.run.build import build_model, build_plan, build_timeline
from fp4train.sealed import sealed, unsealed
from fp4train.track import STATISTICS, MetricsLog

HOSTILE = '"><script>alert(1)<?script><img src=x onerror=alert(2)>&$x_1$'
"""What a name may be; no "/", because one is a folder's name."""
VOID = {"meta", "br", "col"}
SVG = {
    "svg",
    "g",
    "path",
    "defs",
    "use",
    "clippath",
    "rect",
    "text",
    "tspan",
    "line",
    "image",
    "lineargradient",
    "stop",
}
HTML = {
    *("html", "head", "meta", "title", "style", "body", "main", "nav", "section", "a", "p", "h1", "h2", "h3", "ul"),
    *("li", "div", "span", "figure", "figcaption", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    "code",
}


class Elements(HTMLParser):
    """Every element of a page with its attributes; `text` is what a reader reads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def report(tmp_path: Path, *runs: Path) -> Elements:
    out = tmp_path / "report.html"
    write_report(runs, out)
    elements = Elements(out.read_text(encoding="utf-8"))
    assert not elements.open, "every element is closed"
    return elements


def links(elements: Elements) -> Iterator[str]:
    for _, attributes in elements.found:
        for key in ("href", "xlink:href", "src", "data", "action", "srcset"):
            if (value := attributes.get(key)) is not None:
                yield value


def test_the_page_has_every_part_and_asks_for_nothing(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", seed=0, errors=True)
    write_ranking(a)
    write_sensitivity(a)
    b = write_run(tmp_path / "b", 3.03, seed=0, settings={"batch_size": 8})
    page = report(tmp_path, a, b)
    for word in ("Results", "Curves", "Ranking", "Sensitivity", "Quantisation errors", "Configuration", "Environment"):
        assert f"{word}" in page.text
    assert "+1.00 %" in page.text, "3.03 is 1 % above 3.00"
    assert "told apart" in page.text and "+0.00200 ± 0.00020" in page.text
    assert f"Policy: keep {LAYERS[0]}, 50.0%" in page.text and "train.batch_size" in page.text
    assert "E2M1·E2M1 50.0%, BF16·BF16 50.0%" in page.text and "ran to 40" in page.text, "ten steps are planned"
    assert "2.13.0" in page.text and "20.5 k" in page.text, "the version of torch, 40 · 512 tokens"
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links(page))
    targets = {attributes.get("id") for _, attributes in page.found}
    assert {link[1:] for link in links(page) if link.startswith("#")} <= targets, "no link within the page is dead"


def test_a_ranking_of_several_runs_is_shown_once_with_its_checkpoints_and_spikes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, seed=0) for name in "ab"]
    for run in runs:
        write_ranking(run, runs=("runs/a", "runs/b"), spikes=["runs/b, step 30, seed 3"])
    page = report(tmp_path, *runs)
    assert page.text.count("2 checkpoints: 6 forks of 24 steps for each candidate at each") == 1
    assert "runs/a, step 30, trained in NVFP4; runs/b, step 30, trained in NVFP4" in page.text
    assert "mxfp8 spikes at runs/b, step 30, seed 3" in page.text
    alone = report(tmp_path, write_ranking(write_run(tmp_path / "c", seed=0)).parents[2])
    assert "One checkpoint: all of this holds for it alone." in alone.text


def test_a_ranking_of_an_earlier_version_says_what_to_do(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", seed=0)
    path = write_ranking(run)
    body, _ = unsealed(path.read_bytes())
    del body["checkpoints"]
    path.write_bytes(sealed(body))
    assert "made by an earlier fp4train: the same `fp4train rank` makes it anew" in report(tmp_path, run).text


def test_a_key_that_one_run_does_not_have_is_no_null_of_it(tmp_path: Path) -> None:
    """A field of NVFP4 in a run of BF16: it is listed for the runs that have it."""
    a = write_run(tmp_path / "a", seed=0, settings={"hadamard": True, "depth": 4})
    b = write_run(tmp_path / "b", 3.03, seed=0, settings={"depth": 8})
    text = report(tmp_path, a, b).text.partition("The 2 keys that differ")[2].partition("Environment")[0]
    assert "train.hadamardtrue 1" in text and "train.depth4 18 2" in text and "null" not in text


def test_a_row_of_many_cells_names_each_of_them_on_a_phone(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", 3.03, seed=0))
    cells = [attributes for tag, attributes in page.found if tag == "td"]
    assert {"gap", "best val loss", "train loss"} <= {each.get("data-label") for each in cells}


def test_names_and_values_of_other_people_are_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE, seed=0, recipe=HOSTILE, errors=True, settings={HOSTILE: HOSTILE}, data=HOSTILE)
    write_ranking(run, HOSTILE)
    write_sensitivity(run, HOSTILE)
    page = report(tmp_path, run, write_run(tmp_path / "plain", seed=0))
    assert {tag for tag, _ in page.found} <= HTML | SVG
    assert not [key for _, attributes in page.found for key in attributes if key.startswith("on")]
    (policy,) = [a["content"] for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy
    assert page.text.count(HOSTILE) > 5, "it is shown as it is"


def test_characters_that_cannot_be_seen_or_encoded_are_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a\u202eb\x1b[31m\udcff", recipe="x\u2066y\u0000z")
    write_ranking(run, "c\u0001d\ud800")
    write_sensitivity(run, "e\u0001f\ud800")
    page = report(tmp_path, run)
    for name in ("a�b�[31m�", "x�y�z", "c�d�", "e�f�"):
        assert name in page.text


def test_damaged_and_unfinished_runs_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", seed=0, errors=True)
    write_ranking(good).write_text('{"step": 30')
    (good / "studies" / "sensitivity-bf16-30").mkdir()
    damaged = write_run(tmp_path / "damaged", seed=0)
    (damaged / "metrics.jsonl").write_text("zeros\n" * 3)
    old = write_run(tmp_path / "old", seed=0)
    (old / "history.jsonl").write_text("{}\n")
    (old / "config.yaml").write_text("a: [")
    strange = write_run(tmp_path / "strange")
    (strange / "studies").symlink_to(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    huge = tmp_path / "huge"
    huge.mkdir()
    (huge / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1' + "0" * 400 + "}\n")
    page = report(tmp_path, good, damaged, old, strange, empty, huge, tmp_path / "none", good)
    assert "3 runs" in page.text
    for sentence in (
        f"{damaged / 'metrics.jsonl'}, line 1",
        f"{old / 'history.jsonl'}, line 1 is damaged",
        f"{empty} is not a run directory: it has no metrics.jsonl",
        f"{tmp_path / 'none'} is not a run directory",
        "rank-30-ab cannot be read",
        "sensitivity-bf16-30 has no result: the study is not finished",
        "good is named twice",
        "studies",
        "int too large",
    ):
        assert sentence in page.text, sentence


def test_results_of_studies_that_were_changed_or_are_of_another_run_are_left_out(tmp_path: Path) -> None:
    config = tmp_path / "a/config.yaml"
    config.parent.mkdir()
    config.write_text(f"# fp4train run {'a' * 16} sha256 {sha256(b'run: {}').hexdigest()}\nrun: {{}}")
    run = write_run(tmp_path / "a")
    path = write_sensitivity(run)
    whole = path.read_bytes()
    assert "blocks.0.mlp.up" in report(tmp_path, run).text
    path.write_bytes(whole.replace(b'"batches": 8', b'"batches": 9'))
    page = report(tmp_path, run)
    assert "its checksum differs" in page.text and "blocks.0.mlp.up" not in page.text
    body, checked = unsealed(whole)
    assert checked
    body["identity"] = {"run": "b" * 16}
    path.write_bytes(sealed(body))
    page = report(tmp_path, run)
    assert f"it is of run {'b' * 16}, not of this one" in page.text and "blocks.0.mlp.up" not in page.text
    path.write_text(json.dumps(body | {"identity": None}))
    page = report(tmp_path, run)
    assert "is of an older version and has no checksum" in page.text and "blocks.0.mlp.up" in page.text
    config.write_bytes(config.read_bytes().replace(b"{}", b"{a: 1}"))
    assert f"{config} was changed after the run had written it" in report(tmp_path, run).text


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_a_deeply_nested_configuration_stalls_nothing(tmp_path: Path, opening: str) -> None:
    run = write_run(tmp_path / "a", seed=0)
    (run / "config.yaml").write_text(f"run: {opening * (200_000 // len(opening))}")
    began = time.monotonic()
    assert f"{run / 'config.yaml'} cannot be read as a configuration" in report(tmp_path, run).text
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rank.json", "[" * 100000),
        ("rank.json", "[]"),
        ("rank.json", '{"step": 1e999}'),
        ("sensitivity.json", '{"policy": {"keep": []}, "step": NaN}'),
    ],
)
def test_a_study_that_is_no_study_is_named(tmp_path: Path, file: str, text: str) -> None:
    run = write_run(tmp_path / "a")
    path = run / "studies" / "x" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert f"{path.parent} cannot be read" in report(tmp_path, run).text


def test_a_run_without_statistics_has_no_errors(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert "None of the runs measured them" in report(tmp_path, run).text
    (run / STATISTICS).write_bytes(b"torn")
    assert "None of the runs measured them" in report(tmp_path, run).text


def test_losses_that_are_not_finite_leave_a_report(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, level, seed=0) for name, level in (("a", 3.0), ("b", float("nan")))]
    page = report(tmp_path, *runs)
    assert "nan" in page.text


@pytest.mark.parametrize(
    "line",
    [
        {"step": 10**30, "train/loss": 3.0},
        {"step": -5, "train/loss": 3.0, "precision/recipe": ["a"]},
        {"step": 41, "train/loss": 1e308, "train/tokens": 1e308, "perf/tokens_per_s": 0.0, "perf/mfu": float("nan")},
        {"step": 41, "train/loss": -1e308, "val/loss": float("inf"), "perf/tokens_per_s": -1.0},
        {"step": 50, "train/loss": 0.0, "val/loss": 0.0, "train/tokens": 10**400},
        {"step": 50, "error/gradient_to_noise": float("nan"), "error/worst": 1e308},
    ],
)
def test_strange_numbers_leave_a_report(tmp_path: Path, line: dict[str, Any]) -> None:
    run = write_run(tmp_path / "a", errors=True)
    log = MetricsLog(run / "metrics.jsonl")
    log.log(line.pop("step"), line)
    log.finish()
    page = report(tmp_path, write_run(tmp_path / "b", seed=0), run)
    assert "Cost" in page.text


@pytest.mark.parametrize(
    "stretch",
    [
        {"start": -(10**400), "stop": 10**400},
        {"start": 30, "stop": 10},
        {"start": 0, "stop": 10**17},
        {"start": 0, "stop": 40, "kinds": [[[10**200] * 3, "x", "y", "z"]], "layers": {"a": [0, 0, 0]}},
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


def test_a_gradient_below_its_threshold_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    log = MetricsLog(run / "metrics.jsonl")
    for step, ratio in ((50, 1.8), (60, 1.7), (70, 1.6)):
        log.log(step, {"error/gradient_to_noise": ratio})
    log.finish()
    text = report(tmp_path, run).text
    assert "at step 60 the gradient's norm was 1.70 times its quantisation noise" in text and "2 of 3 measured" in text


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_all_exact_or_unknown_leave_a_report(tmp_path: Path, value: float) -> None:
    run = write_run(tmp_path / "a")
    write_statistics(run, [10], ("a",), sqnr_db=value, underflow=value)
    assert "Quantisation errors" in report(tmp_path, run).text


def test_runs_of_different_data_are_told(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=0, data="other")
    assert "trained on different data" in report(tmp_path, a, b).text
    c = write_run(tmp_path / "c", seed=0, settings={"seq_len": 256})
    assert "differ in train.seq_len" in report(tmp_path, a, c).text
    assert "different data" not in report(tmp_path, a, write_run(tmp_path / "d", seed=1)).text


def test_runs_without_a_common_step_have_no_gap(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=5)
    b = write_run(tmp_path / "b", steps=5, first=101)
    assert "share no step with a loss" in report(tmp_path, a, b).text


def test_24_runs_have_24_numbers_in_a_page_of_bounded_size(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run-{i}", 3 + i / 100, steps=1000, seed=i, recipe=f"R{i}") for i in range(24)]
    page = report(tmp_path, *runs)
    assert "23 run-22" in page.text and "24 run-23" in page.text
    assert (tmp_path / "report.html").stat().st_size < 4e6


def test_the_styles_know_every_colour_of_the_figures() -> None:
    light, _, dark = (Path(page.__file__).parent / page.STYLE).read_text().partition("prefers-color-scheme:dark")
    for variable in VARIABLES.values():
        assert f"{variable}:" in light and f"{variable}:" in dark


# -- the command


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return int(ended.value.code or 0), shown.out, shown.err


def test_the_command_writes_the_file_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    code, out, err = command(capsys, "a", "nothing")
    assert code == 0 and out.startswith("report.html: ") and "nothing is not a run directory" in err
    assert command(capsys, "a", "out=b.html")[0] == 0 and (tmp_path / "b.html").is_file()


def test_a_gpu_has_the_predicted_time_of_the_plan_and_what_cannot_be_estimated_is_named(tmp_path: Path) -> None:
    cfg = plain(compose(["run.name=a", "recipe=nvfp4", "model=llama_30m"]))
    config = to_config(OmegaConf.create(cfg))
    run, other = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1)
    write_history(run, {**cfg, "data": {"path": "text"}}, 300, "NVFP4")
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(cfg)))
    problems = write_report([run, other], tmp_path / "r.html", find_gpu("B200"))
    assert len(problems) == 1 and problems[0].startswith("b: its time on B200 is not estimated: ")
    plan = build_plan(
        config,
        find_layers(build_model(config, planned_vocab_size(config.data), torch.device("meta"))),
        build_timeline(config),
        Device.elsewhere(find_gpu("B200")),
    )
    cost = estimate(plan, find_gpu("B200"))
    page = (tmp_path / "r.html").read_text()
    shown = page.partition("Predicted time of the linear layers on B200")[2].partition("</table>")[0]
    assert time_text(cost.total / 300) in shown and f"{cost.total / cost.bf16:.2f}" in shown
    assert "Predicted time" not in report(tmp_path, run).text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "report needs run directories"),
        (("out=x.html",), "report needs run directories"),
        (("nothing",), "no run can be reported: nothing is not a run directory"),
        (("a", "--open"), "report knows no flag --open"),
        (("a", "steps=3"), "takes run directories, out= and gpu=, not steps=3"),
        (("a", "gpu=V100"), "gpu='V100' is not a GPU whose peak rates are known"),
        (("a", "out=x.pdf"), "the name must end in .html"),
        (("a", "out="), "the name must end in .html"),
        (("a", "out=no/x.html"), "there is no folder no"),
        (("a", "out=folder.html"), "is a folder"),
        (("a", "out=x.html", "out=y.html"), "given twice"),
    ],
)
def test_what_is_impossible_is_refused(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    (tmp_path / "folder.html").mkdir()
    code, _, err = command(capsys, *arguments)
    assert code == 1 and message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder.html"]


def test_a_full_disk_leaves_the_report_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.html"
    out.write_text("before")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = write_run(tmp_path / "a")
    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        write_report([run], out)
    assert out.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
