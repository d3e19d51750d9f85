"""How the ranks of a run begin and end together: which rank this process is, and where they meet.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A task of
`srun` has SLURM_PROCID, SLURM_LOCALID and SLURM_STEP_NUM_TASKS (or SLURM_NTASKS); the first host of
its node list leads, and its port follows from the job's number. torchrun's variables win: `srun
torchrun …` sets both.

The ranks meet at a store, kept by torchrun's agent or by rank 0. Each says that it is there, and
the others wait for it, for a time: one that does not come is named. A rank that fails leaves its
word and its exit code. A thread of every other rank hears it and ends that rank with the same code,
whatever it waits for. Ranks that lose others without a word count who is left, and name who is not.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn

from torch.distributed import DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from fp4train.errors import LostError, UserError
from fp4train.parallel.attendance import BEAT_SECONDS, Attendance
from fp4train.parallel.rendezvous import PREFIX, Round
from fp4train.worker import within

_OTHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "PMIX_RANK": "mpirun",
    "MPI_LOCALNRANKS": "mpirun",
}
_FIRST_PORT = 20_000
_PORTS = 10_000


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """This process among those of its run.

    Args:
        rank, size: among all; local_rank, local_size: among those of its machine.
        address, port: the place at which rank 0 (or torchrun's agent) listens; None on one rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    port: int = 0

    @property
    def lead(self) -> bool:
        return self.rank == 0


def find_place(environment: Mapping[str, str]) -> ProcessRank:
    """The place that a launcher gave this process; a world of one where none did.

    Raises:
        UserError: the variables contradict each other, one is missing, or the launcher is not one
            that is read.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _of_slurm(environment)
    for name, launcher in _OTHERS.items():
        if (
            name in environment
            and environment.get(name) != "1"
            and "SLURM_JOB_ID" not in environment
        ):
            raise UserError(
                f"{launcher} started this process ({name}={environment[name]}), and fp4train "
                "does not read its "
                "variables: each process would train the whole batch. Use torchrun or srun"
            )
    return ProcessRank()


def _of_torchrun(environment: Mapping[str, str]) -> ProcessRank:
    size = _number(environment, "WORLD_SIZE", least=1)
    rank = _number(environment, "RANK", below=size)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", least=1, default=size)
    local_rank = _number(environment, "LOCAL_RANK", below=local_size, default=rank % local_size)
    if size == 1:
        return ProcessRank()
    address = environment.get("MASTER_ADDR")
    if not address:
        raise UserError(
            f"WORLD_SIZE={size}, but MASTER_ADDR is not set: start the ranks with torchrun or srun"
        )
    return ProcessRank(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=_number(environment, "MASTER_PORT", least=1, below=65_536),
    )


def _of_slurm(environment: Mapping[str, str]) -> ProcessRank:
    if "SLURM_STEP_NUM_TASKS" in environment:
        tasks = "SLURM_STEP_NUM_TASKS"
    else:
        tasks = "SLURM_NTASKS"
    size = _number(environment, tasks, least=1)
    rank = _number(environment, "SLURM_PROCID", below=size)
    if size == 1:
        return ProcessRank()
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UserError(
            f"{tasks}={size}, but neither MASTER_ADDR nor SLURM_NODELIST says which host leads"
        )
    job = _number(environment, "SLURM_JOB_ID", default=0)
    # SLURM_TASKS_PER_NODE has forms like 4(x2),3: the count of this machine is not needed but for
    # messages.
    local_size = re.match(
        r"\d+",
        environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "")),
    )
    local_rank = _number(environment, "SLURM_LOCALID", default=0)
    return ProcessRank(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(local_rank + 1, int(local_size[0]) if local_size else 1),
        address=address,
        port=_number(
            environment, "MASTER_PORT", least=1, below=65_536, default=_FIRST_PORT + job % _PORTS
        ),
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[07-12,20],login" → "gpu07"; "" of an empty one."""
    head = re.match(r"([^,\[\s]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes.strip())
    if head is None:
        return ""
    return head[1] + (head[2] or "") + (head[3] or "")


def _number(
    environment: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    below: int | None = None,
    default: int | None = None,
) -> int:
    text = environment.get(name)
    if text is None:
        if default is not None:
            return default
        raise UserError(
            f"{name} is not set, though other variables of a launcher are: use torchrun or srun"
        )
    if (
        not re.fullmatch(r"\d{1,18}", text)
        or int(text) < least
        or (below is not None and int(text) >= below)
    ):
        upto = "" if below is None else f" below {below}"
        raise UserError(
            f"{name}={text!r} must be a whole number from {least}{upto}: what started this "
            "process set it"
        )
    return int(text)


PATIENCE = 300.0
"""Seconds that ranks wait for each other before they meet, if `parallel.timeout` is not shorter."""
GRACE = 4.0
"""Seconds in which ranks that lose another one tell each other so."""
_UNWINDING = 10.0
"""Seconds that a rank has to end by itself after another one gave its word."""
_LOOK_SECONDS = 0.1
"""Between two looks at who is still missing."""
_HEARD = 0.5
"""Seconds after which all ranks have heard a word."""
_WORD = "word"


class Meeting:
    """The store, as one rank sees it.

    Args:
        store: whose keys this round alone reads.
        listening: another connection to it: one that waits for a key answers nothing else.
        hosts: names of the ranks' hosts, if they have met.
        keeps: whether the store ends with this rank.
    """

    def __init__(
        self, place: ProcessRank, store: Any, listening: Any, hosts: list[str], *, keeps: bool
    ) -> None:
        self.place = place
        self.store = store
        self.hosts = hosts
        self.keeps = keeps
        self.first_word: str | None = None
        """The first word that a rank gave: its exit code and what it said."""
        self._own: str | None = None
        self._waited = 0
        self._listener = Thread(target=self._listen, args=(listening,), daemon=True)
        self._listener.start()

    @classmethod
    def join(cls, place: ProcessRank, timeout: float) -> Meeting:
        """Meet the other ranks.

        Args:
            timeout: seconds that later calls of the store may take.

        Raises:
            LostError: a rank does not come within `PATIENCE`, or `timeout`.
        """
        # torchrun's agent keeps the store itself; elsewhere rank 0 does
        keeps = place.lead and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        patience = min(timeout, PATIENCE)
        where = f"{place.address}:{place.port}"
        address = str(place.address)
        bound = timedelta(seconds=patience)
        try:
            stores = [
                PrefixStore(
                    PREFIX,
                    TCPStore(address, place.port, None, own_store, bound, wait_for_workers=False),
                )
                for own_store in (keeps, False, False)
            ]
        except RuntimeError as error:
            text = (
                f"rank {place.rank} of {place.size} does not reach rank 0 at {where} within "
                f"{patience:g} s: {error}"
            )
            speaks = place.rank == 1 or place.local_rank == 0
            raise LostError(text.splitlines()[0], speaks=speaks) from error
        this_round = Round(place.rank, place.size, stores[0])
        problem = None
        hosts: list[str] = []
        try:
            hosts = this_round.meet(patience)
        except RuntimeError as error:
            problem = error
        own, listening, signs = (PrefixStore(this_round.name or "unmet", store) for store in stores)
        meeting = cls(place, own, listening, hosts, keeps=keeps)
        if problem is not None:
            absent = meeting.named(within(GRACE, this_round.absent, [0]))
            text = (
                f"{absent} did not come to {where} within {patience:g} s: not started, or ended "
                "before the ranks met"
            )
            raise LostError(text, speaks=meeting.announce(LostError.exit_code, text)) from problem
        own.set_timeout(timedelta(seconds=timeout))
        Attendance.sign(signs, place.rank, 0)
        Attendance(place.rank, place.size, signs, meeting.named, timeout).start()
        return meeting

    def announce(self, code: int, word: str) -> bool:
        """Leave why this rank ends for the others; whether it is the first to do so, whose word is
        to be printed.
        """
        self._own = f"{code} {word}"
        first_store = within(
            GRACE, lambda: str(self.store.compare_set(_WORD, "", self._own).decode()), None
        )
        if (
            first_store is None
        ):  # the store is gone, and rank 0 with it: one rank per machine speaks
            self._listener.join(GRACE)
            return self.first_word is None and (self.place.rank == 1 or self.place.local_rank == 0)
        self.first_word = first_store
        return first_store == self._own

    @property
    def code(self) -> int:
        """The exit code of the first word; 0: none was heard."""
        if self.first_word is None:
            return 0
        return int(self.first_word.partition(" ")[0])

    def lost(self) -> str | None:
        """The names of the ranks that are not there any more, "" if all are; None: one of them gave
        a word.
        """
        if self.first_word is not None:
            return None
        keeper: list[int] | None = [0]  # a store that does not answer is that of rank 0
        silent = within(2 * GRACE, self._silent, keeper)
        if silent is None or self.first_word is not None:
            return None
        return self.named(silent)

    def wait_for_all(self, timeout: float) -> None:
        """Wait until all ranks have called this as often, however long that takes.

        Args:
            timeout: seconds without a sign of a rank, after which it is lost; not less than a few
                signs.

        Raises:
            LostError: one gives no sign.
        """
        self._waited += 1
        what = f"waited/{self._waited}"
        self.store.set(f"{what}/{self.place.rank}", "")
        patience = max(timeout, 3 * BEAT_SECONDS)
        signs: dict[int, bytes] = {}
        heard_at: dict[int, float] = {}
        while missing := self._without(what):
            for rank in missing:
                sign = self.store.get(f"sign/{rank}")
                if signs.get(rank) != sign:
                    signs[rank] = sign
                    heard_at[rank] = time.monotonic()
            silent = [rank for rank in missing if time.monotonic() - heard_at[rank] > patience]
            if silent:
                raise LostError(
                    f"{self.named(silent)} gave no sign for {patience:g} s while others waited for "
                    "the data: killed, stopped, or its machine cannot be reached"
                )
            time.sleep(_LOOK_SECONDS)

    def leave(self, code: int) -> NoReturn:
        """End this process; if the store ends with it, when the others have heard a word, or have
        ended.
        """
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if self.keeps:
            time.sleep(_HEARD if code else _HEARD / 5)
        os._exit(code)

    def _silent(self) -> list[int] | None:
        """The ranks that do not say that they lost one; None: a word was given."""
        self.store.set(f"lost/{self.place.rank}", "")
        with suppress(DistStoreError):  # no word in that time
            self.store.wait([_WORD], timedelta(seconds=GRACE))
            self.first_word = self.store.get(_WORD).decode()
            return None
        return self._without("lost")

    def _without(self, what: str) -> list[int]:
        return [rank for rank in range(self.place.size) if not self.store.check([f"{what}/{rank}"])]

    def named(self, ranks: list[int]) -> str:
        """ "rank 3 on gpu07", "ranks 1, 2, 3, 4 and 12 others"."""
        if len(ranks) == 1:
            return f"rank {ranks[0]}" + (f" on {self.hosts[ranks[0]]}" if self.hosts else "")
        if len(ranks) > 4:
            more = f" and {len(ranks) - 4} others"
        else:
            more = ""
        if ranks:
            return f"ranks {', '.join(map(str, ranks[:4]))}{more}"
        return ""

    def _listen(self, listening: Any) -> None:
        with suppress(RuntimeError):  # of a store that is gone
            listening.wait([_WORD], timedelta(days=365))
            self.first_word = listening.get(_WORD).decode()
            if self.first_word != self._own:
                time.sleep(_UNWINDING)
                self.leave(self.code)
