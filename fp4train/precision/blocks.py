"""Find the blocks of a model: the repeated parts that a policy counts ("the last 15 % of the
blocks").

Blocks are found by structure, as the entries of the outermost stacks of a model, in order of
definition. A stack is
- an `nn.ModuleList`: each entry that holds a linear layer is a block, whatever its class
  (Mamba/attention hybrids). A
  list of bare linear layers (several heads) counts only if the model has no other stack;
- an `nn.Sequential` with two or more entries of one class, not counting bare linear layers: these
  entries and those
  between them;
- an `nn.ModuleDict` with two or more entries of one class, or with keys that all end in a number:
  its entries;
- two or more attributes of one class (`self.block1`, `self.block2`), if the model has no other
  stack, and if they are
  numbered or hold more than 3/4 of the linear weights.
Everything inside a block belongs to it, mixture-of-experts layers included. An entry without a
number that holds a stack of its own, other than experts, is not a block: its stack is used instead.
In {"encoder": …, "decoder": …} the blocks are those of the encoder and of the decoder.

A model with other blocks names them itself: its attribute, property or method `fp4train_blocks`
returns their module paths, or the modules, in order.
"""

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

NAMED_BY = "fp4train_blocks"


def is_linear(module: nn.Module) -> bool:
    """Whether this is an nn.Linear, a subclass, a `Conv1D`, or a module marked as a linear layer
    (`is_fp4train_layer`)."""
    return (
        isinstance(module, nn.Linear)
        or getattr(module, "is_fp4train_layer", False)
        or (type(module).__qualname__ == "Conv1D" and is_conv1d(module))
    )


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the linear layer of Hugging Face's GPT-2, y = x·w + b with w [in, out].

    It is known by its class's module and name, because transformers is not imported.
    """
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def features(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer."""
    shape = linear.weight.shape if is_conv1d(linear) else (linear.in_features, linear.out_features)
    return int(shape[0]), int(shape[1])  # type: ignore[arg-type, index]


def block_paths(model: nn.Module) -> list[str]:
    """Module paths of the blocks that hold linear layers, in order; empty if the model has no
    repeated part.

    A block whose linear layers all belong to earlier blocks (one module in several places) is not
    counted again.

    Raises:
        TypeError, ValueError: `fp4train_blocks` of the model is invalid.
    """
    paths = list(_named(model)) or _by_structure(model)
    seen: set[nn.Module] = set()
    block_names = []
    for path in paths:
        linears = set(_linears(model.get_submodule(path)))
        if not linears <= seen:
            block_names.append(path)
        seen |= linears
    return block_names


def _linears(module: nn.Module) -> Iterator[nn.Module]:
    return filter(is_linear, module.modules())


# Blocks named by the model


def _named(model: nn.Module) -> Iterator[str]:
    """Paths from `fp4train_blocks` of the model, or of the outermost modules inside it that define
    it.
    """
    answered: list[str] = []
    for path, module in model.named_modules():
        # Looked up statically: a wrapper such as torch.compile's forwards attribute access, but has
        # other paths.
        if inspect.getattr_static(module, NAMED_BY, None) is None or any(
            _inside(path, outer) for outer in answered
        ):
            continue
        answered.append(path)
        yield from (_join(path, block) for block in _answer(module))


def _answer(module: nn.Module) -> list[str]:
    """Paths inside `module` that its `fp4train_blocks` names, checked."""
    attribute = f"{type(module).__name__}.{NAMED_BY}"
    answer = getattr(module, NAMED_BY)
    if callable(answer) and not isinstance(answer, nn.Module):
        answer = answer()
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise TypeError(
            f"{attribute} gives {type(answer).__name__}; it must give the block paths (or "
            "modules) in order"
        )
    names: dict[nn.Module, str] = {}
    places = dict(module.named_modules(remove_duplicate=False))
    for name, part in places.items():
        names.setdefault(part, name)
    paths: list[str] = []
    for block in answer:
        if isinstance(block, str):
            known_answer = places.get(block)
            some = ", ".join(sorted(list(places)[1:], key=lambda name: name.count("."))[:8])
            wrong = (
                f"names {block!r}, which is not a module of {type(module).__name__}; it has "
                f"{some}, …"
            )
        elif isinstance(block, nn.Module):
            known_answer = block if block in names else None
            kind = type(block).__name__
            wrong = (
                f"gives a {kind} that is not part of {type(module).__name__}. If it has been "
                "replaced, give its path"
            )
            wrong += " instead"
        else:
            raise TypeError(
                f"{attribute} gives {block!r} as a block; a block is a path or a module"
            )
        if known_answer is None:
            raise ValueError(f"{attribute} {wrong}")
        paths.append(names[known_answer])
    for i, path in enumerate(paths):
        for other in paths[:i]:
            if _inside(path, other) or _inside(other, path):
                raise ValueError(f"{attribute} names blocks that overlap: {other!r} and {path!r}")
    with_linears = [path for path in paths if any(_linears(module.get_submodule(path)))]
    if not with_linears:
        raise ValueError(
            f"{attribute} names no block that holds a linear layer: "
            f"{', '.join(paths) or 'it is empty'}"
        )
    return with_linears


