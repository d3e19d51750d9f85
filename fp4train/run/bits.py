"""What the bits of a run depend on besides its configuration: threads, the kind of processor,
versions of libraries.

torch's products on CPUs divide their sums over the threads, and take other kernels on other
instruction sets; sums of floats depend on their order. All results are equally exact, and training
amplifies the differences: runs with one and with two threads differ after some steps as runs with
two seeds do. So a run goes on in every bit only where these are the same.

Operands that are rounded stochastically draw by counter (`quantize/random.py`). Only a model's own
operations, as dropout, read torch's generator, which every step seeds anew. On a CPU runs repeat to
the bit anyway. On a GPU three things do not by default: torch's operations that add by atomics, the
backward pass of flash attention, and cuBLAS, which may share one workspace between streams.
`train.deterministic=true` sets what PyTorch's notes on reproducibility and torchtitan
(distributed/utils.py) set. fp4train's own kernels need nothing: their only atomic is an integer
maximum.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fp4train.errors import UserError

if TYPE_CHECKING:
    from fp4train.run.run import Run

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


RANK_SPREAD = 0x9E3779B97F4A7C15
"""Distance between the dropout seeds of two ranks with other tokens: far more than there are steps."""
STAGE_SPREAD = 0xD1B54A32D192ED03
"""Distance between the dropout seeds of two stages of a pipeline."""
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""The values of `CUBLAS_WORKSPACE_CONFIG` with which cuBLAS repeats itself."""


def seed_model(run: Run) -> None:
    """Seed a model's own random numbers (dropout): they depend on the step and the rank's part of
    batch and model alone, so that a resumed run draws the same ones.
    """
    place = run.world.token_rank * RANK_SPREAD + run.world.stage * STAGE_SPREAD
    seed = (run.config.run.seed * 1_000_003 + run.step + place) % 2**63
    if run.device.type == "cpu":
        # torch.manual_seed seeds other devices, too; where one is not initialised it keeps the call
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def determinism(on: bool) -> Iterator[None]:
    """Inside, a run repeats to the bit on the same GPU, torch and number of ranks; afterwards all
    is as before.

    Attention takes the flash kernel, whose backward has a deterministic mode, or torch's plain one.
    An operation that has no deterministic form raises torch's error, which names it.

    Raises:
        UserError: cuBLAS runs already, or is told to use workspaces with which it does not repeat
            itself.
    """
    if not on:
        yield
        return
    if torch.cuda.is_available():
        _set_workspace()
    # torch types none of these.
    cuda: Any = torch.backends.cuda
    memory: Any = torch.utils.deterministic
    matmul = cuda.matmul
    saved_settings = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = memory.fill_uninitialized_memory
    benchmarks = torch.backends.cudnn.benchmark
    attention = cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    reduced = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_cudnn_sdp(False)
    matmul.allow_bf16_reduced_precision_reduction = (
        matmul.allow_fp16_reduced_precision_reduction
    ) = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(saved_settings[0], warn_only=saved_settings[1])
        memory.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = benchmarks
        cuda.enable_mem_efficient_sdp(attention[0])
        cuda.enable_cudnn_sdp(attention[1])
        (
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ) = reduced


def _set_workspace() -> None:
    """Tell cuBLAS, which reads the variable when it starts."""
    configured = os.environ.get(CUBLAS)
    if configured is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        os.environ[CUBLAS] = WORKSPACES[0]
    elif configured is None:
        raise UserError(
            "train.deterministic=true: the GPU is in use already; start the process with "
            f"{CUBLAS}={WORKSPACES[0]}"
        )
    elif configured not in WORKSPACES:
        raise UserError(
            f"train.deterministic=true: {CUBLAS}={configured} does not let cuBLAS repeat itself; "
            f"unset it, or set {' or '.join(WORKSPACES)}"
        )
