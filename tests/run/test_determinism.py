"""The seeds of a model's own random numbers; train.deterministic: what torch is told for the time of a
run, and that CPUs compute the same bits with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import Cli, StopAt, losses
from families import TINY_RUNS, tiny_shape
from lengths import long_but
from pretended import Machine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp4train as f4
from fp4train.errors import UserError
from fp4train.models.llama import LlamaModel
from fp4train.precision import NVFP4
from fp4train.run.bits import CUBLAS, RANK_SPREAD, STAGE_SPREAD, determinism, seed_model


def settings() -> tuple[object, ...]:
    """All that the option sets."""
    cuda = torch.backends.cuda
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose GPU has not been used: torch/cuda/__init__.py `is_available` asks the driver,
    and sets no `_initialized`, which `is_initialized` returns.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv(CUBLAS, "to be restored")
    monkeypatch.delenv(CUBLAS)
    yield


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("step", "token_rank", "stage", "expected"),
    [
        (0, 0, 0, 7 * 1_000_003),
        (5, 0, 0, 7 * 1_000_003 + 5),
        (5, 3, 0, (7 * 1_000_003 + 5 + 3 * RANK_SPREAD) % 2**63),
        (5, 3, 1, (7 * 1_000_003 + 5 + 3 * RANK_SPREAD + STAGE_SPREAD) % 2**63),
    ],
)
def test_a_step_seeds_torchs_generator_by_its_number_and_the_rank(
    device: str, step: int, token_rank: int, stage: int, expected: int
) -> None:
    run: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(seed=7)),
        device=torch.device(device),
        step=step,
        world=SimpleNamespace(token_rank=token_rank, stage=stage),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(expected)
        state = torch.get_rng_state()
        torch.rand(3)
        seed_model(run)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_model_with_dropout_resumes_to_the_bit(
    cli: Cli, stop_at: StopAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = LlamaModel.enter

    def dropped(model: LlamaModel, tokens_BT: Tensor) -> Tensor:
        return torch.dropout(enter(model, tokens_BT), 0.2, model.training)

    options = ("train.steps=4", "checkpoint.every=2", "eval.every=2")
    cli.trained("run.name=plain", *options)
    monkeypatch.setattr(LlamaModel, "enter", dropped)
    assert cli("run.name=whole", *options).code == 0
    stop_at(3)
    assert cli("run.name=cut", *options).code == 137
    stop_at(-1)
    torch.rand(5)
    assert cli("resume=runs/cut").code == 0
    assert losses("runs/cut") == losses("runs/whole") != losses("runs/plain")


def test_torch_is_told_for_the_time_of_a_run_and_then_as_before() -> None:
    before = settings()
    with pytest.raises(RuntimeError, match="step"), determinism(True):
        assert settings() == (True, False, False, False, False, False, False, False)
        raise RuntimeError("of a step")
    assert settings() == before


def test_nothing_changes_unasked() -> None:
    before = settings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with determinism(False):
            assert torch.is_deterministic_algorithms_warn_only_enabled(), (
                "a user's own choice stays"
            )
        with determinism(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert settings() == before


@pytest.mark.usefixtures("gpu")
def test_cublas_is_told_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with determinism(True):
        assert os.environ[CUBLAS] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with determinism(True):  # the next run of a sweep
        assert os.environ[CUBLAS] == ":4096:8"


@pytest.mark.usefixtures("gpu")
def test_a_cublas_that_runs_already_or_is_told_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CUBLAS, ":0:0")
    with (
        pytest.raises(
            UserError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 .*unset it, or set :4096:8 or :16:8"
        ),
        determinism(True),
    ):
        pass
    monkeypatch.delenv(CUBLAS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    what = "in use already; start the process with CUBLAS_WORKSPACE_CONFIG=:4096:8"
    with pytest.raises(UserError, match=what), determinism(True):
        pass


RAISING = {
    "cumprod",
    "cumsum",
    "grid_sampler_2d_backward",
    "histc",
    "kthvalue",
    "max_unpool2d",
    "median",
    "nll_loss2d_forward",
    "put",
    "put_",
    "scatter_reduce",
    "upsample_bilinear2d_backward",
}
"""Operators that have no deterministic form for floats on a GPU (the table of
`torch.use_deterministic_algorithms`).
"""
SORTING = {
    "index_add",
    "index_add_",
    "index_put",
    "index_put_",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
}
"""Operators whose deterministic form is torch's index_put, which sorts and may read its indices on
the host.
"""


class Told(TorchDispatchMode):
    """The operators that were called while torch was told to be deterministic: their names and that
    of the dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        first = args[0] if args else None
        if (
            torch.are_deterministic_algorithms_enabled()
            and isinstance(first, Tensor)
            and first.is_floating_point()
        ):
            self.called.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", long_but(("llama", "moe"), TINY_RUNS))
def test_a_step_calls_nothing_that_a_gpu_refuses_or_a_graph_cannot_record(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose operators do not raise; what code chooses by the device is chosen as on a
    GPU.
    """
    Machine(monkeypatch).sums_in_order(lambda a: torch.are_deterministic_algorithms_enabled())
    model = f4.convert(tiny_shape(family).build(vocab_size=60, seq_len=32))
    ids = torch.arange(64).view(2, 32) % 60
    with determinism(True), Told() as told:
        with f4.autocast(NVFP4(), step=0):
            loss = model(ids, ids)
        loss.backward()
    assert {"embedding_dense_backward", "gather"} <= told.called
    assert not told.called & RAISING
    if family != "moe":  # the host counts the rows of experts: no graph records them
        assert not told.called & SORTING
    assert not torch.are_deterministic_algorithms_enabled()
