"""One thread: the tests' tensors are tiny, and threads that wait for each other make them slow on a
busy machine. For the same reason no example of a property test has a deadline.

Tests marked `long` (compilers, the interpreter's full sweep) run in CI and with --long; else they
are deselected, and the last line says how many.
"""

import ctypes
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli
from compositions import loading_once, parsing_once, remembering
from finished_runs import FinishedRuns
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings
from omegaconf import OmegaConf
from shared_folders import watched
from unflushed import checked

from fp4train.config import composition
from fp4train.config.folders import registered_files
from fp4train.formats import ELEMENT_FORMATS, SCALE_FORMATS
from fp4train.lab.analysis import curves, figure, heatmap
from fp4train.lab.analysis.curves import draw_curves
from fp4train.lab.analysis.heatmap import draw_statistics
from fp4train.precision import Recipe
from fp4train.quantize import ROUNDINGS
from fp4train.run import host

# to rewrite the assertions of all tests takes 25 s of each worker
sys.dont_write_bytecode = False
torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def key_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are signed with a key of the tests' own, which their processes share, and not with the
    user's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def formats_of_plugins_forgotten() -> Iterator[None]:
    """What a plugin adds in one test is unknown to the next."""
    registries = (ELEMENT_FORMATS, SCALE_FORMATS, ROUNDINGS)
    present = [registry.names for registry in registries]
    yield
    for registry, names in zip(registries, present, strict=True):
        for name in set(registry.names) - set(names):
            registry.remove(name)


@pytest.fixture(autouse=True)
def files_that_are_options_forgotten() -> Iterator[None]:
    """A file that one test names as an option is none in the next."""
    yield
    repository = ConfigStore.instance().repo
    for group, names in registered_files().items():
        for name in names:
            del repository[group][f"{name}.yaml"]


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal() -> None:
    """A shell starts what runs in the background without SIGINT, nohup without SIGHUP; runs respect
    both.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def wide_terminal() -> Iterator[None]:
    """Tables are folded in a narrow terminal; tests read their rows in a wide one, unless they say
    otherwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "3000")
        yield


@pytest.fixture(autouse=True, scope="session")
def no_pictures() -> Iterator[None]:
    """Pictures take as long as a tiny run; tests of them ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", lambda run: Path(run) / "curves.png")
        patch.setattr(heatmap, "draw_statistics", lambda run: Path(run) / "statistics.png")
        yield


@pytest.fixture(autouse=True, scope="session")
def unflushed_files() -> Iterator[None]:
    """See `unflushed`. Tests of what a power cut leaves, or a full disk, have an fsync of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", checked)
        yield


@pytest.fixture(autouse=True, scope="session")
def remembered_compositions() -> Iterator[None]:
    """See `compositions`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "hydra_compose", remembering(composition.hydra_compose))
        parse = parsing_once(OverridesParser.parse_override)
        patch.setattr(OverridesParser, "parse_override", parse)
        patch.setattr(OmegaConf, "load", loading_once(OmegaConf.load))
        yield


class YoungCollector:
    """The module `gc` as runs of tests see it: a collection takes young objects, and the process
    has frozen others.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self) -> int:
        return gc.collect(0)

    def get_freeze_count(self) -> int:
        return 1


