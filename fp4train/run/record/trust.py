"""Trust in a run directory: what its configuration names outside of it, its checkpoint, and its
records.

A configuration that names paths outside of its run, or whose run is tracked by a service, holds a
signature that only its user can make: HMAC-SHA256 over the run's identity and the configuration,
with 32 random bytes that are kept in $XDG_STATE_HOME/fp4train/key (~/.local/state/fp4train/key),
readable by the user alone, and made when they are first needed. A run directory that was made by
somebody else, on a machine with another home, or by hand cannot carry it. It says that this user
named these paths and destinations for this run; it says nothing about the rest of the directory.

A checkpoint and the records beside it must be of the same run, and as the checkpoint saw them.
"""

import errno
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fp4train import checkpoint
from fp4train.config import Config, plain, plugins
from fp4train.config.binding import destinations, hub_names, names_destinations, path_values
from fp4train.config.overrides import as_typed
from fp4train.data.template import KEPT as TEMPLATE
from fp4train.data.tokenizer_settings import KEPT as SETTINGS
from fp4train.data.tokenizers import BytePairs, Bytes, Pretrained
from fp4train.data.tokens import Piece, Tokenizer
from fp4train.errors import OlderForm, UserError, in_words, user_errors
from fp4train.files import Folder, write_all
from fp4train.keys import in_sections
from fp4train.paths import lies_in
from fp4train.run.record import directory as run_directory, journal
from fp4train.run.record.directory import CONFIG, HISTORY
from fp4train.run.record.generation import GENERATION
from fp4train.sealed import CONFIG_LIMIT, changed_since, config_parts
from fp4train.track import metrics
from fp4train.track.config import METRICS
from fp4train.track.statistics import LIMIT, STATISTICS
from fp4train.track.wandb import FOLDER as CHARTS, RUN_ID

_log = logging.getLogger(__name__)

KEY = "key"
_BYTES = 32
_OF_THE_COMMAND = ("run.dir", "resume")
"""Paths that are never taken from a saved configuration: a command says where it trains, and what
it goes on with.
"""


# -- the configuration -----------------------------------------------------------------------------


def config_text(cfg: DictConfig) -> str:
    """The resolved configuration in YAML.

    Raises:
        UserError: it is too long to be read again.
    """
    text = OmegaConf.to_yaml(cfg, resolve=True)
    if len(text) > CONFIG_LIMIT - 200:
        raise UserError(
            f"the configuration has {len(text):,} bytes, too many to be read again: shorten "
            "its longest list"
        )
    return text


def write_config(run: Path, cfg: DictConfig, body: str, identity: str) -> None:
    """Save `body`, the text of a configuration, with this user's signature where it names paths
    outside of the run, or a service tracks the run.
    """
    head = f"# fp4train run {identity} sha256 {hashlib.sha256(body.encode()).hexdigest()}"
    outside = {**_outside_paths(cfg, run), **_destinations(cfg)}
    if outside or _is_tracked_elsewhere(cfg):
        try:
            head += f" signed {_signature(identity, body.encode(), create=True)}"
        except OSError as error:
            names = ", ".join(outside)
            if outside:
                _log.warning(
                    "%s cannot be signed as yours (%s): a resume must name %s again",
                    run / CONFIG,
                    error,
                    names,
                )
    run_directory.write_text(run / CONFIG, f"{head}\n{body}")


def saved_with(
    saved: DictConfig, source: Path, step: int | None, paths: Mapping[str, str | None]
) -> DictConfig:
    """The configuration of the run in `source`, to open its checkpoint `step`; `check_paths` says
    whether the paths in it may be used.

    Args:
        saved: the run's configuration (`read_config`); it is changed.
        paths: full key → path, which the command line gives; the rest are those of the run's
            configuration.

    Raises:
        UserError: a key of `paths` is no path of it.
    """
    saved_paths = dict(path_values(plain(saved), Config))
    for key, path in paths.items():
        OmegaConf.update(saved, key, path, force_add=True)
    if strange := [
        key
        for key in paths
        if key not in {**saved_paths, **dict(path_values(plain(saved), Config))}
    ]:
        raise UserError(
            f"{strange[0]}={paths[strange[0]]}: {strange[0]} is no path in the configuration "
            f"of {source}"
        )
    saved.resume = str(source)
    saved.resume_step = step
    saved.run.dir = str(source)
    saved.run.overwrite = False
    saved.plugins = list(plugins.named())
    return saved


