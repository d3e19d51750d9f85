"""What the bits of a run depend on besides its configuration: threads, the kind of processor,
versions of libraries.

torch's products on CPUs divide their sums over the threads, and take other kernels on other
instruction sets; sums of floats depend on their order. All results are equally exact, and training
amplifies the differences: runs with one and with two threads differ after some steps as runs with
two seeds do. So a run goes on in every bit only where these are the same.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger(__name__)

_INSTRUCTIONS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "avx10_2", "sve", "bf16")
"""Capabilities beside the vector width that choose the kernels of products."""
_ON_CPUS = ("threads", "cpu", "instructions")
"""Keys of a run's environment (`host.environment`) that its bits on a CPU depend on."""
_LIBRARIES = (
    "torch",
    "numpy",
    "transformer_engine",
    "triton",
    "liger-kernel",
    "mamba-ssm",
    "causal-conv1d",
)


@contextmanager
def computing_threads(count: int | None) -> Iterator[None]:
    """Inside, torch computes with `count` threads on CPUs, as fp4train's own kernels do; None: with
    as many as it does anyway.
    """
    saved_count = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(saved_count)


def instructions() -> str:
    """The instruction set for which torch chooses its kernels on this CPU, such as "AVX512
    avx512_bf16 amx_bf16".
    """
    width: str = torch.backends.cpu.get_cpu_capability()
    capabilities = torch.cpu.get_capabilities()
    return " ".join((width, *(name for name in _INSTRUCTIONS if capabilities.get(name))))


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """What of two environments of one run makes its bits others, such as "threads 2 → 1". What one
    of the two does not say counts as equal.

    Args:
        on_cpu: the run computes on a CPU; on a GPU its threads and the host's CPU change nothing.
    """
    keys = ("device", *_ON_CPUS) if on_cpu else ("device",)
    pairs = [(key, saved.get(key), now.get(key)) for key in keys]
    old = saved.get("versions")
    new = now.get("versions")
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs += [(name, old.get(name), new.get(name)) for name in _LIBRARIES]
    return [
        f"{name} {a} → {b}" for name, a, b in pairs if a is not None and b is not None and a != b
    ]


def warn_of_other_bits(
    environments: Sequence[object], now: Mapping[str, Any], *, on_cpu: bool
) -> None:
    """Warn where what ran last had threads, a processor or libraries with which sums have another
    order.

    Args:
        environments: environments of the earlier starts (`host.environment`), as they are on
            record; the last that is one counts.
        now: the environment of this start.
        on_cpu: see `differences`.
    """
    ran_on = [values for values in environments if isinstance(values, dict)]
    if not ran_on:
        return
    changed = differences(ran_on[-1], now, on_cpu=on_cpu)
    if not changed:
        return
    cure = ""
    if any(difference.startswith("threads ") for difference in changed):
        cure = f"; train.threads={ran_on[-1].get('threads')} keeps the threads"
    _log.warning(
        "the run goes on, and not in the same bits as without a stop: %s%s",
        ", ".join(changed),
        cure,
    )
