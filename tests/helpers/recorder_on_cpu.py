"""A CUDA graph on a CPU: every operator of a step is recorded with the tensors and numbers it was
given, and repeated.

What a CUDA graph does and this does, too:

- Recording changes nothing: what the step wrote is put back, and so is the generator of random
  numbers.
- A replay repeats each operator on the same memory with the same host numbers. A number of the host
  that changes from
  step to step is therefore the one of the recorded step in every replay, and the losses show it.
- Memory of the graph holds nothing between replays: it is filled with NaN before each, so that
  reading what no
  operator wrote shows, too. Memory that no operator of the graph writes is an input, which is
  filled before a replay.
- Reading a number on the host, and tensors made from host numbers, fail while a step is recorded.
- Collectives are repeated, on all ranks in the same order, as those of NCCL are that a stream
  captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")

REFUSED = {
    "_local_scalar_dense": "a number is read on the host",
    "is_nonzero": "a number is read on the host",
    "equal": "a number is read on the host",
    "nonzero": "a shape depends on values",
    "masked_select": "a shape depends on values",
    "lift_fresh": "a tensor is made from numbers of the host",
    "lift_fresh_copy": "a tensor is made from numbers of the host",
}


EMPTY = ("empty", "new_empty")
WAIT = dist.Work.wait


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.written: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Graphs that torch.compile made before run within the mode, which gets their operators."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # of an operator that is made of others these are recorded
            if func.namespace == "fp4train":
                return func.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs
                )
            own = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
            if not own and (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                return made
        name = func.overloadpacket.__name__
        if name in REFUSED:
            raise RuntimeError(
                f"operation not permitted when stream is capturing: {name}: {REFUSED[name]}"
            )
        for written in _written(func, args, kwargs):
            storage = written.untyped_storage()
            self.written.add(storage.data_ptr())
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
                whole = written.as_strided((storage.nbytes() // written.element_size(),), (1,), 0)
                self.before[storage.data_ptr()] = (whole, whole.clone())
        found = _run(func, args, kwargs)
        results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        aliases = _is_collective(func) or any(
            each.alias_info is not None for each in func._schema.returns
        )
        fresh = [] if aliases else results
        for each in fresh:
            self.made[each.untyped_storage().data_ptr()] = each.detach()
            if not name.startswith(EMPTY):
                self.written.add(each.untyped_storage().data_ptr())
        # Detached: a recording must hold memory, and no autograd graph.
        held = tree_map_only(Tensor, lambda each: each.detach(), (args, kwargs))
        self.calls.append((func, *held, [each.detach() for each in fresh]))
        return found


def _is_collective(func: Any) -> bool:
    """Of torch's process groups: it writes its first argument, which its schema does not say, and
    returns it.
    """
    return bool(func.namespace == "c10d")


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The call; a collective to its end, as gloo may copy the result where it is waited for."""
    found = func(*args, **kwargs)
    if _is_collective(func):
        WAIT(dist.Work.unbox(found[-1]))
    return found


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if _is_collective(func):
        yield from (each for each in tree_leaves(args[0]) if isinstance(each, Tensor))
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


class RecorderOnCpu:
    """A `Recorder` of `fp4train.run.step_graph`."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.recorded: _Recording | None = None
        self.replays = 0
        self.others: list[RecorderOnCpu] = []

    def warm_up(self, work: Callable[[], T]) -> T:
        return work()

    def record(self, work: Callable[[], T]) -> T:
        assert self.recorded is None, "a graph is recorded once"
        self.recorded, random = _Recording(), torch.get_rng_state()
        with self.recorded, patch.object(dist.Work, "wait", lambda *_: True):
            made = work()
        for tensor, values in self.recorded.before.values():
            tensor.copy_(values)
        torch.set_rng_state(random)
        return made

    def replay(self) -> None:
        assert self.recorded is not None
        self.replays += 1
        with torch.no_grad():
            for storage, tensor in self.recorded.made.items():
                if storage in self.recorded.written:
                    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
                    bits.fill_(math.nan if bits.is_floating_point() else 85)
            for func, args, kwargs, results in self.recorded.calls:
                found = _run(func, args, kwargs)
                if func.overloadpacket.__name__.startswith(EMPTY):
                    continue
                new = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
                for into, value in zip(results, new if results else [], strict=True):
                    into.copy_(value)

    def another(self) -> RecorderOnCpu:
        """Its memory is its own: nothing that is freed is used again, as it is in a pool of CUDA
        graphs.
        """
        self.others.append(RecorderOnCpu(torch.device("cpu")))
        return self.others[-1]

    def address(self, tensor: Tensor) -> Tensor:
        return tensor.data  # as an address has, a version of its own

    def allocate(self, tensor: Tensor) -> None:
        """It was never freed."""

    def free(self, tensor: Tensor) -> None:
        """Recorded operators read it in each replay."""
