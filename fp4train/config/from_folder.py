"""`init=FOLDER`: a run that begins with the weights of a Hugging Face folder has that folder's
model and tokenizer.

The sections `model` and `data.tokenizer` are made of the folder's `config.json` and
`tokenizer.json`, so that the saved configuration of the run describes its model without the folder.
"""

import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fp4train.checkpoint import model_folder
from fp4train.checkpoint.source import WeightSource
from fp4train.config.binding import MISSING
from fp4train.config.plugins import named
from fp4train.config.schema import keys, plain
from fp4train.config.unknown import unknown_key
from fp4train.data.tokenizers import Bytes, Pretrained
from fp4train.errors import UserError, user_errors
from fp4train.models.families import Family, family_for

_log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def with_folder(cfg: DictConfig, changed: Iterable[str]) -> DictConfig:
    """`cfg` with the model and the tokenizer of the folder that `cfg.init` names; unchanged where
    it names none.

    Args:
        changed: the keys that the command line sets. Those of the model that change no weight are
            kept, and so is a tokenizer that it names.

    Raises:
        UserError: the folder's model is not supported, the command line contradicts it, or it has
            no tokenizer.
    """
    if not isinstance(cfg.init, str) or not (source := WeightSource.parse(cfg.init)).is_folder:
        return cfg
    folder = source.path
    changed = set(changed)
    if cfg.init_step is not None or source != WeightSource(path=folder):
        if cfg.init_step is not None:
            named = f"init_step={cfg.init_step}"
        else:
            named = f"init={source}"
        raise UserError(
            f"{named} is the step of a checkpoint, and init={folder} is no run: leave it out"
        )
    values = plain(cfg) | {"model": _model(cfg, folder, changed)}
    if (section := _tokenizer(cfg, folder, changed)) is not None:
        values["data"] = values["data"] | {"tokenizer": section}
    return OmegaConf.create(values)


def model_of(folder: Path) -> tuple[Family, Any]:
    """The family of a folder's model, and the `model=…` that its configuration describes.

    Raises:
        UserError: it cannot be read, or is not supported.
    """
    described = model_folder.read_config(folder)
    strange = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
    with user_errors(*strange, before=f"{folder / model_folder.CONFIG}: "):
        family = family_for(described, named())
        return family, family.shape_of(described)


def _model(cfg: DictConfig, folder: Path, changed: set[str]) -> dict[str, Any]:
    """The section `model`."""
    if "model" in changed:
        raise UserError(
            f"init={folder} brings its model: leave out model=…; single keys that change no "
            "weight can be given (model.recompute=true)"
        )
    family, shape = model_of(folder)
    kind = type(shape)
    package = kind.__module__.rpartition(".")[0] or kind.__module__
    section = OmegaConf.create(
        {"_target_": f"{package}.{kind.__name__}", **dataclasses.asdict(shape)}
    )
    model_keys = [f"model.{name}" for name in keys(plain(section))]
    for key in sorted(key for key in changed if key.startswith("model.")):
        name = key.removeprefix("model.")
        chosen = OmegaConf.select(cfg, key)
        if not any(f"{name}.".startswith(f"{free}.") for free in family.free):
            if key not in model_keys:
                raise unknown_key(key, model_keys)
            if chosen != (of_folder := OmegaConf.select(section, name)):
                free_keys = ", ".join(f"model.{free}" for free in family.free)
                raise UserError(
                    f"{key}={chosen} contradicts init={folder}, whose {model_folder.CONFIG} "
                    f"makes it {of_folder}: leave it out (a run may choose {free_keys})"
                )
        OmegaConf.update(section, name, chosen, merge=False, force_add=True)
    return plain(section)


def _tokenizer(cfg: DictConfig, folder: Path, changed: set[str]) -> dict[str, Any] | None:
    """The section `data.tokenizer`; None: it stays as it is."""
    configured = plain(cfg)["data"].get("tokenizer")
    if configured is None:
        return None  # the data are ids of tokens
    named = any(key == "data.tokenizer" or key.startswith("data.tokenizer.") for key in changed)
    if named and configured.get("name") != MISSING:
        if model_folder.has_file(folder, TOKENIZER) and "name" not in configured:
            warn_of_other_tokens(str(cfg.init))
        return None
    if not model_folder.has_file(folder, TOKENIZER):
        if not named and model_of(folder)[0].reads_bytes:
            return {"_target_": f"{Bytes.__module__}.{Bytes.__name__}"}
        raise UserError(
            f"{folder} has no {TOKENIZER}: name the tokenizer of its model, "
            "data/tokenizer=pretrained data.tokenizer.name=…, or data/tokenizer=bytes where its "
            "ids are those of bytes"
        )
    section = {
        "_target_": "fp4train.data.tokenizers.Pretrained",
        **dataclasses.asdict(Pretrained(name=str(folder))),
    }
    if named:
        more = {key: value for key, value in configured.items() if key != "name"}
    else:
        more = {"end_of_document": _end(folder)}
    if (
        lost := Pretrained(name=str(folder), end_of_document=more["end_of_document"])
        .open()
        .lost_text()
    ) is not None:
        raise UserError(
            f"{folder / TOKENIZER} does not give text back that it encodes: a line of Python "
            f"becomes {lost!r}. Where that is meant, name it: data/tokenizer=pretrained "
            f"data.tokenizer.name={folder}"
        )
    return section | more


def warn_of_other_tokens(init: str) -> None:
    """Say that a run begins with the embedding of another tokenizer's tokens."""
    _log.warning(
        "init=%s brings a tokenizer, and the command names one of another kind: unless both give "
        "a text the same ids, embedding and head begin with the rows of other tokens; without "
        "data/tokenizer=… the run has the tokenizer of its weights",
        init,
    )


def _end(folder: Path) -> str | None:
    """The token that ends a document, as the tokenizer's configuration names it; None: it names
    none.
    """
    if not model_folder.has_file(folder, TOKENIZER_CONFIG):
        return None
    end = model_folder.read_table(folder, TOKENIZER_CONFIG).get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    return end if isinstance(end, str) else None
