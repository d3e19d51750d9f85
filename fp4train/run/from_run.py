"""`init=RUN`: a new run has the model and the tokenizer of the run whose weights it begins with,
unless the command names its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from fp4train.checkpoint.source import WeightSource
from fp4train.config.binding import bind, path_values
from fp4train.config.from_folder import warn_of_other_tokens
from fp4train.config.schema import Config, keys, plain, take_over
from fp4train.config.unknown import unknown_key
from fp4train.data.source import planned_vocab_size
from fp4train.data.tokens import TokenizerConfig
from fp4train.errors import UserError
from fp4train.keys import in_sections
from fp4train.models import Architecture
from fp4train.models.weightless import build_weightless
from fp4train.run.record import directory as run_directory, journal
from fp4train.text import screen

Shapes = Mapping[str, tuple[int, ...]]
"""Name in a model's state dict → shape."""


def saved_configuration(cfg: DictConfig) -> dict[str, Any] | None:
    """The configuration of the run that `cfg.init` names; None: it names none.

    Raises:
        UserError: it cannot be read.
    """
    if not isinstance(cfg.init, str):
        return None
    run = WeightSource.parse(cfg.init).path
    if not (run / run_directory.CONFIG).is_file():
        return None
    return plain(run_directory.read_trained(run))


def with_run(cfg: DictConfig, saved: Mapping[str, Any], changed: Sequence[str]) -> DictConfig:
    """`cfg` with the model and the tokenizer of the run that `cfg.init` names, unless the command
    names its own.

    A tokenizer that lies in a file elsewhere is left to the command to name.

    Args:
        saved: the run's configuration (`saved_configuration`).

    Raises:
        UserError: a key of the model that it has not is taken out.
    """
    combined = OmegaConf.create(plain(cfg))
    with open_dict(combined):
        if "model" not in changed:
            combined.model = saved["model"]
            for key in changed:
                if key.startswith("model.") and not take_over(combined, cfg, key):
                    raise unknown_key(key, list(keys(plain(combined))))
        section = tokenizer_section(saved)
        named = names_tokenizer(changed)
        if section and "tokenizer" in combined.data and not named and not _names_paths(section):
            combined.data.tokenizer = section
        elif named and _kind(section) not in ("", _kind(plain(combined)["data"].get("tokenizer"))):
            warn_of_other_tokens(str(cfg.init))
    return combined


def tokenizer_section(saved: Mapping[str, Any]) -> Any:
    """The section `data.tokenizer` of a saved configuration; None: it has none."""
    data = saved.get("data")
    return data.get("tokenizer") if isinstance(data, dict) else None


def names_tokenizer(changed: Sequence[str]) -> bool:
    """Whether the keys of a command name a tokenizer."""
    return any(in_sections(key, ["data.tokenizer"]) for key in changed)


def _kind(section: Any) -> str:
    """The name of the class that a section is of; empty where it names none."""
    if not isinstance(section, dict):
        return ""
    return str(section.get("_target_", "")).rpartition(".")[2]


def check_model(config: Config, cfg: DictConfig, saved: Mapping[str, Any], option: str) -> None:
    """Refuse a model whose weights have other names or shapes than those of the run that `cfg.init`
    names, before any data are read.

    Args:
        config: the typed configuration of `cfg`.
        saved: the run's configuration (`saved_configuration`).
        option: the option of the group `model` that the command names; "": none.

    Raises:
        UserError: it is another model; the keys that make it one are named.
    """
    source = config.init_weights
    if source is None:
        return
    brought = {"model": saved["model"]}
    chosen = {"model": plain(cfg)["model"]}
    differences = journal.changes(journal.flat(brought), journal.flat(chosen))
    if not differences:
        return
    try:
        rows = getattr(config.model, "vocab_size", None)
        vocab_size = planned_vocab_size(config.data, rows, source.path)
    except UserError:  # said where the data are opened
        return

    def shapes(section: object) -> Shapes | None:
        return _shapes(section, vocab_size, config.train.seq_len)

    theirs = shapes(brought["model"])
    ours = shapes(chosen["model"])
    if theirs is None or ours is None or theirs == ours:
        return
    culprits = {
        key: values
        for key, values in differences.items()
        if shapes(_with_key(brought, key, values[1])["model"]) != theirs
    } or differences
    raise UserError(
        screen(
            __package__,
            "contradiction.txt",
            option=option,
            init=config.init,
            file=run_directory.CONFIG,
            culprits=[
                (key, *("null" if value is None else str(value) for value in values))
                for key, values in culprits.items()
            ],
        )
    )


def _shapes(section: object, vocab_size: int, seq_len: int) -> Shapes | None:
    """The shapes of the weights of a section `model`; None: it cannot be built without them."""
    try:
        shape = bind(section, Architecture, "model")
        model = build_weightless(shape, vocab_size=vocab_size, seq_len=seq_len)
    except (UserError, ValueError, RuntimeError):
        return None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _with_key(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`values` with another value of one full key."""
    changed = OmegaConf.create(dict(values))
    OmegaConf.update(changed, key, value, merge=False, force_add=True)
    return plain(changed)


def _names_paths(section: Mapping[str, Any]) -> bool:
    """Whether the section of a tokenizer names a file or a folder."""
    return bool(list(path_values(section, TokenizerConfig)))
