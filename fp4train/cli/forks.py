"""What verbs with forks of checkpoints share: the work, which may be interrupted, and the results in
the folder of each checkpoint.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from fp4train.lab.studies import Base, ForkRequest, GateResult, RankResult
from fp4train.run.host import keep_freed_memory
from fp4train.run.record import directory as run_directory
from fp4train.sealed import sealed

_log = logging.getLogger("fp4train")


@contextmanager
def making_forks(request: ForkRequest) -> Iterator[None]:
    """Where forks are made: with the classes of plugins, and a word on what an interrupt leaves."""
    keep_freed_memory()
    with request.using_plugins():
        try:
            yield
        except KeyboardInterrupt:
            _log.warning(
                "interrupted: the forks that were made are recorded, the same command goes on"
            )
            raise


def write_results(
    name: str, result: RankResult | GateResult, request: ForkRequest, bases: Sequence[Base]
) -> list[Path]:
    """Write results into the folder of each checkpoint, or that of the request, with the identity
    of its run; the files.
    """
    folders = [base.folder for base in bases]
    if request.out is not None:
        folders = [request.out]
    for folder, base in zip(folders, bases, strict=False):
        body = {**asdict(result), "identity": {"run": run_directory.identity(base.source)}}
        run_directory.write_text(folder / name, sealed(body, indent=1).decode())
    return [folder / name for folder in folders]
