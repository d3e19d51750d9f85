"""Ports at which the ranks of a job meet. A port is chosen here, and rank 0 listens at it a second
later: until then nobody else may take it.

A process owns a block of ports: it keeps the first one bound until it ends, so that no other
process owns the same block. The blocks are below those that the system hands out itself, to
connections and to listeners at port 0, gloo's among them, and below those of tests/distributed/
test_slurm.py's jobs (20,000 to 28,999). Only the process itself asks for ports: a fork that asked
would go through the same ports, from a copy of the process's iterator.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path

BLOCK = 50
"""Ports of a process, which follow each other: one that a job left is long free when it comes
again.
"""
FIRST_PORTS = range(10_000, 20_000, BLOCK)
"""The first ports of the blocks."""
SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port at which nothing listens, and that no other process of tests is given."""
    ports = own_ports()
    for _ in range(BLOCK):
        port = next(ports)
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise RuntimeError("something listens at each port of this process")


@cache
def own_ports() -> Iterator[int]:
    """The ports of this process, round and round."""
    for first in usable_blocks():
        owner = socket.socket()
        try:
            owner.bind(("127.0.0.1", first))
        except OSError:
            owner.close()
            continue
        owner.detach()  # stays bound until this process has ended, and all forks of it
        return cycle(range(first + 1, first + BLOCK))
    raise RuntimeError("something listens in each block of ports")


def usable_blocks() -> list[int]:
    """The first ports of the blocks that the system hands out none of; all where it may hand out
    any.
    """
    try:
        least, most = (int(word) for word in SYSTEM_PORTS.read_text().split())
    except OSError:  # not Linux
        least, most = 32_768, 65_535
    outside = [first for first in FIRST_PORTS if first + BLOCK <= least or first > most]
    return outside or list(FIRST_PORTS)
