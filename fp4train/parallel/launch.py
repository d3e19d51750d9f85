"""Which rank this process is: what torchrun or Slurm put into its environment.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A task of `srun` has
SLURM_PROCID, SLURM_LOCALID and SLURM_STEP_NUM_TASKS (or SLURM_NTASKS); the first host of its node list leads, and its
port follows from the job's number. torchrun's variables win: `srun torchrun …` sets both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fp4train.errors import UserError

_OTHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec", "PMIX_RANK": "mpirun", "MPI_LOCALNRANKS": "mpirun"}
_FIRST_PORT, _PORTS = 20_000, 10_000


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among those of its run.

    Args:
        rank, size: among all; local_rank, local_size: among those of its machine.
        address, port: where rank 0 (or torchrun's agent) listens; None on one rank.
        attempt: how often torchrun has restarted the run.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str | None = None
    port: int = 0
    attempt: int = 0

    @property
    def lead(self) -> bool:
        return self.rank == 0


def find_place(environment: Mapping[str, str]) -> Place:
    """The place that a launcher gave this process; a world of one where none did.

    Raises:
        UserError: the variables contradict each other, one is missing, or the launcher is not one that is read.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    if "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        return _of_slurm(environment)
    for name, launcher in _OTHERS.items():
        if name in environment and environment.get(name) != "1" and "SLURM_JOB_ID" not in environment:
            raise UserError(
                f"{launcher} started this process ({name}={environment[name]}), and fp4train does not read its "
                "variables: each process would train the whole batch. Use torchrun or srun"
            )
    return Place()


def _of_torchrun(environment: Mapping[str, str]) -> Place:
    size = _number(environment, "WORLD_SIZE", least=1)
    rank = _number(environment, "RANK", below=size)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", least=1, default=size)
    local_rank = _number(environment, "LOCAL_RANK", below=local_size, default=rank % local_size)
    attempt = _number(environment, "TORCHELASTIC_RESTART_COUNT", default=0)
    if size == 1:
        return Place(attempt=attempt)
    address = environment.get("MASTER_ADDR")
    if not address:
        raise UserError(f"WORLD_SIZE={size}, but MASTER_ADDR is not set: start the ranks with torchrun or srun")
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=_number(environment, "MASTER_PORT", least=1, below=65_536),
        attempt=attempt,
    )


def _of_slurm(environment: Mapping[str, str]) -> Place:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size = _number(environment, tasks, least=1)
    rank = _number(environment, "SLURM_PROCID", below=size)
    if size == 1:
        return Place()
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UserError(f"{tasks}={size}, but neither MASTER_ADDR nor SLURM_NODELIST says which host leads")
    job = _number(environment, "SLURM_JOB_ID", default=0)
    # SLURM_TASKS_PER_NODE has forms like 4(x2),3: the count of this machine is not needed but for messages.
    local_size = re.match(
        r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    )
    local_rank = _number(environment, "SLURM_LOCALID", default=0)
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(local_rank + 1, int(local_size[0]) if local_size else 1),
        address=address,
        port=_number(environment, "MASTER_PORT", least=1, below=65_536, default=_FIRST_PORT + job % _PORTS),
        attempt=_number(environment, "SLURM_RESTART_COUNT", default=0),
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[07-12,20],login" → "gpu07"; "" of an empty one."""
    head = re.match(r"([^,\[\s]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes.strip())
    return "" if head is None else head[1] + (head[2] or "") + (head[3] or "")


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
        raise UserError(f"{name} is not set, though other variables of a launcher are: use torchrun or srun")
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < least or (below is not None and int(text) >= below):
        upto = "" if below is None else f" below {below}"
        raise UserError(f"{name}={text!r} must be a whole number from {least}{upto}: what started this process set it")
    return int(text)
