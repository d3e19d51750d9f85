"""`profile.steps`: torch's profiler on some steps of a run, with spans by layer, GEMM and format."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from command_line import Cli, events, losses
from families import tiny_run

TRACE = Path("runs/a/profile/steps_2-3_rank_0.json.gz")


def spans(path: Path = TRACE) -> Counter[str]:
    """The named spans of a trace, and how often each is there."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return Counter(
        event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
    )


def test_a_trace_names_steps_layers_products_and_formats_and_changes_no_bit(cli: Cli) -> None:
    words = ("train.steps=4", "train.microbatch=2", "phases=none")
    ended = cli("run.name=a", "profile.steps=[2,3]", *words)
    assert ended.code == 0 and f"profile: {TRACE}" in ended.err
    found = spans()
    assert found["step 2 NVFP4"] == found["step 3 NVFP4"] == 1
    assert not found["step 1 NVFP4"] and not found["step 4 NVFP4"]
    for name in (
        "blocks.0.mlp.up forward",
        "blocks.0.mlp.up fprop E2M1xE2M1 emulate",
        "blocks.0.mlp.up backward",
        "blocks.0.mlp.up dgrad E2M1xE2M1 emulate",
        "blocks.0.mlp.up wgrad E2M1xE2M1 emulate",
        "blocks.1.mlp.up fprop BF16xBF16 torch",
        "blocks.1.mlp.up dgrad BF16xBF16 torch, wgrad BF16xBF16 torch",
    ):
        assert found[name] == 4, f"{name}: two steps of two microbatches"
    cli.trained("run.name=b", *words)
    assert losses("runs/a") == losses("runs/b")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["recipe=averis"], ["blocks.0.mlp.up wgrad E2M1xE2M1 emulate"]),
        (tiny_run("moe"), ["blocks.1.mlp.gate_up wgrad E2M1xE2M1 emulate"]),
        (
            ["model.recompute=true", "audit.every=1"],
            ["blocks.0.mlp.up forward", "blocks.0.mlp.up dgrad E2M1xE2M1 emulate"],
        ),
    ],
    ids=["two terms", "experts", "recomputed and audited"],
)
def test_each_kind_of_layer_has_spans(cli: Cli, words: list[str], names: list[str]) -> None:
    words = [*words, "train.steps=2", "phases=none", "policy=all", "eval.every=0"]
    assert cli("run.name=a", "profile.steps=[2]", *words).code == 0
    found = spans(TRACE.with_name("steps_2-2_rank_0.json.gz"))
    assert all(found[name] for name in names), found
    assert events("runs/a", "audit fault") == []
    cli.trained("run.name=b", *words)
    assert losses("runs/a") == losses("runs/b")


@pytest.mark.long
def test_a_run_that_ends_early_writes_what_it_saw_and_a_later_one_nothing(cli: Cli) -> None:
    words = ("recipe=bf16", "phases=none", "train.steps=2")
    assert cli("run.name=a", "profile.steps=[2,3]", *words).code == 0
    assert spans()["step 2 BF16"] == 1 and not spans()["step 3 BF16"]
    TRACE.unlink()
    assert cli("resume=runs/a", "train.steps=5", "profile.steps=[1,2]").code == 0
    assert not list(TRACE.parent.iterdir())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("profile.steps=[3,2]", "must be the first and the last step"),
        ("profile.steps=[0]", "must be the first and the last step"),
        ("profile.steps=[1,2,3]", "must be the first and the last step"),
        ("profile.ranks=[]", "must be numbers of ranks"),
        ("profile.ranks=[-1]", "must be numbers of ranks"),
    ],
)
def test_what_cannot_be_recorded_is_refused(cli: Cli, word: str, said: str) -> None:
    ended = cli("run.name=a", word)
    assert ended.code == 1 and said in ended.message and not Path("runs/a").exists()


def test_a_folder_that_cannot_be_written_ends_no_run(cli: Cli) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/profile").symlink_to("/tmp")
    ended = cli("run.name=a", "profile.steps=[2,3]", "recipe=bf16", "train.steps=3", "phases=none")
    assert ended.code == 0 and f"{TRACE} is not written" in ended.err
