"""Recipes in training loops of other people: transformers' Trainer, Accelerate, Lightning, or a
plain loop.

    model = fp4train.convert(model)
    trainer = Trainer(model=model, …, callbacks=[TrainerPrecision("nvfp4", phases=…)])

| class | loop |
|---|---|
| `TrainerPrecision` | a callback of transformers' Trainer, and of what is derived from it (TRL) |
| `AcceleratePrecision` | a loop of one's own with Accelerate |
| `LightningPrecision` | a callback of Lightning's Trainer |
| `Precision` | any other loop |

A framework is imported when its class is asked for. Importing this package makes `import peft` and
transformers' Trainer work beside a Transformer Engine without kernels (the wheel alone, which this
project uses for its recipe classes): they import it wherever it is installed, and it raises. With
its own build switch set for the time of the import its pure-Python part loads, and later imports
find it loaded.
"""

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from fp4train.backends.te.availability import recipe_module, version
from fp4train.errors import UserError
from fp4train.integrations.loop import Precision

if TYPE_CHECKING:
    from fp4train.integrations.accelerate import AcceleratePrecision
    from fp4train.integrations.lightning import LightningPrecision
    from fp4train.integrations.trainer import TrainerPrecision

__all__ = ["AcceleratePrecision", "LightningPrecision", "Precision", "TrainerPrecision"]

_PLACES = {
    "AcceleratePrecision": ("accelerate", "accelerate"),
    "LightningPrecision": ("lightning", "lightning"),
    "TrainerPrecision": ("trainer", "transformers"),
}
"""Class → its module here, and the package that it needs."""

if version() is not None:
    # too old, or broken in another way: who imports it sees its own error
    with contextlib.suppress(ValueError):
        recipe_module()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _PLACES[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise UserError(f"{name} needs {package}: pip install 'fp4train[integrations]'") from error