@pytest.fixture(autouse=True, scope="session")
def quick_collections() -> Iterator[None]:
    """A run collects garbage before its steps, and asks whether its process has frozen objects.
    Among the objects of the tests, half a million or more, each takes a tenth of a tiny run's time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "gc", YoungCollector())
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of this test draws its curves and its statistics."""
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    monkeypatch.setattr(heatmap, "draw_statistics", draw_statistics)


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are not drawn: an empty one stands in the place of each. For tests of what is beside
    them.
    """
    monkeypatch.setattr(figure, "rendered", lambda draw, width, ending: b"")


@pytest.fixture(autouse=True)
def handlers_outlive_their_streams() -> Iterator[None]:
    """Software logs to the standard error of the moment in which it is imported; in a test that is
    a stream of capsys, which closes with the test. Set up before capsys, this comes after it.
    """
    yield
    for reference in logging._handlerList:
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and getattr(handler.stream, "closed", False):
            vars(handler).pop("flush", None)  # transformers keeps that of the stream
            handler.stream = sys.stderr


def seed_everything() -> None:
    """The global generators as each test, and each fixture that tests share, finds them: the draws
    of one do not depend on which tests came before it, nor on the order of the tests.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_runtest_setup() -> None:
    seed_everything()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """See `seed_everything`; the test that needs such a fixture first draws as if it were there.
    Its folder is watched: see `shared_folders`.
    """
    if fixturedef.scope == "function" or fixturedef.argname == "tmp_path_factory":
        return (yield)
    base = request.getfixturevalue("tmp_path_factory").getbasetemp()
    seed_everything()
    try:
        with watched(base, fixturedef.argname, fixturedef.addfinalizer):
            return (yield)
    finally:
        seed_everything()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A command may choose its number of threads; the next test has one again."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """The state of torch's compiler, which outlives a test."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def recipes() -> dict[str, Recipe]:
    """Name → recipe of every file in recipes/. Names of cases do not need it: composing all takes
    half a second.
    """
    from configured import recipes_by_name

    return recipes_by_name()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with something to learn in it."""
    words = (
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "in",
        "4",
        "or",
        "8",
        "bits",
    )
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(draw.choice(words) for _ in range(4000)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """The finished runs that tests begin with."""
    return FinishedRuns(text, tmp_path_factory)


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(
    text: Path,
    working_folder: Path,
    capsys: pytest.CaptureFixture[str],
    finished: FinishedRuns,
) -> Cli:
    """The command line in an empty working directory."""
    return Cli(text, working_folder, capsys, finished)


@pytest.fixture(scope="session")
def small_run(finished: FinishedRuns) -> Path:
    """A finished run of the default recipe, policy, phases and audits on byte tokens, which tests
    read and leave as it is.
    """
    return finished("run.name=small", "audit.every=null")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of the small models of `hf_folders`: Llama 3 in several shards, Qwen2 in
    BF16.
    """
    from hf_folders import MODELS, write_folder

    place = tmp_path_factory.mktemp("folders")
    options: dict[str, Any] = {"llama-3": {"shard": "100KB"}, "qwen2": {"dtype": torch.bfloat16}}
    for name in MODELS:
        write_folder(place / name, name, **options.get(name, {}))
    assert len(list((place / "llama-3").glob("model-*.safetensors"))) > 2
    return {name: place / name for name in MODELS}


LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run the tests marked `long` as well, as CI does"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Those of the scripts take a minute each: the last of them would run beside an idle core.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/scripts/"))
    if config.getoption("--long") or os.environ.get("CI"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)
    config.stash[LEFT_OUT] = len(long)


def pytest_collection_finish() -> None:
    """Every run, and every test of a compiler, collects garbage: not in what the tests' process
    holds to its end. Bytecode of tests is kept, and none of the modules that tests write: it would
    stand for another text that is written within the same second.
    """
    freeze()
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def freeze() -> None:
    gc.collect()
    gc.freeze()
    give_back_free_memory()


def give_back_free_memory() -> None:
    """glibc keeps what large tests have freed, gigabytes at the end of the tests, unless it is
    asked; other libraries have no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@pytest.fixture(autouse=True, scope="module")
def frozen_after_each_module() -> Iterator[None]:
    """Caches and shared runs grow from module to module: see `pytest_collection_finish`."""
    yield
    freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    # a worker of pytest-xdist, which collects alone and prints nothing
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{count} long test{'s' * (count != 1)} left out; --long runs them, as CI does"
        )
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        seed = config.getoption("randomly_seed", None)
        terminalreporter.write_line(f"the order of the tests: --randomly-seed={seed}")