# Blocks found by structure


@dataclass(frozen=True)
class _Part:
    """A child that holds linear layers."""

    name: str
    path: str
    module: nn.Module

    @property
    def bare(self) -> bool:
        return is_linear(self.module)

    @property
    def numbered(self) -> bool:
        return re.search(r"\d$", self.name) is not None


@dataclass(frozen=True)
class _Block:
    path: str
    of_bare_linears: bool = False
    """Whether its stack holds only bare linear layers."""


def _by_structure(model: nn.Module) -> list[str]:
    blocks = list(_stacks(model, "", attributes=False))
    # Attributes of one class are weaker evidence than a list: they count only if every list is
    # inside one of them.
    wider = list(_stacks(model, "", attributes=True))
    if all(
        any(_inside(block.path, outer.path) and block.path != outer.path for outer in wider)
        for block in blocks
    ):
        blocks = wider
    return [b.path for b in blocks if not b.of_bare_linears] or [b.path for b in blocks]


def _stacks(module: nn.Module, path: str, *, attributes: bool) -> Iterator[_Block]:
    """The entries of the outermost stacks in `module`, whose path is `path`."""
    parts = _parts(module, path)
    entries = _entries(module, parts, attributes=attributes)
    bare = all(part.bare for part in entries)
    for part in parts:
        if part not in entries or _is_opened(module, part):
            yield from _stacks(part.module, part.path, attributes=attributes)
        else:
            yield _Block(part.path, bare)


def _parts(module: nn.Module, path: str) -> list[_Part]:
    # A container may hold a module twice; a child with two attribute names counts once.
    children = module._modules.items() if _is_container(module) else module.named_children()
    return [
        _Part(name, _join(path, name), child)
        for name, child in children
        if child is not None and any(_linears(child))
    ]


def _entries(module: nn.Module, parts: list[_Part], *, attributes: bool) -> list[_Part]:
    """The entries among `parts` that make `module` a stack."""
    if isinstance(module, nn.ModuleList):
        return parts
    parts = [part for part in parts if not part.bare]
    classes = Counter(type(part.module) for part in parts)
    repeated = [part for part in parts if classes[type(part.module)] >= 2]
    if isinstance(module, nn.Sequential):
        if repeated:
            return parts[parts.index(repeated[0]) : parts.index(repeated[-1]) + 1]
        return []
    if isinstance(module, nn.ModuleDict):
        if len(parts) >= 2 and all(part.numbered for part in parts):
            return parts
        return repeated
    if attributes:
        return _repeated_attributes(module, repeated)
    return []


def _repeated_attributes(module: nn.Module, repeated: list[_Part]) -> list[_Part]:
    numbered = [part for part in repeated if part.numbered]
    if len(numbered) >= 2:
        return numbered
    # Two attention modules of one layer also share a class. Without numbers, most weights must be
    # in the blocks.
    repeated = [
        part
        for part in repeated
        if type(part.module) not in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    ]
    inside = {linear for part in repeated for linear in _linears(part.module)}
    if _weights(inside) > 0.75 * _weights(_linears(module)):
        return repeated
    return []


def _weights(linears: Iterable[nn.Module]) -> int:
    return sum(math.prod(features(linear)) for linear in linears)


def _is_opened(stack: nn.Module, part: _Part) -> bool:
    """Whether an entry of a stack is not a block, because it is or holds a stack of blocks
    itself.
    """
    if isinstance(stack, nn.ModuleList) or (part.numbered and _is_container(stack)):
        return False
    if isinstance(part.module, nn.ModuleList):
        return True
    return any(
        not block.of_bare_linears and "expert" not in block.path[len(part.path) :].lower()
        for block in _stacks(part.module, part.path, attributes=False)
    )


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def _join(path: str, name: str) -> str:
    if path and name:
        return f"{path}.{name}"
    return path or name


def _inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")
