"""A GPU that is too old, runs out of memory in a step, or vanishes: what the user is told, and what
is there to go on.

torch's own errors are raised where torch raises them, so that no GPU is needed.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, losses

from fp4train import checkpoint
from fp4train.errors import UserError
from fp4train.measure.profile import Profiler
from fp4train.parallel.launch import ProcessRank
from fp4train.quantize import QuantSpec, quantizer
from fp4train.quantize.quantizer import _say
from fp4train.run import step
from fp4train.run.host import choose_device
from fp4train.run.run import Run
from fp4train.run.supervise import rescue

STEADY = ("phases=none", "schedule=constant", "checkpoint.every=2", "eval.every=0")
OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB "
    "of which 1 GiB is free.\n"
    "More about fragmentation"
)
LOST = torch.AcceleratorError(
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be …"
)


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception, bool], None]:
    """`fail_at(3, error, dead)`: the backward pass of step 3 raises; `dead`: so does all that
    touches the GPU after.
    """
    original = step.train_losses
    scaling = Run.load_scaling

    def set_up(number: int, error: Exception, dead: bool) -> None:
        failed = False

        def train_losses(run: Any, *arguments: Any) -> Any:
            nonlocal failed
            yield from original(run, *arguments)
            if run.step == number:
                failed = True
                raise error

        def touch(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if failed and dead:
                    raise error
                return original(*arguments, **options)

            return call

        monkeypatch.setattr(step, "train_losses", train_losses)
        monkeypatch.setattr(Run, "load_scaling", touch(scaling))
        monkeypatch.setattr(rescue, "finite_weights", touch(rescue.finite_weights))

    return set_up


def test_out_of_memory_in_a_step_says_what_to_reduce_and_the_run_goes_on(
    cli: Cli, fail_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context():
        fail_at(3, OUT_OF_MEMORY, False)
        ended = cli("run.name=a", "train.batch_size=4", *STEADY)
    assert ended.code == 1
    assert (
        "runs/a: step 3 does not fit into memory: CUDA out of memory. Tried to allocate 2.00 GiB."
        in ended.message
    )
    assert (
        "The checkpoint of step 3 stays: resume=runs/a goes on with train.microbatch=2 (the same"
        in ended.message
    )
    assert "model.recompute=true" in ended.message
    assert "Traceback" not in ended.message
    monkeypatch.undo()


def test_out_of_memory_leaves_a_snapshot_of_the_gpus_memory(
    cli: Cli, fail_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Profiler.begin

    def on_gpu(profiler: Any, run: Any) -> None:
        profiler._snapshots = True
        begin(profiler, run)

    recorded: list[dict[str, Any]] = []
    record = lambda **options: recorded.append(options)  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    dump = lambda path: Path(path).write_text("memory")  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(Profiler, "begin", on_gpu)
    fail_at(3, OUT_OF_MEMORY, False)
    ended = cli("run.name=a", "profile.memory=true", *STEADY)
    dumped = Path("runs/a/profile/out_of_memory_rank_0.pickle")
    assert dumped.read_text() == "memory" and f"profile: {dumped}" in ended.err
    assert recorded == [{"max_entries": 100_000}, {"enabled": None}]


def test_a_microbatch_of_one_sequence_cannot_be_smaller(cli: Cli, fail_at: Any) -> None:
    fail_at(1, OUT_OF_MEMORY, False)
    ended = cli(
        "run.name=a", "train.batch_size=4", "train.microbatch=1", "model.recompute=true", *STEADY
    )
    assert "train.microbatch=" not in ended.message
    assert "goes on with a smaller model or train.seq_len, or more GPUs" in ended.message


def test_a_gpu_that_vanishes_is_named_and_the_checkpoint_before_it_stays(
    cli: Cli, fail_at: Any
) -> None:
    fail_at(3, LOST, True)
    ended = cli("run.name=a", *STEADY)
    assert ended.code == 75, "a launcher may start it again"
    assert (
        "runs/a: the GPU failed in step 3 (cpu, cpu): CUDA error: unspecified launch failure."
        in ended.message
    )
    assert "This process cannot use it any more" in ended.message
    assert "The checkpoint of step 2 stays: resume=runs/a goes on" in ended.message
    assert checkpoint.steps(cli.folder / "runs" / "a" / "checkpoints") == [2]


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited"),
    ],
    ids=str,
)
def test_errors_of_the_gpu_are_told_as_such(cli: Cli, fail_at: Any, error: Exception) -> None:
    fail_at(1, error, False)
    ended = cli("run.name=a", *STEADY)
    assert ended.code == 75
    assert "the GPU failed in step 1" in ended.err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        ValueError("CUDA error: not torch's"),
    ],
    ids=str,
)
def test_other_errors_are_not_told_as_failures_of_the_gpu(
    cli: Cli, fail_at: Any, error: Exception
) -> None:
    fail_at(1, error, False)
    with pytest.raises(type(error)) as raised:
        cli("run.name=a", *STEADY)
    assert raised.value is error
    assert "the GPU failed" not in cli.capture.readouterr().err


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    what = (
        rf"device={name}: Tesla T4 has compute capability 7\.5 and no BF16 products, which need "
        r"8\.0; use device=cpu"
    )
    with pytest.raises(UserError, match=what):
        choose_device(name)
    assert choose_device("cpu").type == "cpu"


def test_each_rank_makes_its_gpu_the_current_one_before_anything_asks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FSDP2 takes the current GPU (torch/distributed/fsdp/_fully_shard/_fsdp_init.py
    `_get_device_from_mesh`). DeviceMesh sets it only where CUDA has not been used
    (torch/distributed/device_mesh.py `_setup_world_group_and_device`), and asking for a capability
    uses it: torch/cuda/__init__.py `get_device_capability` calls `get_device_properties`, that
    `_lazy_init`. `set_device` there makes one current.
    """
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device: calls.append(("asked", device)) or (9, 0),
    )
    place = ProcessRank(rank=6, size=8, local_rank=2, local_size=4)
    chosen = choose_device("auto", place)
    assert chosen == torch.device("cuda", 2)
    assert calls == [("set", chosen), ("asked", chosen)]


def test_without_triton_the_reference_quantises_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(logging.getLogger("fp4train"), "propagate", True)
    quantizer.cache_clear()
    monkeypatch.setattr(
        sys.modules[quantizer.__module__], "_say", functools.cache(_say.__wrapped__)
    )
    try:
        with caplog.at_level(logging.INFO, "fp4train"):
            chosen = quantizer(QuantSpec(), "cuda")
            quantizer(QuantSpec(rounding="stochastic"), "cuda")
    finally:
        quantizer.cache_clear()
    assert chosen.kernel == "reference" and "pip install 'fp4train[triton]'" in str(chosen.why)
    # a record may pass two handlers
    said = {id(record): record.getMessage() for record in caplog.records}
    assert len(said) == 1, "once for both"
    assert "no triton kernel, using the torch reference: triton is not installed" in caplog.text


def test_a_deterministic_run_on_a_cpu_has_the_same_losses(cli: Cli) -> None:
    for name, deterministic in (("a", "false"), ("b", "true")):
        words = (f"run.name={name}", f"train.deterministic={deterministic}", "train.steps=3")
        assert cli(*words, *STEADY).code == 0
    assert losses("runs/a") == losses("runs/b")
    assert not torch.are_deterministic_algorithms_enabled()
