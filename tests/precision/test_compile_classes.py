"""torch.compile of functions that enter `autocast`, by the interface that the installed torch has
for contexts.
"""

import importlib.util
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fp4train.precision

REGIONS = """
import logging
import torch
import fp4train as f4
from fp4train.precision import MXFP8, NVFP4

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("torch").addHandler(handler)

model = f4.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)))

def one_region(x, step):
    with f4.autocast(NVFP4(), step=step, token_offset=0):
        return model(2 * x).sum()

def nested_regions(x, step):
    with f4.autocast(MXFP8(), step=step, token_offset=0):
        y = model(x).sum()
        with f4.autocast(NVFP4(), step=step, token_offset=0, enabled=False):
            y = y + model(x).sum()
    return y + model(x).sum()

@f4.autocast(NVFP4(), step=3, token_offset=0)
def decorated(x, step):
    return model(x).sum() + step

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, x, step):
        with f4.autocast(MXFP8(), step=step, token_offset=0):
            return self.model(x).sum()

x = torch.randn(16, 32, requires_grad=True)
for function in (one_region, nested_regions, decorated, Module()):
    compiled = torch.compile(function, backend="aot_eager")
    for step in range(3):
        results = []
        for called in (compiled, function):
            x.grad = model[0].weight.grad = None
            y = called(x, step)
            y.backward()
            results.append((y.detach(), x.grad, model[0].weight.grad))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results)), (function, step)
        assert f4.precision.context.current() is None
deprecated = [message for message in messages if "deprecated" in message]
assert not deprecated, deprecated
print("equal")
"""


@pytest.mark.long
def test_functions_that_enter_autocast_have_the_bits_of_eager_mode_and_use_nothing_deprecated() -> (
    None
):
    """One after the other in a process, as the first one makes contexts inputs of graphs for those
    after it.
    """
    command = [sys.executable, "-W", "ignore", "-c", REGIONS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr
    assert "deprecated" not in run.stderr, run.stderr


class MemberType(Enum):
    """As in `torch._library.opaque_object`."""

    USE_REAL = "use_real"


@pytest.mark.parametrize(
    ("module", "metaclass", "register", "typ"),
    [
        ("torch._custom_class_base", "CustomClassBaseMeta", "register_custom_class", "symbolic"),
        ("torch._opaque_base", "OpaqueBaseMeta", "register_opaque_type", "reference"),
    ],
    ids=["torch 2.14", "torch 2.13"],
)
def test_classes_are_registered_by_the_names_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, module: str, metaclass: str, register: str, typ: str
) -> None:
    """The newer names where both are there: the older ones are deprecated then."""
    registered: list[Any] = []
    base = ModuleType(module)
    registry = ModuleType("torch._library.opaque_object")
    setattr(base, metaclass, type("Metaclass", (type,), {}))
    setattr(registry, register, lambda cls, **options: registered.append((cls, options)))
    registry.MemberType = MemberType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, base)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == module else None
    )
    path = Path(fp4train.precision.__file__).parent / "compile_classes.py"
    spec = importlib.util.spec_from_file_location("compile_classes", path)
    assert spec is not None and spec.loader is not None
    classes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(classes)
    assert classes.Metaclass is getattr(base, metaclass)
    classes.register(int, guard=repr, constant=("real",))
    members = {"real": MemberType.USE_REAL}
    assert registered == [(int, {"typ": typ, "guard_fn": repr, "members": members})]
