"""TensorBoard: the numbers of metrics.jsonl as scalars, events and tables as text, statistics as
histograms.

Files are in RUN/tensorboard: `tensorboard --logdir runs` shows all runs. After a resume TensorBoard
hides the points that the run has left behind.
"""

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.track.statistics import Statistics
from fp4train.track.tracker import spreads

FOLDER = "tensorboard"


class TensorBoardTracker:
    """The event file of one run; see `Tracker`.

    Args:
        run_dir: events are written to RUN/tensorboard.
        config: the resolved configuration, shown as text.
        resume_step: steps done at the checkpoint that the run goes on from; None: it starts at step
            0.
    """

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], *, resume_step: int | None = None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise RuntimeError(f"{error}: pip install 'fp4train[tensorboard]'") from error
        with files.Folder.open(run_dir, create=True) as run:
            run.folder(FOLDER, create=True).close()  # a folder of the run, and no link out of it
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(run_dir / FOLDER), purge_step=purge)
        self._text(
            "config",
            "\n".join(f"    {key}: {value}" for key, value in config.items()),
            resume_step or 0,
        )

    def _text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Real):
                self._writer.add_scalar(name, float(value), step)

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        self._text(
            "event",
            ", ".join([event, *(f"{name} {value}" for name, value in (values or {}).items())]),
            step,
        )

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._text(name, "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines), 0)

    def log_statistics(self, statistics: Statistics) -> None:
        for name, values in spreads(statistics):
            self._writer.add_histogram(f"histogram/{name}", values, statistics.step)

    def finish(self, exit_code: int = 0) -> None:
        self._writer.close()
