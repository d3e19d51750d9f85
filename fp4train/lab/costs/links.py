"""How ranks are linked, and the bytes and seconds of a collective.

A link has two speeds: NVLink inside of a domain, the network between domains. Speeds are bytes/s
per GPU and direction.

    gather, scatter    (g−1)/g · bytes over NVLink; between n domains (n−1)/n · bytes over the
                       network, shared by the group's members in one domain, each with its own
                       adapter; the slower of the two
    all-reduce         a scatter and a gather
    latency            LATENCY · log2(g), NVLink or network

Sources of the speeds: A100 DGX A100 data sheet (NVLink 3, 200 Gb/s); H100, H200 DGX H100 data sheet
(NVLink 4, ConnectX-7 400 Gb/s); B200 DGX B200 data sheet (NVLink 5, 400 Gb/s); GB200 NVL72 data
sheet (72 GPUs in a domain, ConnectX-7 400 Gb/s); B300 and GB300 data sheets (ConnectX-8, 800 Gb/s).
Data sheets print both directions together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fp4train.parallel.config import Mesh

NVLINK_SHARE: Final = 0.80
"""Share of NVLink's speed that large collectives reach: nccl-tests on DGX H100, about 360 of 450
GB/s."""

NETWORK_SHARE: Final = 0.85
"""Share of the network's speed that large collectives reach: assumed, a little below the 0.9 and
more of nccl-tests on a network without other traffic."""

LATENCY: Final = MappingProxyType({"NVLink": 3e-6, "network": 8e-6})
"""Seconds per doubling of the group: assumed, near what nccl-tests prints for 8-byte all-reduces
(15 to 50 µs)."""


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """The links of a cluster.

    Args:
        name: name of the machine.
        domain: GPUs that NVLink joins.
        nvlink, network: bytes/s per GPU and direction.
    """

    name: str
    domain: int
    nvlink: float
    network: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.domain} GPUs per NVLink domain at {self.nvlink / 1e9:.0f} GB/s, "
            f"network {self.network / 1e9:.0f} GB/s per GPU"
        )


def _links(name: str, domain: int, nvlink: float, network: float) -> Interconnect:
    return Interconnect(name=name, domain=domain, nvlink=nvlink * 1e9, network=network * 1e9)


INTERCONNECTS: Final = MappingProxyType(
    {
        "A100": _links("DGX A100", 8, 300, 25),
        "A100-40GB": _links("DGX A100", 8, 300, 25),
        "H100": _links("DGX H100", 8, 450, 50),
        "H200": _links("DGX H100", 8, 450, 50),
        "B200": _links("DGX B200", 8, 900, 50),
        "GB200": _links("GB200 NVL72", 72, 900, 50),
        "B300": _links("DGX B300", 8, 900, 100),
        "GB300": _links("GB300 NVL72", 72, 900, 100),
    }
)
"""GPU → the links of the machine it is sold in."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends, and the seconds that it takes alone."""

    sent: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.seconds + other.seconds)


NOTHING_SENT: Final = Traffic()

_ORDER: Final = ("tensor", "context", "shard", "replicate", "pipeline")
"""Kinds of ranks; neighbours in the first differ by 1."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks of one collective.

    Args:
        size: number of ranks.
        near: those of them in one NVLink domain.
    """

    links: Interconnect
    size: int
    near: int

    @classmethod
    def of(cls, links: Interconnect, size: int, stride: int) -> Group:
        """`size` ranks whose numbers differ by `stride`, in domains that hold equal parts of
        them."""
        most = max(1, links.domain // stride)
        near = max(n for n in range(1, size + 1) if size % n == 0 and n <= most)
        return cls(links=links, size=size, near=near)

    @classmethod
    def along(cls, mesh: Mesh, kind: str, links: Interconnect) -> Group:
        """The ranks of a mesh of one of the kinds in `_ORDER`."""
        nearer = _ORDER[: _ORDER.index(kind)]
        stride = math.prod(getattr(mesh, name) for name in nearer)
        return cls.of(links, getattr(mesh, kind), stride)

    @property
    def link(self) -> str:
        """ "NVLink", or "network" if the group spans domains."""
        if self.near == self.size:
            return "NVLink"
        return "network"

    @property
    def _speeds(self) -> Mapping[str, float]:
        """Link → bytes/s that large collectives reach on it."""
        return {
            "NVLink": self.links.nvlink * NVLINK_SHARE,
            "network": self.links.network * NETWORK_SHARE,
        }

    def gather(self, size: float) -> Traffic:
        """Traffic of gathering, or of reducing and scattering, a tensor of `size` bytes."""
        if self.size == 1:
            return NOTHING_SENT
        sent = (self.size - 1) / self.size * size
        within = sent / self._speeds["NVLink"] if self.near > 1 else 0.0
        domains = self.size // self.near
        between = (domains - 1) / domains * size / (self.near * self._speeds["network"])
        latency = LATENCY[self.link] * math.log2(self.size)
        return Traffic(sent, max(within, between) + latency)

    def reduce(self, size: float) -> Traffic:
        """Traffic of an all-reduce of `size` bytes."""
        return self.gather(size) + self.gather(size)

    def send(self, size: float) -> Traffic:
        """Traffic of sending `size` bytes to the neighbour farthest away."""
        return Traffic(size, size / self._speeds[self.link] + LATENCY[self.link])


@dataclass(kw_only=True)
class Collective:
    """One kind of communication, per step and rank.

    Args:
        link: "NVLink" or "network".
        sent: bytes that the rank sends.
        seconds: seconds of the collectives alone.
        exposed: seconds that no computation hides.
    """

    name: str
    link: str
    sent: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def add(self, times: float, traffic: Traffic, exposed: float) -> None:
        """Add `times` collectives; `exposed`: seconds of each that no computation hides, if above
        0."""
        self.sent += times * traffic.sent
        self.seconds += times * traffic.seconds
        self.exposed += times * max(0.0, exposed)
