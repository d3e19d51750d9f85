"""scripts/host_time.py: a line per recipe on either backend, and what it says without Transformer Engine."""

import importlib.util
import re

import host_time
import pytest
from pretended import Machine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
LAYER = r"  (.+?) +(\d+) µs, nn.Linear (\d+), "


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "measure", lambda recipe, tries: (93.2, 21.4))
    monkeypatch.setattr(host_time, "measure_on_te", lambda tries: {"NVFP4": (118.4, 88.0, 20.6)})


def test_it_prints_what_each_backend_takes_above_another_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch).has_transformer_engine(2, 20)
    host_time.main(["--tries", "1"])
    native, on_te = capsys.readouterr().out.partition("on Transformer Engine\n")[::2]
    lines = native.splitlines()
    assert lines[0] == "on torch's products and Triton" and len(lines) == 1 + len(host_time.RECIPES)
    assert all(re.fullmatch(LAYER + r"above it 72, 4\.4 times", line) for line in lines[1:])
    (layer,) = on_te.splitlines()
    assert (
        layer == "  NVFP4          118 µs, nn.Linear 21, Transformer Engine's own 88, above it 30"
    )


def test_without_transformer_engine_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, found in (((), "none"), ((2, 14, 1), "Transformer Engine 2.14.1")):
        Machine(monkeypatch).has_transformer_engine(*version)
        host_time.main(["--tries", "1"])
        said = capsys.readouterr().out.splitlines()[-1]
        assert said == f"  not measured: {found} is installed, and 2.19 or newer is needed"


def test_its_names_of_recipes_are_those_of_the_program_on_transformer_engine() -> None:
    """The program needs a process of its own."""
    text = host_time.ON_TE.read_text(encoding="utf-8")
    (names,) = re.findall(r"^RECIPES: .* = \((.*)\)$", text, re.MULTILINE)
    assert re.findall(r"\w+(?=\(\))", names) == [
        type(recipe).__name__ for recipe in host_time.RECIPES
    ]
