"""Mamba-2 by the kernels of mamba-ssm and causal-conv1d: which calls are made, and why torch
computes instead.

No machine of the tests has them. Modules with the signatures and the checks of the real ones stand
in their place:

- `mamba_chunk_scan_combined`, mamba_ssm/ops/triton/ssd_combined.py of v2.3.2.post1: line 624 has
  the signature, lines
  343 to 369 the checks of shapes, line 682 in plain torch what it computes;
- `causal_conv1d_fn`, causal_conv1d/causal_conv1d_interface.py of v1.6.1, line 99; the checks are
  those of
  `causal_conv1d_fwd` in csrc/causal_conv1d.cpp, line 150.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import Cli, losses
from pretended import Machine
from torch import Tensor

from fp4train.models.common import scan_kernels
from fp4train.models.common.convolution import short_convolution
from fp4train.models.common.scan import Mamba2, ScanShape, scan
from fp4train.run.fuse import kernels_of_layers

HYBRID = (
    "model=hybrid_tiny",
    "model.width=32",
    "model.pattern=M-M*",
    "model.hidden=64",
    "model.scan.heads=4",
    "model.scan.head_dim=16",
    "model.scan.state=16",
    "model.scan.chunk=16",
    "recipe=nvfp4",
    "policy=all",
)
TIME = 21


class Installed:
    """The stand-ins, and the names of the calls that were made."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mamba_chunk_scan_combined(
        self, x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
        cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False,
        return_varlen_states=False,
    ) -> Any:  # type: ignore[no-untyped-def]  # fmt: skip
        batch, seqlen, nheads, _ = x.shape
        _, _, ngroups, dstate = B.shape
        assert nheads % ngroups == 0
        assert B.shape == C.shape == (batch, seqlen, ngroups, dstate)
        assert dt.shape == (batch, seqlen, nheads)
        assert A.shape == (nheads,)
        assert seq_idx is None or (
            seq_idx.shape == (batch, seqlen) and seq_idx.dtype == torch.int32
        )
        assert {each.dtype for each in (x, dt, A, B, C)} == {torch.float32}
        assert (D, z, dt_bias, initial_states, cu_seqlens) == (None,) * 5 and not (
            dt_softplus or return_final_states or return_varlen_states
        )
        assert dt_limit == (0.0, float("inf"))
        self.calls.append("scan")
        return scan(x * dt[..., None], A * dt, B, C, chunk=chunk_size, document_BT=seq_idx)[0]

    def mamba_split_conv1d_scan_combined(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("it multiplies outproj_weight")

    def causal_conv1d_fn(
        self, x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
        final_states_out=None, activation=None,
    ) -> Any:  # type: ignore[no-untyped-def]  # fmt: skip
        batch, dim, seqlen = x.shape
        width = weight.shape[-1]
        assert weight.shape == (dim, width) and 2 <= width <= 4
        assert x.stride(1) == 1, "channels last, which seq_idx needs"
        assert dim % 8 == 0 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
        assert bias.shape == (dim,) and bias.dtype == weight.dtype and bias.stride(-1) == 1
        if seq_idx is not None:
            assert (
                seq_idx.shape == (batch, seqlen)
                and seq_idx.dtype == torch.int32
                and seq_idx.is_contiguous()
            )
        assert (
            activation == "silu"
            and initial_states is None
            and final_states_out is None
            and not return_final_states
        )
        self.calls.append("convolution")
        return F.silu(short_convolution(x.mT, weight, bias, document_BT=seq_idx)[0]).mT


def module(name: str, **has: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(has)
    return made


@pytest.fixture(autouse=True)
def found_anew() -> Iterator[None]:
    scan_kernels._imported.cache_clear()
    yield
    scan_kernels._imported.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Both packages, for a CPU."""
    made = Installed()
    fused = made.mamba_split_conv1d_scan_combined
    Machine(monkeypatch).runs_mamba_kernels_on("cpu")
    monkeypatch.setitem(sys.modules, "mamba_ssm", module("mamba_ssm", __version__="2.3.2.post1"))
    triton = {"mamba_chunk_scan_combined": made.mamba_chunk_scan_combined, fused.__name__: fused}
    monkeypatch.setitem(sys.modules, scan_kernels.SCAN[0], module(scan_kernels.SCAN[0], **triton))
    convolution = module(
        "causal_conv1d", __version__="1.6.1", causal_conv1d_fn=made.causal_conv1d_fn
    )
    monkeypatch.setitem(sys.modules, "causal_conv1d", convolution)
    return made


def layer(**changes: Any) -> Mamba2:
    """A layer of 32 + 2·2·8 = 64 channels."""
    shape = ScanShape(heads=4, head_dim=8, state=8, groups=2, chunk=8)
    made = Mamba2(replace(shape, **changes), width=24, eps=1e-5)
    draw = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    return made


def passed(made: Mamba2, mask_BTT: Tensor | None = None) -> list[Tensor]:
    """Its output, and the gradients of its parameters."""
    x = torch.randn(2, TIME, 24, generator=torch.Generator().manual_seed(1))
    y = made(x, TIME, None, mask_BTT)
    made.zero_grad()
    y.square().sum().backward()
    return [y, *(parameter.grad for parameter in made.parameters() if parameter.grad is not None)]


DOCUMENTS = torch.tensor([0] * 5 + [5] + [6] * 15)
MASK = (DOCUMENTS[:, None] == DOCUMENTS).tril().expand(2, 1, TIME, TIME)


@pytest.mark.parametrize("mask", [None, MASK], ids=["one document", "several"])
def test_the_kernels_get_what_they_check_and_the_layer_is_that_of_torch(
    installed: Installed, mask: Tensor | None
) -> None:
    expected = passed(layer(kernels="torch"), mask)
    assert installed.calls == []
    found = passed(layer(), mask)
    assert installed.calls == ["convolution", "scan"]
    assert len(found) == len(expected) == 9
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": 5}, "causal-conv1d has filters of 2 to 4 taps, not 5"),
        ({"state": 7}, "causal-conv1d needs a multiple of 8 channels, not 60"),
        ({}, "causal-conv1d is not installed"),
    ],
)
def test_the_convolution_is_torchs_where_causal_conv1d_cannot_be_used(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], said: str
) -> None:
    if not changes:
        monkeypatch.delitem(sys.modules, "causal_conv1d")
    made = layer(**changes)
    passed(made)
    assert installed.calls == ["scan"]
    assert scans_of(made) == [
        f"scans by mamba-ssm 2.3.2.post1, their convolutions by torch: {said}"
    ]


def scans_of(made: Mamba2, device: str = "cpu", *, deterministic: bool = False) -> list[str]:
    return kernels_of_layers(torch.nn.Sequential(made, made), device, deterministic=deterministic)


def test_it_is_said_once_what_computes_and_why_torch_does(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scans_of(layer()) == [
        "scans by mamba-ssm 2.3.2.post1, their convolutions by causal-conv1d 1.6.1"
    ]
    assert scans_of(layer(kernels="torch")) == ["scans by torch: model.scan.kernels=torch"]
    (said,) = scans_of(layer(), deterministic=True)
    assert said.startswith("scans by torch: train.deterministic=true, and") and "atomics" in said
    assert scans_of(layer(), "meta") == [
        "scans by torch: the kernels of mamba-ssm need a GPU, not meta"
    ]
    monkeypatch.delitem(sys.modules, scan_kernels.SCAN[0])
    scan_kernels._imported.cache_clear()
    (said,) = scans_of(layer())
    assert said.startswith("scans by torch: mamba-ssm cannot be imported: "), (
        "a package without the file"
    )
    monkeypatch.delitem(sys.modules, "mamba_ssm")
    scan_kernels._imported.cache_clear()
    assert scans_of(layer()) == ["scans by torch: mamba-ssm is not installed"]


@pytest.mark.long
def test_a_compiled_layer_calls_them_too(installed: Installed) -> None:
    made = layer()
    x = torch.randn(2, TIME, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = made(x, TIME)
        compiled = torch.compile(made, backend="eager")
        installed.calls.clear()
        torch.testing.assert_close(compiled(x, TIME), expected)
    assert installed.calls == ["convolution", "scan"]


def test_deterministic_algorithms_leave_the_scan_to_torch(installed: Installed) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        passed(layer())
    finally:
        torch.use_deterministic_algorithms(False)
    assert installed.calls == []


@pytest.mark.long
def test_a_run_says_so_and_its_projections_stay_with_the_recipe(
    cli: Cli, installed: Installed
) -> None:
    """The guard of the first step ends a run that does not call a planned layer."""
    short = (*HYBRID, "train.steps=2", "phases=none", "eval.every=0")
    ran = cli("run.name=a", *short)
    assert ran.code == 0, ran.err
    assert "scans by mamba-ssm 2.3.2.post1, their convolutions by causal-conv1d 1.6.1" in ran.err
    made = len(installed.calls)
    assert made >= 2 * 2 * 2, "two blocks, two steps"
    planned = cli("plan", *short)
    assert "scans by mamba-ssm 2.3.2.post1" in planned.out and "blocks 0–3" in planned.out
    assert cli("run.name=b", *short, "model.scan.kernels=torch").code == 0
    assert len(installed.calls) == made
    for step, found in losses("runs/a").items():
        assert found[0] == pytest.approx(losses("runs/b")[step][0], rel=1e-3)
    assert cli.raw("resume=runs/a", "model.scan.kernels=torch", "train.steps=3").code == 0
    assert len(installed.calls) == made