def check_paths(cfg: DictConfig, named: Iterable[str], *, sending: bool = False) -> None:
    """Refuse paths outside of the run `cfg.resume` that its configuration names and this user did
    not. A warning names what of the Hugging Face hub such a configuration may download.

    Args:
        cfg: the saved configuration of that run with a command's overrides.
        named: the keys, or sections, that the command line gives.
        sending: the command tracks a run, and so sends what it measures; where to is refused
            likewise.

    Raises:
        UserError: there are some; it says what the command line would have to name.
    """
    if not cfg.resume:
        return
    run = Path(str(cfg.resume))
    sections = tuple(named)

    def unnamed(
        values: Mapping[str, str] | Mapping[str, str | list[str]],
    ) -> dict[str, str | list[str]]:
        """Those whose keys the command line does not give."""
        return {key: value for key, value in values.items() if not in_sections(key, sections)}

    paths = unnamed(_outside_paths(cfg, run))
    places = unnamed(_destinations(cfg)) if sending else {}
    from_hub = unnamed(dict(hub_names(plain(cfg), Config)))
    if not (paths or places or from_hub) or (why := _why_foreign(run)) is None:
        return
    if outside := paths | places:
        named_again = " ".join(as_typed(key, value) for key, value in outside.items())
        raise UserError(
            f"{run / CONFIG} names paths, services or commands outside of the run and {why}; nothing was read, "
            f"written or sent there. Add what is right to the command: {named_again}"
        )
    listed = ", ".join(f"{key}={value}" for key, value in from_hub.items())
    _log.warning(
        "%s %s; it names what is downloaded from the Hugging Face hub: %s",
        run / CONFIG,
        why,
        listed,
    )


def forget_charts(cfg: DictConfig) -> None:
    """Remove the id by which a tracking service knows the run `cfg.resume`, if the run goes on in
    its own directory and this user did not write its configuration: with the id of another run its
    numbers would be added to that one's.
    """
    run = Path(str(cfg.resume)) if cfg.resume else None
    if (
        run is None
        or run.resolve() != Path(str(cfg.run.dir)).resolve()
        or not _is_tracked_elsewhere(cfg)
    ):
        return
    with Folder.open(run) as folder:
        if not folder.has_folder(CHARTS) or (why := _why_foreign(run)) is None:
            return
        with folder.folder(CHARTS) as charts:
            if charts.has_file(RUN_ID):
                charts.remove(RUN_ID)
                _log.warning("%s %s: its charts begin anew, under another id", run / CONFIG, why)


def own_tokenizer(config: Config, run: Path, anew: Callable[[str], object]) -> Tokenizer | None:
    """The tokenizer that a run was trained with, as the run keeps it; None: its data are token ids.
    Nothing is written to the run.

    Args:
        anew: called with the name of a file that the run has lost, before what its configuration
            names is read instead; raises what forbids that.

    Raises:
        UserError: it is lost, and would have to be trained anew.
    """

    def documents() -> Iterator[Piece]:
        raise UserError(
            f"{run} has lost its tokenizer.json: put it back; one that is trained anew may "
            "have other ids"
        )

    settings = getattr(config.data, "tokenizer", None)
    if settings is None:
        return None
    with Folder.open(run) as folder, tempfile.TemporaryDirectory() as aside:
        lost = [
            name
            for name in run_directory.TOKENIZER
            if name not in (TEMPLATE, SETTINGS, GENERATION) and not folder.has_file(name)
        ]
        if lost and not isinstance(settings, Bytes):
            anew(lost[0])
        ours = isinstance(settings, BytePairs | Pretrained)
        tokenizer: Tokenizer = settings.build(documents, Path(aside) if lost and ours else run)
        return tokenizer


def _outside_paths(cfg: DictConfig, run: Path) -> dict[str, str | list[str]]:
    """Full key → path, of the paths in a configuration that lie outside of the run directory `run`;
    a key that holds several, one of them outside, with all of them.
    """
    paths: dict[str, list[str]] = {}
    for key, path in path_values(plain(cfg), Config):
        if path not in paths.setdefault(key, []):
            paths[key].append(path)
    return {
        key: values[0] if len(values) == 1 else values
        for key, values in paths.items()
        if key not in _OF_THE_COMMAND and not all(lies_in(path, run) for path in values)
    }


def _destinations(cfg: DictConfig) -> dict[str, str]:
    """Full key → account or project of a service that the configuration sends to, other than its
    class's default.
    """
    return dict(destinations(plain(cfg), Config))


def _is_tracked_elsewhere(cfg: DictConfig) -> bool:
    """Whether the tracker of a configuration is one that sends what it gets."""
    return names_destinations(cfg.track.get("_target_"))


def _why_foreign(run: Path) -> str | None:
    """Why the configuration of a run counts as somebody else's; None: this user wrote it.

    Raises:
        UserError: it cannot be read.
    """
    sealed_identity, body = config_parts(run / CONFIG)
    if sealed_identity is None or sealed_identity[2] is None:
        return "has no signature: somebody else wrote it, or its first line was removed"
    try:
        same = hmac.compare_digest(_signature(sealed_identity[0], body), sealed_identity[2])
    except FileNotFoundError:  # nothing is signed on this machine yet
        same = False
    except OSError as error:
        return f"cannot be told to be yours ({in_words(error)})"
    if same:
        return None
    return "has the signature of another user or another machine"


