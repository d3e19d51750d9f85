"""A model that cannot fit is refused before it is built; one that takes long to build says how far it is."""

import logging

import pytest
import torch
from torch import nn

from fp4train.errors import UserError
from fp4train.models.llama import Llama
from fp4train.run import build, checks


@pytest.mark.parametrize("changes", [{}, {"tied": False, "heads": 4, "kv_heads": 2, "hidden": 100, "width": 64}])
def test_a_llama_knows_how_many_parameters_it_will_have(changes: dict[str, int]) -> None:
    shape = Llama(layers=2, **changes)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = shape.build(vocab_size=257, seq_len=16)
    assert shape.parameter_count(vocab_size=257) == sum(each.numel() for each in model.parameters())


def test_weights_beyond_the_main_memory_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_main_memory", lambda: 25_300_000_000)
    needed = r"Llama has 17\.6 T parameters.* 70\.4 TB of float32, and this machine has 25\.3 GB\. Choose"
    with pytest.raises(UserError, match=needed):
        wide = Llama(layers=4096, width=16384, heads=128, kv_heads=128, hidden=65536)
        checks.check_memory(wide, vocab_size=257)
    checks.check_memory(Llama(), vocab_size=257)
    checks.check_memory(object(), vocab_size=257)  # of an architecture that does not say its size nothing is known


def test_what_takes_long_to_build_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "EVERY", 0.0)
    caplog.set_level(logging.INFO)
    shape = Llama(layers=2)
    with torch.device("meta"), build._logging_progress("building the model", shape, 257):
        shape.build(vocab_size=257, seq_len=16)
    of = checks.short(shape.parameter_count(vocab_size=257))
    assert all(f"parameters of {of}, about " in each and each.endswith(" left") for each in caplog.messages)
    assert len(caplog.messages) > 10
    caplog.clear()
    nn.Linear(2, 2, device="meta")
    assert not caplog.messages  # nothing is counted any more
    with build._logging_progress("building the model", object(), 257):
        nn.Linear(3, 2, bias=False, device="meta")
    assert caplog.messages == ["building the model: 6 parameters"]
