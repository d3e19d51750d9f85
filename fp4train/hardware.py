"""GPUs: published peak rates, memory and links, for the cost model and for MFU; the device of a
layer; errors of memory.

Rates are dense (no 2:4 sparsity; data sheets print twice as much), in FLOP/s of one GPU. The shares
of them that kernels reach are not published: hardware.yaml says what each is calibrated to. Sources
of the other figures:

A100       NVIDIA A100 data sheet (SXM, 80 and 40 GB); L2: Ampere architecture white paper.
H100       NVIDIA H100 data sheet (SXM, 80 GB); L2: Hopper architecture white paper.
H200       NVIDIA H200 data sheet (SXM): H100's compute with other memory.
B200       NVIDIA Blackwell data sheet, "HGX B200", per GPU at 1000 W; L2 as the driver reports it (129,536 KiB).
GB200      NVIDIA Blackwell data sheet, "GB200 NVL72", per GPU at 1200 W.
B300       NVIDIA Blackwell Ultra data sheet, "HGX B300". FP4: 15 PFLOP/s dense, as NVIDIA gives
           for the chip ("Inside NVIDIA Blackwell Ultra", 2025); the data sheets of HGX boards say
           13 to 14. FP8 and BF16 did not grow over B200, so FP4 is 3.3 times FP8 here where it is
           twice FP8 on B200.
GB300      NVIDIA GB300 NVL72 data sheet, per GPU at 1400 W.
RTX-5090, RTX-5080
           NVIDIA's figures as hmc-tech.com and lamonoai/gpumap on GitHub list them. FP4 is half of
           the 3352 and 1801 TOPS with sparsity; FP8, FP16 and BF16 are with FP32 accumulation, which
           halves them.
RTX-PRO-6000
           NVIDIA's figures of the Workstation Edition as hmc-tech.com lists them. No source states an
           FP6 rate of RTX GPUs.
MI300X     AMD's brochure, as torch quotes it (torch/_inductor/analysis/device_info.py); L2 of all
           Instinct GPUs: rocm.docs.amd.com, "AMD GPU specifications".
MI325X     MI300X's compute with other memory.
MI350X     AMD's brochure, as torch quotes it; FP4 and FP6 at twice the FP8 rate, which gives the 9.2
           and 10.1 PFLOP/s of AMD's specifications.
MI355X     MI350X at 2.4 instead of 2.2 GHz.

Links are those of the machine that a GPU is sold in, of which data sheets print both directions
together: DGX A100 (NVLink 3, 200 Gb/s); DGX H100 (NVLink 4, ConnectX-7 400 Gb/s); DGX B200 (NVLink
5, 400 Gb/s); GB200 NVL72 (72 GPUs that NVLink joins, ConnectX-7 400 Gb/s); B300 and GB300
(ConnectX-8, 800 Gb/s); RTX GPUs (PCIe 5.0 x16); Instinct platforms (8 GPUs, each joined to each by a
link of Infinity Fabric of 128, from MI350X on 153.6 GB/s).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from fp4train.text import first_line, near_miss

OLDEST_GPU = (8, 0)
"""Compute capability from which on GPUs multiply BF16."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Args:
        name: name on the command line.
        peaks: dense FLOP/s by rate: FP4, FP6, FP8, FP16, BF16, TF32, FP32 (FP32 without tensor
            cores). A missing rate is a format that the GPU does not multiply.
        bandwidth: bandwidth of the memory, bytes/s (reads and writes together).
        capacity: capacity of the memory, bytes.
        l2: capacity of the level-2 cache, bytes.
        capability: compute capability; None: it is not NVIDIA's.
        pattern: regular expression that matches `torch.cuda.get_device_name()` of this GPU and no
            other.
        machine: machine that it is sold in.
        domain: number of GPUs that NVLink, or what stands for it (`fabric`), joins.
        nvlink, network: bandwidth per GPU and direction, bytes/s.
        gemm_share: share of the peak that a large GEMM reaches, by rate; "others": that of the
            rates without an entry.
        sustained: rate of products in training over that of a short benchmark.
        quantise_share: share of the bandwidth that Transformer Engine's quantising kernels reach in
            a step.
    """

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    capacity: float
    l2: float
    capability: tuple[int, int] | None
    pattern: str = field(repr=False)
    machine: str
    domain: int
    nvlink: float
    network: float
    gemm_share: Mapping[str, float]
    sustained: float
    quantise_share: float
    fabric: str = "NVLink"

    def __str__(self) -> str:
        return self.name


_UNITS = {"bandwidth": 1e9, "capacity": 1e9, "l2": 1e6, "nvlink": 1e9, "network": 1e9}
"""Field → what its number in hardware.yaml is multiplied by."""


def _gpu(name: str, row: Mapping[str, Any]) -> Gpu:
    """An entry of hardware.yaml."""
    peaks = {rate: tflops * 1e12 for rate, tflops in row["peaks"].items()}
    sizes = {key: row[key] * unit for key, unit in _UNITS.items()}
    capability = row["capability"] and tuple(row["capability"])
    return Gpu(name=name, **{**row, **sizes, "peaks": peaks, "capability": capability})


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs of hardware.yaml, in its order."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return tuple(_gpu(name, row) for name, row in table.items())


def find_gpu(name: str) -> Gpu:
    """The GPU a user means by `name` ("B200", "b200", "NVIDIA H200", "h100-sxm").

    Raises:
        ValueError: there is no such GPU in the table; the message lists the known ones and the
            nearest name.
    """
    word = re.sub(r"^nvidia[\s_-]*|[\s_-]*sxm\d?", "", name.strip(), flags=re.IGNORECASE)
    table_name = re.sub("[ _]", "-", word.upper())
    names = [gpu.name for gpu in gpus()]
    by_name = dict(zip(names, gpus(), strict=True))
    by_name["A100-80GB"] = by_name["A100"]
    gpu = by_name.get(table_name) or detect(name)
    if gpu is not None:
        return gpu
    raise ValueError(
        f"gpu={name!r} is not a GPU whose peak rates are known{near_miss(table_name, names)} "
        f"(known: {', '.join(names)})"
    )


def detect(device_name: str) -> Gpu | None:
    """The GPU that `torch.cuda.get_device_name()` names, or None.

    PCIe and NVL cards have other clocks and memory than the SXM modules of the same name, and a MIG
    slice is a part of a GPU. They give None, so that no utilisation is reported against a wrong
    peak.
    """
    word = re.sub(r"^(nvidia|tesla)\s+", "", device_name.strip(), flags=re.IGNORECASE)
    return next(
        (gpu for gpu in gpus() if re.fullmatch(gpu.pattern, word, flags=re.IGNORECASE)), None
    )


def peak_flops(gpu: Gpu, rate: str | None) -> float:
    """Dense peak of `gpu` in FLOP/s of products of a rate (`fp4train.formats.product_rate`).

    What the GPU does not multiply (None: no GPU does) is emulated in BF16, whose peak utilisation
    then refers to.
    """
    if rate is None:
        return gpu.peaks["BF16"]
    return gpu.peaks.get(rate, gpu.peaks["BF16"])


@dataclass(frozen=True, kw_only=True)
class Device:
    """The properties of a layer's device that the choice of a backend depends on.

    Args:
        type: device type of torch: "cpu", "cuda", "meta", …
        name: name of the GPU; empty for other devices.
        capability: compute capability of a CUDA device, else None.
        here: whether it is in this machine; False for a GPU that is planned for.
    """

    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    here: bool = True

    def __str__(self) -> str:
        return self.name or self.type

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """The device of this machine that torch calls `device`; its capability is queried once."""
        return _present(torch.device(device))

    @classmethod
    def elsewhere(cls, gpu: Gpu) -> Device:
        """`gpu` in another machine."""
        return cls(type="cuda", name=gpu.name, capability=gpu.capability, here=False)


@functools.cache
def _present(device: torch.device) -> Device:
    if device.type != "cuda" or not torch.cuda.is_available():
        return Device(type=device.type)
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    return Device(type="cuda", name=name, capability=capability)


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver; None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"\b(\d{3}\.[\d.]+)", text)
    return version[1] if version else "unknown"


def why_no_gpu() -> str:
    """Why torch sees no GPU where there is a driver (`driver_version`)."""
    if torch.version.cuda is None:
        return "a driver is here, and this torch is built for CPUs: install a CUDA build of torch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # torch and CUDA raise several types
            return f"a driver is here, and CUDA does not start ({first_line(error)})"
    return "a driver is here, and no GPU is given to this process (CUDA_VISIBLE_DEVICES?)"


def stored_bytes(bits: int, block: float = 32) -> float:
    """Bytes of an element of so many bits with its share of a one-byte block scale: of 4 bits in
    blocks of 16 it is 0.5625; of more than 8 bits it has no scale.
    """
    return bits / 8 + (1 / block if bits <= 8 else 0)


def memory_asked(error: BaseException) -> str | None:
    """How much memory was asked for, in torch's words or ours, if that is what `error` is about."""
    text = next(iter(str(error).splitlines()), "")
    if (
        not isinstance(error, torch.OutOfMemoryError | MemoryError)
        and "can't allocate memory" not in text
    ):
        return None
    if request := re.search(r"you tried to allocate (\d+) bytes", text):
        return f"{int(request[1]) / 2**30:,.1f} GiB were asked for"
    return text.rstrip(".") or "no more can be had"
