"""What a command starts from: the configuration of a run, and of the run that it goes on with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from fp4train.config.schema import Config, to_config
from fp4train.run.record.journal import RecipeChoice


@dataclass(frozen=True, kw_only=True)
class Command:
    """The configuration that a command starts from.

    Args:
        config: the typed configuration.
        cfg: the plain configuration, to be kept with the run.
        saved: configuration that RUN of resume=RUN holds, as it was read; None: there is no such
            run, or it was not read.
        swap: recipe that a resumed run swaps to; None: it keeps its own.
        named: the keys that the command line gives.
        point: overrides of this job of a sweep that its other jobs do not share.
    """

    config: Config
    cfg: DictConfig
    saved: Mapping[str, Any] | None = None
    swap: RecipeChoice | None = None
    named: Collection[str] = ()
    point: str = ""

    @classmethod
    def of(cls, cfg: DictConfig, saved: Mapping[str, Any] | None = None) -> Command:
        """The command that a composed configuration is.

        Raises:
            UserError: see `to_config`.
        """
        return cls(config=to_config(cfg), cfg=cfg, saved=saved)
