"""Launches of Triton kernels: all that does not depend on the call is worked out before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp4train.quantize.triton_compile import compile_once


@dataclass(slots=True)
class Launch:
    """One kernel, all but its pointers and random words.

    dtypes: those in which the kernel reads and writes its pointers, where they are not those of the
        tensors; single bytes are uint8.
    compiled: the launcher of what Triton compiled, by what it specialises a kernel for beyond the
        plan: classes of the words, alignment of the pointers. Later launches call it (2 µs of the
        host) and not the JIT (7 to 11 µs).
    """

    kernel: Callable[..., Any]
    programs: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    warps: int = 4
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __call__(self, *pointers: Tensor, words: tuple[int | Tensor, ...] = ()) -> Any:
        """Launch the kernel, without contraction: a * b + c must round twice, as it does in torch.

        The first pointer's GPU becomes the current one, which costs some microseconds where it is
        not.
        """
        if pointers[0].is_cuda and pointers[0].get_device() != torch.cuda.current_device():
            with torch.cuda.device(pointers[0].device):
                return self(*pointers, words=words)
        key = (*map(type, words), *[pointer.data_ptr() % 16 for pointer in pointers])
        if (launch := self.compiled.get(key)) is not None:
            return launch(*pointers, *self.sizes, *words, *self.constants.values())
        run, seen = self.kernel[(self.programs,)], self.seen(pointers)  # type: ignore[index]
        arguments = (*seen, *self.sizes, *words)
        options = self.constants | {"num_warps": self.warps, "enable_fp_fusion": False}
        if pointers[0].is_cuda:
            compile_once(self.kernel, arguments, options)
        compiled = run(*arguments, **options)
        if compiled is not None:  # the interpreter compiles nothing
            self.compiled[key] = compiled[self.programs, 1, 1]

    def seen(self, pointers: Sequence[Tensor]) -> Sequence[Any]:
        """The pointers' arguments in the dtypes that the kernel is compiled for; a compiled one
        takes addresses.
        """
        return [
            x.view(self.dtypes.get(i, torch.uint8 if x.itemsize == 1 else x.dtype))
            for i, x in enumerate(pointers)
        ]
