"""The operations between a model's products, in Liger's kernels (liger-kernel, arXiv:2410.10989) on
NVIDIA GPUs.

| part | kernels | bytes per BF16 element | least |
|---|---|---|---|
| RMSNorm | one each way, float32 inside and rounded once, as F.rms_norm | 4 + 6 | 4 + 6 |
| silu(gate) ⊙ up | one each way; backward makes silu again and writes over gate and up | 6 + 10 | 6 + 10 |
| rotary embedding | one each way for queries and keys, in their own memory | 4 + 4 | 4 + 4 |
| cross-entropy | loss and gradient of a chunk of logits in one, in their own memory | 6 | 4 |

The least is each input read and each result written once. Cross-entropy takes 1.5 times that: the
gradient needs the whole row's sum, and a row of 128 k BF16 logits, 256 kB, is more than a
multiprocessor holds (228 kB on SM 9.0 and 10.0), so it is read twice, the second time from the L2
cache at best. torch's operators move 52 bytes per logit (`loss.LOGIT_BYTES`).

Products are not theirs: a recipe's layers stay as they are, and the head is multiplied as before,
in high precision. Results differ from torch's operators in the last digits, since sums have another
order and rotations round less often. RMSNorms with ε outside of the root (StripedHyena) have no
kernel here.

Liger's own linear cross-entropy is not used: it counts targets on the host, which no CUDA graph can
record, and takes so few tokens at a time that the float32 gradient of the head is read and written
dozens of times.
"""

import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.models.common.operators import Operators, use
from fp4train.text import first_line

OLDEST = (0, 8, 5)
BEFORE = (0, 9)
"""Versions of liger-kernel whose functions are those that are called here."""

MOVED = MappingProxyType(
    {
        "rms_norm": (4, 6),
        "silu_product": (6, 10),
        "rotate": (4, 4),
        "cross_entropy": (6, 0),
    }
)
"""Bytes that a call moves forward and backward, per BF16 element of its first argument; `rotate`:
of both; with a gradient.
"""

_IGNORED = -1
_LARGEST_BLOCK = 1 << 15
"""Columns that a program of the kernel holds (cross_entropy.py MAX_FUSED_SIZE)."""


class Liger(Operators):
    """Liger's kernels, by what they compute. Tensors are on one CUDA device.

    Raises:
        ImportError: liger-kernel or Triton is not there.
    """

    def __init__(self) -> None:
        ops: Any = import_module("liger_kernel.ops")
        self._norm = ops.LigerRMSNormFunction
        self._product = ops.LigerSiLUMulFunction
        self._rotation = ops.LigerRopeFunction
        self._loss: Any = import_module("liger_kernel.ops.cross_entropy").liger_cross_entropy_kernel

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
        """See `Operators`."""
        if eps is None:
            return super().rms_norm(x, weight_D, eps)
        # Offset of the weight, where to round ("gemma": after the product), not over dy, which
        # others may read, rows.
        y: Tensor = self._norm.apply(x, weight_D, eps, 0.0, "gemma", False, None)
        return y

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Operators`. Backward writes the gradients over both, which nothing else may need
        then.
        """
        y: Tensor = self._product.apply(gate, up, 1.0, 1.0)
        return y

    def rotate(
        self, q_BHTE: Tensor, k_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Operators`; in their own memory where they are transposed [B, T, heads, E]."""
        q, k = self._rotation.apply(q_BHTE, k_BHTE, cos_TE, sin_TE, None, 1, None)
        return q, k

    def cross_entropy(self, logits_CV: Tensor, targets_C: Tensor, *, gradient: bool) -> Tensor:
        """Losses [C] in nats, float32; those of targets below 0 are 0.

        With `gradient` the logits become softmax(logits) − onehot(target), in their dtype, and 0
        without a target.
        """
        rows, columns = logits_CV.shape
        losses_C = torch.zeros(rows, device=logits_CV.device)
        if logits_CV.is_cuda:
            capability = torch.cuda.get_device_capability(logits_CV.device)
        else:
            capability = (0, 0)
        none: dict[str, Any] = {
            **dict.fromkeys(
                (
                    "weight_ptr",
                    "z_loss_ptr",
                    "token_accuracy_ptr",
                    "predicted_tokens_ptr",
                    "softcap",
                )
            ),
            **dict.fromkeys(("token_accuracy_stride", "predicted_tokens_stride"), 0),
            # of means and weights
            **dict.fromkeys(("n_non_ignore", "sum_non_ignore_weight", "weight_sum"), 1),
            **dict.fromkeys(("lse_square_scale", "label_smoothing"), 0.0),
            **dict.fromkeys(
                ("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"), False
            ),
            **dict.fromkeys(("HAS_WEIGHT", "HAS_SOFTCAPPING"), False),
        }
        self._loss[(rows,)](
            X_ptr=logits_CV,
            X_stride=logits_CV.stride(0),
            Y_ptr=targets_C.clamp(min=_IGNORED),
            Y_stride=1,
            loss_ptr=losses_C,
            loss_stride=1,
            n_cols=columns,
            ignore_index=_IGNORED,
            reduction="sum",
            HAS_GRADIENTS=gradient,
            BLOCK_SIZE=min(_LARGEST_BLOCK, 1 << (columns - 1).bit_length()),
            # As liger's: Blackwell is bound by instructions, older GPUs by bandwidth.
            num_warps=8 if logits_CV.element_size() == 2 and capability >= (10, 0) else 32,
            **none,
        )
        return losses_C


@cache
def installed_version() -> tuple[int, ...] | None:
    """The first numbers of liger-kernel's version; None: it is not installed."""
    try:
        text = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def why_not(device: str) -> str | None:
    """Why Liger's kernels do not run on devices of this type; None: they do."""
    if device != "cuda":
        return f"they are for GPUs, and the model is on the {device} device"
    installed = installed_version()
    if installed is None:
        return "liger-kernel is not installed: pip install 'fp4train[liger]'"
    if not OLDEST <= installed < BEFORE:
        here, oldest, limit = (
            ".".join(map(str, numbers)) for numbers in (installed, OLDEST, BEFORE)
        )
        return f"liger-kernel {here} is installed, and {oldest} or newer below {limit} is needed"
    try:
        Liger()
    # it imports peft, which imports TE
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"liger-kernel cannot be imported: {first_line(error)}"
    return None


def use_liger(model: nn.Module, *, spare: Iterable[nn.Module] = ()) -> None:
    """Run the fusible parts of `model` in Liger's kernels, but for those inside of the modules
    `spare`.

    A graph of such a model has one backward pass: kernels write over what it saved.
    """
    use(model, Liger(), spare=spare)
