"""Programs that judge the checkpoints of a run, beside its training: `eval.tasks` and `eval.command`.

The first rank starts a shell (sh -e) with both for each checkpoint that is whole; of those that
are written before it has ended the newest is next. A run that has done its steps waits for the last
one, until a signal; one that ends early, or is killed, ends what runs. What is printed is in
RUN/judged/step_N.log. A failure is a warning.

Tasks are those of `fp4train eval RUN@STEP task=…`, and logged as its results are. Their names are
looked up when a run begins, beside it: lm_eval takes many seconds.
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
_ENDS_WITH_THE_RUN = "exec 3<&0 </dev/null; (read _ <&3 || kill -9 0) &"
"""What ends a shell and all that it started when the run is gone before it has written a line."""
_LOOK_UP = "import sys; from fp4train.exchange.harness import task_manager as t; t(sys.argv[1:])"


class CheckpointJudges(RunCompanion):
    """Starts the programs."""

    folders: ClassVar = (FOLDER,)
    _judged: int | None = None
    _name = ""
    _running: subprocess.Popen[bytes] | None = None

    @classmethod
    def used(cls, config: Config) -> bool:
        """Whether a run of this configuration has some."""
        return bool(config.eval.command or config.eval.tasks)

    def begin(self, run: Run) -> None:
        self._judged = run.saver.saved
        tasks = run.config.eval.tasks
        if tasks and run.world.lead and self._running is None:
            self._start(run, "eval.tasks", [shlex.join([*_python(), "-c", _LOOK_UP, *tasks])])

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
            self._running.communicate()
            self._running = None
            self._warn("the run ended")

    def _goes_on(self, run: Run) -> bool:
        """Take what a program left that has ended, or start the next; whether there was any."""
        if self._running is None and run.saver.saved == self._judged:
            return False
        try:
            if self._running is None:
                self._judged = run.saver.saved
                self._start(run, f"step_{self._judged}", self._programs(run))
            elif (code := self._running.poll()) is not None:
                self._running.communicate(b"\n")
                self._running = None
                last = self._record(run)
                if code:
                    raise OSError(f"it ended with {code} ({last})")
        except (OSError, ValueError) as error:
            self._warn(f"{error}; see {run.directory / FOLDER / self._name}.log")
        return True

    def _warn(self, reason: str) -> None:
        _log.warning("%s is not judged: %s", self._name.replace("_", " "), reason)

    def _programs(self, run: Run) -> list[str]:
        """The lines of the shell that judges a checkpoint."""
        settings = run.config.eval
        lines = []
        if settings.tasks:
            words = [*_python(), "-m", "fp4train", "eval", f"{run.directory}@{self._judged}"]
            words += ["--json", "record=false", f"plugins=[{','.join(run.config.plugins)}]"]
            lines.append(shlex.join([*words, f"task={','.join(settings.tasks)}"]))
        if settings.command:
            command = settings.command.replace("{run}", shlex.quote(str(run.directory)))
            lines.append(command.replace("{step}", str(self._judged)))
        return lines

    def _start(self, run: Run, name: str, lines: list[str]) -> None:
        self._name = name
        with (
            run.record.folder.folder(FOLDER, create=True) as folder,
            os.fdopen(folder.descriptor_of(f"{name}.log", _WRITING), "wb") as output,
        ):
            self._running = subprocess.Popen(
                ["sh", "-ec", "\n".join([_ENDS_WITH_THE_RUN, *lines])],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={k: v for k, v in os.environ.items() if not k.startswith(_OF_THE_LAUNCHER)},
                start_new_session=True,
            )

    def _record(self, run: Run) -> str:
        """Log the results of tasks, which print before the command; returns the last line."""
        answer = line = b""
        with run.record.folder.folder(FOLDER) as folder:
            for line in folder.lines(f"{self._name}.log", _MOST):
                if run.config.eval.tasks and not answer and line.startswith(_ANSWER):
                    answer = line
        for score in json.loads(answer or b'{"scores":[]}')["scores"]:
            values = {f"eval/{name}": value for name, value in score.pop("values").items()}
            run.record.tracker.log_event(self._judged or 0, EVALUATION, score | values)
        return line.decode(errors="replace").strip()


def _python() -> list[str]:
    """The words that begin a command of this interpreter with its modules."""
    return ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable]
