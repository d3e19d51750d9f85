"""Weights & Biases: the keys of metrics.jsonl, the config, and the plan as a table.

Online where the user is logged in and the server answers, otherwise offline into RUN/wandb, to be
sent later with ``wandb sync``. Every wait is bounded: an unreachable server costs seconds at the
start and at the end, never the run.

wandb's own step counter cannot go back, as ours does after a resume; so ``step`` is logged as a
value and declared the x axis of every chart. RUN/wandb keeps id and project of the run, be they
ours, of its variables or of a sweep: by them a resumed run continues the same charts.
"""

import http.client
import logging
import netrc
import os
import secrets
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fp4train import files
from fp4train.track.statistics import Statistics
from fp4train.track.tracker import spreads
from fp4train.worker import within

_log = logging.getLogger(__name__)

CONSOLE = "console.log"
LOGS = "output.log"
"""RUN/console.log: what the run printed; the file of a run that the service shows as its logs."""
CONSOLE_LIMIT = 1 << 26
"""Bytes of it that are sent."""
FOLDER = "wandb"
RUN_ID = "run_id"
PROJECT = "project"
"""RUN/wandb/run_id: the run's id in its charts; RUN/wandb/project: ENTITY/PROJECT that has them."""
DEFAULT_PROJECT = "fp4train"
RESERVED = ":;,#?/'"
"""Characters that are in no id."""
PROBE_SECONDS = 2.0
ALERTS = ("divergence", "non-finite", "lost rank")
"""Events that wandb alerts its user to."""
ASKED_FOR = "asked for"
_LATER = "wandb is offline (%s); send the run later with:\n  wandb sync %s"
NOT_LOGGED_IN = "not logged in, see `wandb login`"


@dataclass(frozen=True, kw_only=True)
class Charts:
    """The charts of a run: its id, their project and entity; None: wandb chooses."""

    id: str | None = None
    project: str | None = None
    entity: str | None = None

    @classmethod
    def read(cls, folder: files.Folder) -> "Charts":
        """The charts that `write` kept; without a valid id, none."""
        run_id, place = (
            folder.read(name, 1000).decode("utf-8", "replace").strip()
            if folder.has_file(name)
            else ""
            for name in (RUN_ID, PROJECT)
        )
        if not run_id or not run_id.isprintable() or set(run_id) & set(RESERVED):
            return cls()
        entity, _, project = place.rpartition("/")
        return cls(id=run_id, project=project or None, entity=entity or None)

    def write(self, folder: files.Folder) -> None:
        folder.write(RUN_ID, f"{self.id}\n".encode())
        folder.write(PROJECT, f"{self.entity or ''}/{self.project}\n".encode())

    def wanted(self, kept: "Charts", settings: Any) -> "Charts":
        """The charts to be asked for: these, else those of the run so far, else those of wandb's
        settings. In a sweep wandb's own hold, and it takes no others.
        """
        if settings.sweep_id or settings.launch:
            return Charts()
        return Charts(
            id=kept.id or settings.run_id or secrets.token_hex(4),
            project=self.project or kept.project or settings.project or DEFAULT_PROJECT,
            entity=self.entity or kept.entity or settings.entity,
        )


