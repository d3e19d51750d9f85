"""Main memory of audits: what a record holds, and what happens where there is too little."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import STEADY, Cli, events, losses
from pretended import Machine

from fp4train.run import host

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


@pytest.mark.long
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
