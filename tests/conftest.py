"""One thread: the tests' tensors are tiny, and threads that wait for each other make them slow on a busy machine. For
the same reason no example of a property test has a deadline.

Tests marked `long` (compilers, the interpreter's full sweep) run in CI and with --long; else they are deselected, and
the last line says how many.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def key_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs are signed with a key of the tests' own, which their processes share, and not with the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long` as well, as CI does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long") or os.environ.get("CI"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)
    config.stash[LEFT_OUT] = len(long)


def pytest_collection_finish() -> None:
    """Every run, and every test of a compiler, collects garbage: not in what the tests' process holds to its end."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist, which collects alone and prints nothing
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"{count} long test{'s' * (count != 1)} left out; --long runs them, as CI does")
