"""The bytes and seconds of collectives on the links between ranks (`hardware.py`).

A link has two speeds: NVLink inside of a domain, the network between domains. Speeds are bytes/s
per GPU and direction.

    gather, scatter    (g−1)/g · bytes over NVLink; between n domains (n−1)/n · bytes over the
                       network, shared by the group's members in one domain, each with its own
                       adapter; the slower of the two
    exchange           each rank sends its own bytes, an equal part to each rank: (m−1)/g of them
                       over NVLink, m being the members in its domain, (g−m)/g over its adapter
    all-reduce         a scatter and a gather
    latency            LATENCY · log2(g)
"""

import math
from collections.abc import Sequence

from fp4train.hardware import Gpu
from fp4train.parallel.config import Mesh

NVLINK_SHARE = 0.80
"""Share of NVLink's speed that large collectives reach: nccl-tests on DGX H100, about 360 of 450
GB/s."""

NETWORK_SHARE = 0.85
"""Share of the network's speed that large collectives reach: assumed, a little below the 0.9 and
more of nccl-tests on a network without other traffic."""

LATENCY = 5e-6
"""Seconds per doubling of the group: assumed, near what nccl-tests prints for 8-byte all-reduces
(15 to 50 µs)."""

_NEARER = {
    "tensor": (),
    "context": ("tensor",),
    "expert": ("tensor",),
    "weight_ranks": ("tensor",),
    "expert_holders": ("tensor", "expert"),
    "replicate": ("tensor", "context", "shard"),
    "pipeline": ("tensor", "context", "shard", "replicate"),
}
"""Kind of ranks → the kinds within which its neighbours lie; those in the first differ by 1."""


class Collectives:
    """What the ranks of one kind send each other, per step and rank; at first nothing.

    Args:
        name: its name in tables.
        kind: one of the kinds in `_NEARER`; NVLink domains hold equal parts of these ranks.
    """

    def __init__(self, name: str, kind: str, mesh: Mesh, gpu: Gpu) -> None:
        self.name = name
        self.gpu = gpu
        self.size: int = getattr(mesh, kind)
        """Number of ranks."""
        stride = math.prod(getattr(mesh, nearer) for nearer in _NEARER[kind])
        nearest = min(self.size, max(1, gpu.domain // stride))
        self.near = next(n for n in range(nearest, 0, -1) if self.size % n == 0)
        """Number of those of them in one NVLink domain."""
        self.sent = 0.0
        """Bytes that the rank sends."""
        self.seconds = 0.0
        """Seconds of the collectives alone."""
        self.exposed = 0.0
        """Seconds that no computation hides."""

    @property
    def link(self) -> str:
        """The fabric of a domain, or "network" if the group spans several."""
        return self.gpu.fabric if self.near == self.size else "network"

    def alone(self, size: float) -> float:
        """Seconds of gathering, or of reducing and scattering, a tensor of `size` bytes."""
        within = self._share(size) / (self.gpu.nvlink * NVLINK_SHARE)
        domains = self.size // self.near
        between = (domains - 1) / domains * size / (self.near * self.gpu.network * NETWORK_SHARE)
        return max(within, between) + LATENCY * math.log2(self.size)

    def add(self, times: float, sizes: Sequence[float], hides: float = 0.0) -> float:
        """Add `times` such series of gathers or scatters, each of tensors of `sizes` bytes beside a
        computation of `hides` seconds; returns the seconds of it that are left.
        """
        seconds = sum(map(self.alone, sizes))
        self.sent += times * sum(map(self._share, sizes))
        self.seconds += times * seconds
        self.exposed += times * max(0.0, seconds - hides)
        return max(0.0, hides - seconds)

    def _share(self, size: float) -> float:
        """Bytes that a rank sends of a tensor of `size` bytes: all but its own part."""
        return (self.size - 1) / self.size * size


class Exchanges(Collectives):
    """Exchanges of tensors among the ranks of one kind."""

    def alone(self, size: float) -> float:
        """Seconds in which each rank sends its tensor of `size` bytes, in equal parts."""
        part = size / self.size
        within = (self.near - 1) * part / (self.gpu.nvlink * NVLINK_SHARE)
        between = (self.size - self.near) * part / (self.gpu.network * NETWORK_SHARE)
        return max(within, between) + LATENCY * math.log2(self.size)
