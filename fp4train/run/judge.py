"""Programs that judge the checkpoints of a run, beside its training: `eval.tasks` and `eval.command`.

The first rank starts a shell (sh -e) with both for each checkpoint that is whole; of those that
are written before it has ended the newest is next. A run that has done its steps waits for the last
one, until a signal; one that ends early ends what runs. What is printed is in RUN/judged/step_N.log.
A failure is a warning.

Tasks are those of `fp4train eval RUN@STEP task=…`, and logged as its results are.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, ClassVar

from fp4train.companion import RunCompanion
from fp4train.config import Config
from fp4train.run.record.inbox import EVALUATION

if TYPE_CHECKING:
    from fp4train.run.run import Run

_log = logging.getLogger(__name__)

FOLDER = "judged"
_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of variables that make a program a rank of the run."""
_LOOK_SECONDS = 0.2
_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_MOST = 1 << 30
"""Bytes of what was printed that are read."""
_ANSWER = b'{"run":'
"""The beginning of the line that `fp4train eval --json` prints."""


class CheckpointJudges(RunCompanion):
    """Starts the programs."""

    folders: ClassVar = (FOLDER,)
    _judged: int | None = None
    _running: subprocess.Popen[bytes] | None = None

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether a run of this configuration has some."""
        return bool(config.eval.command or config.eval.tasks)

    def begin(self, run: Run) -> None:
        self._judged = run.saver.saved

    def before_step(self, run: Run) -> None:
        if run.world.lead:
            self._goes_on(run)

    def close(self, run: Run, error: BaseException | None) -> None:
        if error is None and run.step == run.config.train.steps:
            with run.world.met_after():
                while run.world.lead and run.signal is None and self._goes_on(run):
                    time.sleep(_LOOK_SECONDS)
        if self._running is not None:
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            _log.warning("step %s is not judged: the run ended", self._judged)

    def _goes_on(self, run: Run) -> bool:
        """Take what a program left that has ended, or start the next; whether there was any."""
        if self._running is None and run.saver.saved == self._judged:
            return False
        try:
            if self._running is None:
                self._judged = run.saver.saved
                self._running = self._started(run)
            elif (code := self._running.poll()) is not None:
                self._running = None
                self._record(run)
                if code:
                    raise OSError(f"it ended with {code}")
        except (OSError, ValueError) as error:
            log = run.directory / FOLDER / self._log
            _log.warning("step %s is not judged: %s; see %s", self._judged, error, log)
        return True

    def _started(self, run: Run) -> subprocess.Popen[bytes]:
        settings = run.config.eval
        lines = []
        if settings.tasks:
            words = ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, "-m"]
            words += ["fp4train", "eval", f"{run.directory}@{self._judged}", "--json"]
            words += ["record=false", f"plugins=[{','.join(run.config.plugins)}]"]
            lines.append(shlex.join([*words, f"task={','.join(settings.tasks)}"]))
        if settings.command:
            command = settings.command.replace("{run}", shlex.quote(str(run.directory)))
            lines.append(command.replace("{step}", str(self._judged)))
        with (
            run.record.folder.folder(FOLDER, create=True) as folder,
            os.fdopen(folder.descriptor_of(self._log, _WRITING), "wb") as output,
        ):
            return subprocess.Popen(
                ["sh", "-ec", "\n".join(lines)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_LAUNCHER)},
                start_new_session=True,
            )

    def _record(self, run: Run) -> None:
        if not run.config.eval.tasks:
            return
        with run.record.folder.folder(FOLDER) as folder:  # the tasks print before the command
            lines = folder.lines(self._log, _MOST)
            answer = next((line for line in lines if line.startswith(_ANSWER)), b'{"scores":[]}')
        for score in json.loads(answer)["scores"]:
            values = {f"eval/{name}": value for name, value in score.pop("values").items()}
            run.record.tracker.log_event(self._judged or 0, EVALUATION, score | values)

    @property
    def _log(self) -> str:
        return f"step_{self._judged}.log"