def _signature(identity: str, body: bytes, *, create: bool = False) -> str:
    """The user's signature of a configuration; `create` makes the key where there is none.

    Raises:
        OSError: there is no key, it cannot be read or made, or others can read it.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    place = (
        Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state")) / "fp4train"
    )
    if not place.is_absolute():
        raise OSError(errno.ENOENT, "this user has no home directory", str(place))
    if create:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Folder.open(place) as folder:
        if create and folder.status(KEY) is None:
            _make_key(folder)
        key = folder.read(KEY, _BYTES)
        status = folder.status(KEY)
    if status is None or status.st_mode & 0o077 or len(key) != _BYTES:
        raise OSError(
            errno.EPERM, "it is damaged, or others can read it: remove it", str(place / KEY)
        )
    return hmac.new(key, f"fp4train run {identity}\n".encode() + body, "sha256").hexdigest()


def _make_key(folder: Folder) -> None:
    """A new key, whole or not at all; of several processes that make one the first wins."""
    temporary = f".{KEY}.{secrets.token_hex(8)}.tmp"
    descriptor = folder.descriptor_of(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        write_all(descriptor, secrets.token_bytes(_BYTES))
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, KEY, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
    finally:
        os.close(descriptor)
        folder.remove(temporary)


# -- a checkpoint and the records beside it --------------------------------------------------------


def identity_of(start: checkpoint.Checkpoint) -> str:
    """Identity of the run that a checkpoint belongs to, as `check_belongs` allows."""
    run: Any = start.state["run"]
    return str(run["id"])


def check_belongs(start: checkpoint.Checkpoint, source: Path, *, mend: bool) -> None:
    """Refuse a checkpoint that is not of the run in `source`, or was trained with other swaps than
    are on record.

    Args:
        mend: write the swaps that the journal has lost anew.

    Raises:
        UserError: it is another run's, or of an older form; the swaps differ, or are lost and not
            to be mended.
    """
    run_identity = run_directory.identity(source)
    if lacks := next(
        (
            key
            for key in ("run", "swaps", "history", "metrics", "divergence")
            if key not in start.state
        ),
        None,
    ):
        raise OlderForm(start.path, f"has no record of {lacks}")
    theirs = identity_of(start)
    if run_identity is not None and run_identity != theirs:
        raise UserError(
            f"{start.path} is a checkpoint of run {theirs}, not of the run in {source} "
            f"({run_identity}): another run left it "
            "there, or it was copied from one. Move it away, or resume the run that it belongs to"
        )
    metrics.check_form(source / METRICS)
    if run_identity is None:
        _log.warning("%s has lost its first line", source / CONFIG)
    with user_errors(
        LookupError, TypeError, ValueError, before=f"{start.path} holds no record of swaps: "
    ):
        _check_swaps(source, start.step, start.state, mend=mend)


def _check_swaps(run: Path, step: int, state: Mapping[str, Any], *, mend: bool) -> None:
    path = run / HISTORY
    trained = list(state["swaps"])
    for entry in trained:
        journal.check_entry(entry)
    records = journal.read_journal(run)
    recorded = journal.swaps(records)
    if recorded != trained:
        seen = state["history"]
        sums = {record.sum for record in records}
        if seen not in sums if seen else not sums:
            if not mend:
                at = [*trained, *recorded][0]["step"]
                raise UserError(
                    f"{path} lacks records, but {run} was swapped at step {at}: resume it in "
                    "place first"
                )
            _log.warning(
                "%s lacks records; its swaps are written anew from the checkpoint of step %d",
                path,
                step,
            )
            with Folder.open(run) as folder:
                mended = journal.Journal.read(folder, run_directory.identity(run))
                mended.set_swaps(trained, step)
                mended.write()
            return
    ran = [entry for entry in trained if entry["step"] < step]
    due = [entry for entry in recorded if entry["step"] < step]
    if ran != due:
        at = next(entry["step"] for entry in (*ran, *due) if entry not in ran or entry not in due)
        raise UserError(
            f"{path} is not what the checkpoint of step {step} was trained with (the swap at "
            f"step {at}): undo the "
            "change, or remove the file to go on with the swaps of the checkpoint"
        )


def lost_records(
    folder: Folder, state: Mapping[str, Any], records: Sequence[journal.Record]
) -> dict[str, str]:
    """The records in `folder`, but for the metrics, that are not as a checkpoint saw them: name → a
    sentence.

    Args:
        state: state of the checkpoint. records: lines of the journal.
    """
    lost = {}
    marks = state.get("metrics")
    if changed := changed_since(
        folder, STATISTICS, marks.get("statistics") if isinstance(marks, dict) else None, LIMIT
    ):
        lost[STATISTICS] = (
            f"{folder.path / STATISTICS} {changed} since the checkpoint: measured steps are missing"
        )
    if (last := state.get("history")) and last not in {record.sum for record in records}:
        lost[HISTORY] = (
            f"{folder.path / HISTORY} lacks records that the checkpoint saw: what ran is not "
            "all on record"
        )
    return lost