class WandbTracker:
    """One wandb run; see `Tracker`.

    Args:
        run_dir: wandb writes below RUN/wandb.
        run_name: the run's name in the charts.
        config: the resolved configuration.
        offline: whether it stays offline without a try to go online.
        timeout: seconds to wait for the server at the start, and again for the upload at the end.
        resumed: whether it continues the run whose id is in the run directory.
        charts: project and entity that the user names.
        named: group and tags, as in `wandb.init`.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        offline: bool = False,
        timeout: float = 5.0,
        resumed: bool = False,
        charts: Charts = Charts(),
        **named: Any,
    ) -> None:
        import wandb

        self._timeout = timeout
        self._finished = False
        self._run_dir = run_dir
        with (
            files.Folder.open(run_dir, create=True) as run,
            run.folder(FOLDER, create=True) as folder,
        ):
            kept = Charts.read(folder) if resumed else Charts()
        settings = wandb.setup().settings
        if settings.mode == "disabled":
            raise RuntimeError("wandb is disabled in its own settings")
        charts = charts.wanted(kept, settings)
        start = partial(
            wandb.init,
            dir=str(run_dir),
            **vars(charts),
            resume="allow",
            name=None if kept.id or settings.run_name else run_name,
            config=dict(config),
            allow_val_change=True,
            settings=wandb.Settings(
                silent=True,
                console="off",  # capturing the output would fight with the progress bar
                reinit="create_new",
                init_timeout=timeout,
                finish_timeout=timeout,
                finish_timeout_raises=True,
            ),
            **named,
        )
        why_offline = _why_offline(settings, offline)
        self._run: Any = None
        if why_offline is None:
            try:
                self._run = start(mode="online")
                _log.info("wandb: %s", self._run.url)
            except Exception as error:  # any of wandb's, its server's and the network's
                why_offline = str(error).partition("\n")[0] or type(error).__name__
                _forget_failed(run_dir, charts.id or settings.run_id)
        if self._run is None:
            self._run = start(mode="offline")
            expected = why_offline in (ASKED_FOR, NOT_LOGGED_IN)
            level = logging.INFO if expected else logging.WARNING
            _log.log(level, _LATER, why_offline, self._local())
        self._run.define_metric("*", step_metric="step")
        self._keep(kept)

    def _keep(self, before: Charts) -> None:
        """Keep the charts that the run really has, where a resume finds them."""
        charts = Charts(id=self._run.id, project=self._run.project, entity=self._run.entity)
        if before.id not in (None, charts.id):
            text = "wandb: the sweep goes on as run %s, and leaves the charts of run %s"
            _log.warning(text, charts.id, before.id)
        with files.Folder.open(self._run_dir) as run, run.folder(FOLDER) as folder:
            charts.write(folder)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def log_event(self, step: int, event: str, values: Mapping[str, Any] | None = None) -> None:
        self._run.log({"step": step, "event": event, **(values or {})})
        if event in ALERTS:
            text = "; ".join(f"{key}: {value}" for key, value in (values or {}).items())
            self._run.alert(f"{event} in step {step}", text, level="ERROR")

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=[*columns], data=rows, allow_mixed_types=True)})

    def log_statistics(self, statistics: Statistics) -> None:
        """Histograms over layers and operands; the metrics have the summary."""
        import wandb

        drawn = {
            f"histogram/{name}": wandb.Histogram(values) for name, values in spreads(statistics)
        }
        self._run.log({"step": statistics.step, **drawn})

    def finish(self, exit_code: int = 0) -> None:
        if self._finished:
            return
        self._finished = True
        self._send_console()
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            message = (
                "wandb: not everything was uploaded within %g s; send the rest with:\n"
                "  wandb sync %s"
            )
            _log.warning(message, self._timeout, self._local())

    def _send_console(self) -> None:
        """Let the service have what the run printed, where its users look for it."""
        try:
            with files.Folder.open(self._run_dir) as folder:
                if not folder.has_file(CONSOLE):
                    return
                printed = folder.read(CONSOLE, CONSOLE_LIMIT)
            with files.Folder.open(Path(self._run.dir)) as sent:
                sent.write(LOGS, printed, sync=False)
        except OSError as error:
            _log.warning("wandb: %s is not sent: %s", CONSOLE, error)
            return
        self._run.save(str(Path(self._run.dir) / LOGS), base_path=self._run.dir, policy="now")

    def _local(self) -> Path:
        return Path(self._run.dir).parent


def _forget_failed(run_dir: Path, run_id: str | None) -> None:
    """End the service that keeps the id of a run which failed to start, and remove its folder."""
    import wandb

    with suppress(ConnectionError):  # a service that has died needs no end
        wandb.teardown()
    with suppress(OSError), files.Folder.open(run_dir) as run, run.folder(FOLDER) as folder:
        for failed in folder.names():
            if failed.startswith("run-") and failed.endswith(f"-{run_id}"):
                folder.remove_folder(failed)


def _why_offline(settings: Any, offline: bool) -> str | None:
    """None where an online run can be tried, otherwise the reason against it."""
    if offline or settings.mode in ("offline", "dryrun"):
        return ASKED_FOR
    if not logged_in(settings):
        return NOT_LOGGED_IN
    return _why_unreachable(settings.base_url)


def logged_in(settings: Any) -> bool:
    """A key in wandb's settings (its environment variables included) or in the netrc that `wandb
    login` writes.
    """
    if settings.api_key or settings.identity_token_file:
        return True
    if os.environ.get("NETRC"):
        files = [os.environ["NETRC"]]
    else:
        files = ["~/.netrc", "~/_netrc"]
    for file in files:
        try:
            entries = netrc.netrc(Path(file).expanduser())
        except (OSError, netrc.NetrcParseError):
            continue
        hosts = (urlsplit(settings.base_url).netloc, "api.wandb.ai")
        return any((entry := entries.authenticators(host)) and entry[2] for host in hosts)
    return False


def _why_unreachable(url: str) -> str | None:
    """Any HTTP answer counts. In a thread of its own, because looking up a name cannot be given a
    time limit.
    """

    def ask() -> str | None:
        try:
            request = urllib.request.Request(url.rstrip("/") + "/healthz", method="HEAD")
            with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
                return None
        except urllib.error.HTTPError as answer:
            answer.close()
            return None
        except (OSError, http.client.HTTPException) as error:
            return f"{url} is unreachable: {getattr(error, 'reason', error)}"

    late: str | None = f"{url} did not answer within {PROBE_SECONDS:g} s"
    return within(PROBE_SECONDS, ask, late)


def end_service() -> None:
    """Kill the processes that wandb started in this one: a stopped one would be waited for at exit,
    without end.
    """
    setup = sys.modules.get("wandb.sdk.wandb_setup")
    singleton = getattr(setup, "_singleton", None)
    process: Any = singleton
    # of wandb 0.31; where they are called otherwise, none is found
    for name in ("_connection", "_proc", "_process"):
        process = getattr(process, name, None)
    if process is not None and hasattr(process, "kill"):
        process.kill()
