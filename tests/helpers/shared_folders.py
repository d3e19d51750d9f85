"""Folders of fixtures that several tests share keep the children that they had when the fixture was
ready. A store that a test keeps there would be the store of every other test, too: which of them
finds what would depend on their order, and on the worker that gets them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

GROWING = {
    "key_of_the_tests": "the key by which runs are signed",
    "text": "token ids, by the text that they are made of",
    "rank_text": "token ids, by the text that they are made of",
    "_fresh_cache": "compiled kernels, by their source",
    "folder": "a cache, which its tests are about",
}
"""Fixture → what its folder may get later, by names that no two tests choose; but for runs."""
NUMBERED = ("server",)
"""Fixtures that number the runs of their tests themselves."""


def below(folder: Path) -> set[str]:
    """The files and folders below a folder; none where it is none."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def runs_below(folder: Path) -> set[str]:
    """The folders below a folder that are runs."""
    return {str(path.parent.relative_to(folder)) for path in folder.rglob("config.yaml")}


@contextmanager
def watched(
    base: Path, fixture: str, at_end: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """The set-up of a fixture that several tests share.

    Args:
        base: folder of pytest's temporary folders.
        at_end: takes what is called where the fixture ends.
    """
    before = set(base.iterdir())
    listed = runs_below if fixture in GROWING else below
    yield
    for folder in set(base.iterdir()) - before:
        if fixture not in NUMBERED and not folder.is_symlink():
            at_end(partial(check, fixture, folder, listed, listed(folder)))


def check(fixture: str, folder: Path, listed: Callable[[Path], set[str]], ready: set[str]) -> None:
    """Raises AssertionError where the folder has more than when the fixture was `ready`.

    Args:
        listed: gives what counts below a folder.
    """
    if added := sorted(listed(folder) - ready)[:8]:
        raise AssertionError(
            f"{added} in {folder}, the folder of the fixture {fixture}, which several tests share: "
            "give it a folder of its own, tmp_path_factory.mktemp(…) or a test's tmp_path; a "
            "finished run comes from `finished`"
        )
