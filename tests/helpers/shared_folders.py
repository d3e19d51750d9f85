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
    "server": "runs of ranks, which it numbers itself",
    "_fresh_cache": "compiled kernels, by their source",
    "folder": "a cache, which its tests are about",
}
"""Fixture → what its folder may get later, by names that no two tests choose."""


def children(folder: Path) -> set[str]:
    """The names in a folder; none where it is none."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@contextmanager
def watched(
    base: Path, fixture: str, at_end: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """The set-up of a fixture that several tests share.

    Args:
        base: folder of pytest's temporary folders.
        at_end: takes what is called where the fixture ends.
    """
    before = children(base)
    yield
    for name in children(base) - before:
        if fixture not in GROWING and not (base / name).is_symlink():
            at_end(partial(check, fixture, base / name, children(base / name)))


def check(fixture: str, folder: Path, ready: set[str]) -> None:
    """Raises AssertionError where the folder has more than when the fixture was `ready`."""
    if added := sorted(children(folder) - ready):
        raise AssertionError(
            f"{added} in {folder}, the folder of the fixture {fixture}, which several tests share: "
            "give it a folder of its own, tmp_path_factory.mktemp(…) or a test's tmp_path; a "
            "finished run comes from `finished`"
        )
