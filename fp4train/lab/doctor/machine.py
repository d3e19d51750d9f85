"""The parts of this machine that runs depend on, and what is wrong with them. Nothing here waits
for a network.
"""

import os
import shutil
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from fp4train.backends.emulate import widens
from fp4train.backends.te import availability
from fp4train.hardware import OLDEST_GPU, Device, driver_version, why_no_gpu
from fp4train.kernels import cpu
from fp4train.precision import compile_context
from fp4train.quantize import QuantSpec
from fp4train.quantize.triton import why_not as why_not_triton
from fp4train.run.host import cpu_name, package_version

NEEDED = (
    "hydra-core",
    "omegaconf",
    "PyYAML",
    "safetensors",
    "tokenizers",
    "datasets",
    "wandb",
    "matplotlib",
    "tqdm",
)
"""Packages that runs import, by the names that pip knows."""

LITTLE_DISK = 2 << 30
"""Bytes; the checkpoints of the default run take a hundredth, those of a model of 1 B parameters
six times as much.
"""


@dataclass(frozen=True)
class Fact:
    """One line about the machine.

    Args:
        name: "GPU", "torch", …
        value: description of what there is.
        problem: reason why the default run does not work, and what to do; None where it works.
        note: sentence about what something else than the default run lacks.
    """

    name: str
    value: str
    _: KW_ONLY
    problem: str | None = None
    note: str | None = None


def parts(folder: Path) -> list[Fact]:
    """Facts about all parts; `folder` is where runs would be written."""
    software = (_torch(), _transformer_engine(), _triton(), _packages())
    return [_gpu(), *_drivers(), *software, _cpu(), _threads(), _disk(folder), _wandb()]


def device() -> Device:
    """The default device."""
    return Device.of("cuda" if torch.cuda.is_available() else "cpu")


def _gpu() -> Fact:
    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory = f"{gpu.total_memory / 2**30:.0f} GiB"
            names.append(f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}")
        capability = torch.cuda.get_device_capability(0)
        problem = None
        if capability < OLDEST_GPU:
            have, least = (".".join(map(str, c)) for c in (capability, OLDEST_GPU))
            problem = (
                f"compute capability {have} has no BF16 products, which need {least}; use "
                "device=cpu"
            )
        same = len(set(names)) == 1 and len(names) > 1
        if same:
            value = f"{len(names)} × {names[0]}"
        else:
            value = "; ".join(names)
        return Fact("GPU", value, problem=problem)
    if driver_version() is None:
        return Fact("GPU", "none")
    return Fact("GPU", "torch sees none", note=why_no_gpu())


def _drivers() -> list[Fact]:
    """Driver, CUDA and cuBLAS, where any of them is."""
    cublas = next(
        (
            f"cuBLAS {v}"
            for n in ("nvidia-cublas", "nvidia-cublas-cu12")
            if (v := package_version(n))
        ),
        None,
    )
    if driver_version() is None and torch.version.cuda is None:
        return []
    words = (f"driver {driver_version() or 'none'}", f"CUDA {torch.version.cuda or 'none'}", cublas)
    return [Fact("CUDA", ", ".join(word for word in words if word))]


def _torch() -> Fact:
    compiled = compile_context.UNAVAILABLE
    if compiled is None:
        note = None
    else:
        note = f"train.compile=true runs linear layers outside of the graphs: {compiled}"
    return Fact("torch", torch.__version__, note=note)


def _transformer_engine() -> Fact:
    name = "Transformer Engine"
    version = availability.version()
    if version is None:
        return Fact(name, "not installed")
    value = ".".join(map(str, version))
    if not torch.cuda.is_available():
        return Fact(name, f"{value}, its recipe classes only: its kernels need an NVIDIA GPU")
    try:
        availability.pytorch_module()
    except ValueError as error:
        return Fact(name, value, note=str(error))
    return Fact(name, value)


def _triton() -> Fact:
    version = package_version("triton") or "not installed"
    if not torch.cuda.is_available():
        return Fact("Triton", f"{version}; its kernels need an NVIDIA GPU")
    return Fact("Triton", version, note=why_not_triton(QuantSpec(), "cuda"))


def _packages() -> Fact:
    missing = [name for name in NEEDED if package_version(name) is None]
    if not missing:
        return Fact("packages", "all that runs import")
    value = f"missing: {', '.join(missing)}"
    install = f"pip install {' '.join(missing)}"
    if missing == ["datasets"]:
        return Fact("packages", value, note=f"data=hf needs it: {install}")
    if set(missing) <= {"datasets", "wandb"}:
        install += ", or track=jsonl"
    return Fact("packages", value, problem=install)


def _cpu() -> Fact:
    model = cpu_name()
    if (reason := cpu.unavailable()) is not None:
        return Fact(
            "CPU",
            f"{model}; no C kernels",
            note=f"quantising takes many times as long: {reason}",
        )
    widened = widens(torch.empty(0, dtype=torch.bfloat16))
    if widened:
        bf16 = "no BF16 instructions: products in float32"
    else:
        bf16 = "BF16 instructions"
    return Fact("CPU", f"{model}; C kernels: {cpu.instruction_sets()[-1]}; {bf16}")


def _threads() -> Fact:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    if cpu.unavailable():
        pool = ""
    else:
        pool = f", C kernels on {cpu.thread_pool()}"
    if threads > cores:
        note = f"threads wait for each other: OMP_NUM_THREADS={cores}"
    else:
        note = None
    return Fact("threads", f"{threads} on {cores} cores{pool}", note=note)


def _disk(folder: Path) -> Fact:
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    value = f"{free / 2**30:.0f} GiB free in {folder}/"
    problem = None
    if not os.access(place, os.W_OK):
        problem = f"{place} cannot be written; set run.dir=FOLDER"
    elif free < LITTLE_DISK:
        problem = "less than 2 GiB for checkpoints; set run.dir=FOLDER elsewhere"
    return Fact("disk", value, problem=problem)


def _wandb() -> Fact:
    version = package_version("wandb")
    if version is None:
        return Fact("wandb", "not installed")
    try:
        import wandb

        from fp4train.track.wandb import logged_in

        settings = wandb.setup().settings
        if logged_in(settings):
            state = "logged in"
        else:
            state = "not logged in: runs are kept offline"
        if settings.mode in ("offline", "dryrun", "disabled"):
            state = f"{settings.mode} by its own settings"
    except Exception as error:  # any of wandb's
        return Fact("wandb", version, problem=f"wandb does not start ({error}); use track=jsonl")
    return Fact("wandb", f"{version}, {state}")
