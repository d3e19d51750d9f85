"""Main memory of audits: what a record holds, and what happens where there is too little."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import STEADY, Cli, events, losses
from pretended import Machine
from torch import Tensor, nn

import fp4train as f4
from fp4train.audit import ObservedCall, Observer, Product
from fp4train.nn import Linear
from fp4train.precision import NVFP4
from fp4train.run import host
from fp4train.run.supervise import audit_report

GIB = 2**30


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  4194304 kB\nMemAvailable:  2097152 kB\nHugePages_Total:  0\n"


def test_free_memory_is_the_least_of_the_machines_and_of_the_containers(tmp_path: Path) -> None:
    assert host.free_memory(tmp_path / "nothing") is None
    machine = write(tmp_path / "a", proc__meminfo=MEMINFO)
    assert host.free_memory(machine) == 2 * GIB
    groups = {
        "sys__fs__cgroup__memory_dot_max": f"{GIB}\n",
        "sys__fs__cgroup__memory_dot_current": f"{GIB // 2}\n",
        "sys__fs__cgroup__memory_dot_stat": f"anon 5\ninactive_file {GIB // 4}\n",
    }
    container = write(tmp_path / "b", proc__meminfo=MEMINFO, **groups)
    assert host.free_memory(container) == GIB * 3 // 4
    unlimited = write(container, sys__fs__cgroup__memory_dot_max="max\n")
    assert host.free_memory(unlimited) == 2 * GIB


def tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (ObservedCall, Product)):
        for field in fields(values):
            yield from tensors(getattr(values, field.name))
    elif isinstance(values, (dict, tuple)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors(value)


@pytest.mark.parametrize("shape", [(256, 512, 256), (64, 256, 1024), (512, 128, 64)])
def test_a_record_of_a_call_is_as_large_as_is_counted(shape: tuple[int, int, int]) -> None:
    tokens, in_features, out_features = shape
    (layer,) = f4.convert(nn.Sequential(nn.Linear(in_features, out_features, bias=False)))
    assert isinstance(layer, Linear)
    observer = layer.observer = Observer(layer)
    x = torch.randn(tokens, in_features, dtype=torch.bfloat16, requires_grad=True)
    with f4.autocast(NVFP4(), seed=0, step=0):
        y = layer(x)
    y.backward(torch.ones_like(y))
    (record,) = observer.records
    storages = {tensor.data_ptr(): tensor.nbytes for tensor in tensors(record)}
    largest = max(tokens * in_features, tokens * out_features, in_features * out_features)
    beside = 4 * in_features * out_features + audit_report.COMPARING * largest
    counted = (audit_report.needed(layer, tokens) - beside) / audit_report.OTHERS
    assert 0.94 * counted < sum(storages.values()) <= counted + 1
    both = audit_report.needed(layer, tokens, observed=2) - audit_report.needed(layer, tokens)
    assert both == audit_report.needed(layer, tokens) - beside, "two layers, one comparison"


def test_an_audit_without_main_memory_is_said_once_and_changes_no_bit(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*STEADY, "recipe=nvfp4", "train.steps=4")
    cli.trained("run.name=a", *words, "audit.every=0")
    Machine(monkeypatch).has_free_memory(1000)
    ended = cli("run.name=b", *words, "audit.every=1")
    assert ended.code == 0
    assert losses("runs/b") == losses("runs/a")
    assert events("runs/b", "audit") == [] == events("runs/b", "audit fault")
    (failed,) = events("runs/b", "audit failed")
    assert "GiB of main memory, and 0.0 GiB are free" in failed["reason"]
    assert "no layer was audited" in ended.err
