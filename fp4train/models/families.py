"""The registry of model families: what other software, the documentation and the tests need to know
of each.

A family is a `FAMILY` in the module `hf.py` of its folder. It is found there, in this package and
in a plugin alike. Nothing in it needs the package transformers: a `config.json` is a table of plain
values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fp4train.models import Architecture
from fp4train.models.common.hf import brief
from fp4train.parameters import ParameterSpec, Stored


def _never(name: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family, and its form in the folders of other software, most often Hugging Face's
    `transformers`.

    Args:
        shape: the class of `model=…`; its `parameters` say the name of each tensor in a folder.
        model_types: the values of `model_type` that `shape_of` reads.
        shape_of: the `model=…` that a `config.json` describes, with `vocab_size` rows of its
            embedding. It raises ValueError where a key or value is one that the family's model does
            not have, and names both.
        config_of: the `config.json` of a `shape`, without dtype and token ids; takes `vocab_size`,
            the rows of the embedding with padded ones, and `seq_len`, the tokens of a sequence in
            training. It raises ValueError where the other software has no such model, and says why.
        free: the fields of `shape` on which no weight depends, of its parts with a dot: a run that
            begins with a folder may choose them.
        check: raises ValueError where a `shape` has no names in a folder, and says why.
        computed: whether a stored tensor may be there for which there is no name, since the model
            computes its values.
        exact: ends of the names of tensors that stay in float32 where others become BF16.
        reads_bytes: whether published models read bytes: a folder without a tokenizer then has that
            of bytes.
        loaded: Python that loads a folder called FOLDER, where `transformers` does not.
        small: a small `shape` with every kind of block, nine in all, which four tensor-parallel
            ranks divide; the tests of all families take it.
    """

    shape: type
    model_types: tuple[str, ...]
    shape_of: Callable[[Mapping[str, Any]], Any]
    config_of: Callable[..., dict[str, Any]]
    free: tuple[str, ...]
    small: Any
    check: Callable[[Any], object] = repr
    computed: Callable[[str], bool] = _never
    exact: tuple[str, ...] = ()
    reads_bytes: bool = False
    loaded: str | None = None

    @property
    def name(self) -> str:
        """The name of the family's folder."""
        return self.shape.__module__.rpartition(".")[0].rpartition(".")[2]

    def names_of(self, shape: Any) -> dict[str, Stored]:
        """Names of the model's state dict → those of a folder, of the weights of experts those of
        their matrices. Tied weights, which are stored once, share one.

        Raises:
            ValueError: the model has no such names.
        """
        self.check(shape)
        specs = _stored(shape)
        return {
            spec.name: specs[spec.tied].stored if spec.tied and not spec.copied else spec.stored
            for spec in specs.values()
        }

    def copies_of(self, shape: Any) -> dict[str, str]:
        """Tensors that a folder may store although they are tied → the name of the weight that each
        must equal.
        """
        specs = _stored(shape)
        return {
            str(spec.stored): str(specs[spec.tied].stored) for spec in specs.values() if spec.tied
        }


def _stored(shape: Any) -> dict[str, ParameterSpec]:
    """The parameters of a model that are in a folder, by name."""
    return {spec.name: spec for spec in shape.parameters() if spec.stored}


def families(package: str = "fp4train.models") -> tuple[Family, ...]:
    """The families in the folders of a package, by folder. Most runs have no folder of other
    software and import none.

    Raises:
        ValueError: one cannot be imported.
    """
    registered: list[Family] = []
    for folder in map(Path, getattr(import_module(package), "__path__", ())):
        for file in sorted(folder.rglob("hf.py")):
            name = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
            try:
                module = import_module(name)
            except Exception as error:
                raise ValueError(
                    f"{name} cannot be imported: {type(error).__name__}: {error}"
                ) from error
            if isinstance(family := getattr(module, "FAMILY", None), Family):
                registered.append(family)
    return tuple(registered)


def family_of(shape: Architecture) -> Family:
    """The family of a `model=…`, in the package of its class.

    Raises:
        ValueError: it has no form in `transformers`.
    """
    kind = type(shape)
    for family in families(kind.__module__.rpartition(".")[0] or kind.__module__):
        if kind is family.shape:
            return family
    names = ", ".join(family.shape.__name__ for family in families())
    raise ValueError(f"{kind.__name__} has no form in transformers; these have one: {names}")


def family_for(config: Mapping[str, Any], plugins: Iterable[str] = ()) -> Family:
    """The family that reads a `config.json`.

    Args:
        plugins: packages of the user's, whose families count, too.

    Raises:
        ValueError: its `model_type` is missing or of no family, or a family cannot be imported.
    """
    kind = config.get("model_type")
    registered = [*families(), *(family for package in plugins for family in families(package))]
    for family in registered:
        if kind in family.model_types:
            return family
    names = ", ".join(name for family in registered for name in family.model_types)
    raise ValueError(f"model_type={brief(kind)} is not supported; supported are {names}")
