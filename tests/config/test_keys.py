"""Which keys may differ, by the marks of the fields that define them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from fp4train.config import Config, bind, path_values, plain, plugins
from fp4train.config.binding import differing_keys
from fp4train.config.composition import compose
from fp4train.keys import CHANGES_DIGITS, CHANGES_NOTHING, MayDiffer, in_sections
from fp4train.paths import CacheFolder, DataPaths

REPEATED = [
    "run.name",
    "run.dir",
    "run.overwrite",
    "resume",
    "resume_step",
    "gpu",
    "plugins",
    "eval",
    "checkpoint",
    "train.step_timeout",
    "train.on_divergence",
    "train.rewinds",
    "track",
    "data.cache_dir",
    "data.workers",
    "audit",
    "hooks",
    "profile",
]
COURSE = ["recipe", "policy", "phases", "optim", "schedule", "train.steps"]
PLACES = ["data.path", "data.val_path"]
DIGITS = [
    "backend",
    "device",
    "teacher",
    "teacher_step",
    "parallel",
    "model.recompute",
    "train.microbatch",
    "train.threads",
    "train.compile",
    "train.deterministic",
    "train.kernels",
    "train.keep_values",
    "model.scan.kernels",
]
START = ["init", "init_step"]
SOURCES = [
    ["data=stdlib", "model=hybrid_tiny"],
    ["data=text", "data.path=a"],
    ["data=hf", "data.path=[a,b]"],
    ["data=tokens", "data.path=a", "data.val_path=b", "data.vocab_size=9"],
    ["data=chat", "data.path=a"],
    ["data=dna", "data.path=a"],
]


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (MayDiffer.REPEATED, REPEATED),
        (MayDiffer.RESUMED, [*REPEATED, *COURSE, *PLACES, *DIGITS]),
        (MayDiffer.STUDIED, [*REPEATED, *COURSE, *PLACES, *START]),
    ],
)
def test_a_repeated_command_a_resume_and_a_study_may_differ_in_these_keys_and_no_others(
    use: MayDiffer, expected: list[str]
) -> None:
    marked = set[str]()
    for words in SOURCES:
        marked |= {*differing_keys(plain(compose(["run.name=a", *words])), Config, use)}
    assert {key for key in marked if key.count(".") < 2 or "scan" in key} == set(expected)


@dataclass(frozen=True, kw_only=True)
class Inner:
    files: DataPaths | None = None
    fast: Annotated[bool | None, CHANGES_DIGITS] = None
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Outer:
    parts: Mapping[str, Inner] = field(default_factory=dict)
    watch: Annotated[Inner, CHANGES_NOTHING] = field(default_factory=Inner)
    cache: CacheFolder = "c"


def test_a_mark_is_found_in_sections_and_unions_and_leaves_the_values_type() -> None:
    node = {"parts": {"a": {"files": ["x", "y"], "fast": True}}}
    with plugins.using([__name__]):
        resumed = differing_keys(node, Outer, MayDiffer.RESUMED)
        repeated = differing_keys(node, Outer, MayDiffer.REPEATED)
    assert resumed == (
        "parts.a.files",
        "parts.a.fast",
        "watch",
        "watch.files",
        "watch.fast",
        "cache",
    )
    assert repeated == ("watch", "cache")
    outer = bind(node, Outer, "")
    assert outer.parts["a"].files == ("x", "y") and outer.parts["a"].fast is True
    assert list(path_values(node, Outer)) == [("parts.a.files", "x"), ("parts.a.files", "y")]


def test_a_section_holds_its_keys_and_not_those_whose_names_begin_alike() -> None:
    assert in_sections("init", ["init"]) and in_sections("init.a.b", ["init"])
    assert not in_sections("init_step", ["init"]) and not in_sections("in", ["init"])
