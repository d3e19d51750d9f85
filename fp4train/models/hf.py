"""Families of models that also exist as Hugging Face's `transformers` classes: names of parameters,
configurations.

A family declares it in the `hf.py` of its folder, a module with what `HuggingFaceFamily` lists; it
is found there, in this package and in a plugin alike. Nothing in it needs the package transformers:
a `config.json` is a table of plain values.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fp4train.models import Architecture
from fp4train.models.common.hf import Stored, brief


class HuggingFaceFamily(Protocol):
    """Protocol of the modules `models/FAMILY/hf.py`: a family's configuration and weights in
    Hugging Face's form.

    A family whose folders other software loads than `transformers` also has `LOADED`, Python that
    does it with a folder called FOLDER. One with tensors that stay in float32 where others become
    BF16 has `EXACT`, the ends of their names. One whose published models read bytes has `BYTES =
    True`: a folder without a tokenizer then has that of bytes.
    """

    @property
    def ARCHITECTURE(self) -> type:
        """The class of `model=…` that the family's functions take and give."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]:
        """The values of `model_type` that `shape_of` reads."""

    @property
    def FREE(self) -> tuple[str, ...]:
        """The fields of `ARCHITECTURE` on which no weight depends, of its parts with a dot: a run
        that begins with a folder may choose them.
        """

    def shape_of(self, config: Mapping[str, Any]) -> Any:
        """The `model=…` that a `config.json` describes: an `ARCHITECTURE` with `vocab_size` rows of
        its embedding.

        Raises:
            ValueError: a key or value that the family's model does not have; the message names
                both.
        """

    def config_of(self, shape: Any, *, vocab_size: int, seq_len: int) -> dict[str, Any]:
        """The `config.json` of an `ARCHITECTURE`, without dtype and token ids.

        Args:
            vocab_size: rows of the embedding, padded ones included.
            seq_len: tokens of the sequences that it was trained with.

        Raises:
            ValueError: `transformers` has no such model; the message says why.
        """

    def names_of(self, shape: Any) -> Mapping[str, Stored]:
        """Names of the model's state dict → Hugging Face's, of the weights of experts those of
        their matrices. Tied weights, which are stored once, share one.
        """

    def computed(self, name: str) -> bool:
        """Whether a stored tensor may be there for which there is no name, since the model computes
        its values.
        """

    def copies_of(self, shape: Any) -> dict[str, str]:
        """Tensors that a folder may store although they are tied → the name of the weight that each
        must equal.
        """


def families(package: str = "fp4train.models") -> tuple[HuggingFaceFamily, ...]:
    """The families in the folders of a package: its modules `hf.py` with an `ARCHITECTURE`. Most
    runs have no folder of Hugging Face and import none of them.

    Raises:
        ValueError: one cannot be imported.
    """
    found: list[Any] = []
    for folder in map(Path, getattr(import_module(package), "__path__", ())):
        for file in sorted(folder.rglob("hf.py")):
            name = ".".join((package, *file.relative_to(folder).with_suffix("").parts))
            try:
                found.append(import_module(name))
            except Exception as error:
                raise ValueError(
                    f"{name} cannot be imported: {type(error).__name__}: {error}"
                ) from error
    return tuple(each for each in found if hasattr(each, "ARCHITECTURE"))


def family_of(shape: Architecture) -> HuggingFaceFamily:
    """The family of a `model=…`, in the package of its class.

    Raises:
        ValueError: it has no form in `transformers`.
    """
    kind = type(shape)
    beside = families(kind.__module__.rpartition(".")[0] or kind.__module__)
    found = next((family for family in beside if kind is family.ARCHITECTURE), None)
    if found is None:
        known = ", ".join(family.ARCHITECTURE.__name__ for family in families())
        raise ValueError(f"{kind.__name__} has no form in transformers; these have one: {known}")
    return found


def family_for(config: Mapping[str, Any], plugins: Iterable[str] = ()) -> HuggingFaceFamily:
    """The family that reads a `config.json`.

    Args:
        plugins: packages of the user's, whose families count, too.

    Raises:
        ValueError: its `model_type` is missing or of no family, or a family cannot be imported.
    """
    kind = config.get("model_type")
    known = [*families(), *(family for package in plugins for family in families(package))]
    found = next((family for family in known if kind in family.MODEL_TYPES), None)
    if found is None:
        names = ", ".join(name for family in known for name in family.MODEL_TYPES)
        raise ValueError(f"model_type={brief(kind)} is not supported; supported are {names}")
    return found
