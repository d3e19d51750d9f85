"""mamba-ssm's scan and causal-conv1d's convolution, where these packages are installed and the
tensors are on a GPU.

Neither reads the weight of a linear layer: in_proj and out_proj stay with the recipe. mamba-ssm
also has a fused `mamba_split_conv1d_scan_combined`, which multiplies `outproj_weight` itself, past
any recipe; it is never called.

They get float32. Triton multiplies that as TF32 and sums in float32; torch's own scan is float32
throughout.

torch computes where its deterministic algorithms are on (`train.deterministic`): the backward
kernels add by atomics. mamba-ssm has had a mode without them since 2.3 and causal-conv1d since 1.6,
but mamba-ssm's takes other block sizes only if it is on when the package is imported. It also
computes where text is made, which goes on from a state.

Sources: `mamba_ssm/ops/triton/ssd_combined.py` and `utils/determinism.py` of 2.3.2,
`csrc/causal_conv1d.cpp` of 1.6.1.

Dimensions: B batch, T time, H heads, P elements of a head, G groups, N elements of the state, C
channels, K taps.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fp4train.text import first_line

DEVICE = "cuda"
"""The type of the devices that they run on."""
CHOICES = ("auto", "torch")
"""Values of `model.scan.kernels`: these kernels where they can be used, or torch alone."""
SCAN = "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"
CONVOLUTION = "causal_conv1d", "causal_conv1d_fn"
_NAMES = {SCAN: "mamba-ssm", CONVOLUTION: "causal-conv1d"}
_MOST_TAPS = 4
_CHANNELS = 8
"""The filters of causal-conv1d have 2 to 4 taps, for a multiple of 8 channels."""


def why_missing(where: tuple[str, str]) -> str | None:
    """The reason why a function cannot be imported; None: it can. torch.compile does not trace the
    import, so a layer asks when it is made (`missing`).
    """
    imported = _imported(where)
    return imported if isinstance(imported, str) else None


def missing() -> tuple[str | None, str | None]:
    """Reasons why this process cannot call the scan, and the convolution; None: it can."""
    if not torch.get_device_module(DEVICE).is_available():
        return (f"there is no {DEVICE} device",) * 2
    return why_missing(SCAN), why_missing(CONVOLUTION)


@cache
def _imported(where: tuple[str, str]) -> Any:
    """The function, or a text that says why it is not there."""
    module, name = where
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        missing = module.partition(".")[0]
        if error.name == missing:
            return f"{_NAMES[where]} is not installed"
        return _failed(where, error)
    # built for another torch, or another version
    except (ImportError, OSError, AttributeError) as error:
        return _failed(where, error)


def _failed(where: tuple[str, str], error: Exception) -> str:
    return f"{_NAMES[where]} cannot be imported: {first_line(error)}"


def why_torch(chosen: str, device: str, deterministic: bool) -> str | None:
    """The reason why torch computes the scans on a device of this type; None: mamba-ssm's kernels
    do where they are.

    Args:
        chosen: one of `CHOICES`.
        deterministic: whether the bits must repeat.
    """
    if chosen == "torch":
        return "model.scan.kernels=torch"
    if device != DEVICE:
        return f"the kernels of mamba-ssm need a GPU, not {device}"
    if deterministic:
        return (
            "train.deterministic=true, and the backward pass of mamba-ssm's kernels adds by atomics"
        )
    return None


def why_torch_convolves(taps: int, channels: int) -> str | None:
    """The reason why torch computes the convolutions before scans that kernels compute; None:
    causal-conv1d does where it is.
    """
    if not 2 <= taps <= _MOST_TAPS:
        return f"causal-conv1d has filters of 2 to {_MOST_TAPS} taps, not {taps}"
    if channels % _CHANNELS:
        return f"causal-conv1d needs a multiple of {_CHANNELS} channels, not {channels}"
    return None


def version(where: tuple[str, str]) -> str:
    """ "mamba-ssm 2.3.2": what computes, of a package that was found."""
    package = import_module(where[0].partition(".")[0])
    return f"{_NAMES[where]} {getattr(package, '__version__', '')}".rstrip()


def scan(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    a_H: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    chunk: int,
    document_BT: Tensor | None,
) -> Tensor:
    """y [B, T, H, P] of the scan of dt ⊙ x with the decays exp(a·dt), from a state of zeros."""
    y: Tensor = _imported(SCAN)(
        x_BTHP,
        dt_BTH,
        a_H,
        b_BTGN,
        c_BTGN,
        chunk_size=chunk,
        seq_idx=None if document_BT is None else document_BT.int(),
    )
    return y


def silu_of_convolution(
    x_BTC: Tensor, weight_CK: Tensor, bias_C: Tensor, document_BT: Tensor | None
) -> Tensor:
    """silu(y) [B, T, C] of the causal convolution y of `convolution.short_convolution`, from a
    window of zeros.
    """
    y_BCT: Tensor = _imported(CONVOLUTION)(
        x_BTC.contiguous().mT,  # channels last, which it needs for documents
        weight_CK.contiguous(),
        bias_C,
        seq_idx=None if document_BT is None else document_BT.int().contiguous(),
        activation="silu",
    )
    return y_BCT.mT
