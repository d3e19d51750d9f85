"""fp4train export RUN to=hf|compressed-tensors|modelopt out=FOLDER [key=value…]

A run as a folder that other software loads: configuration, weights, tokenizer
and model card (docs/exchange.md).

  to=hf            for Hugging Face's transformers, and what reads its folders
  to=compressed-tensors, to=modelopt  the codes and scales of NVFP4, MXFP8 or
                                      FP8 that training used, for vLLM, SGLang
                                      and TensorRT-LLM
  out=FOLDER       a new folder; it is whole, or not there. s3://BUCKET/FOLDER is
                   written to FOLDER, copied and removed
  step=200         the checkpoint, as RUN@200; the default is the newest
{kinds}
  dtype=float32    of the weights: float32 keeps every bit, bf16 rounds to half
                   the size; of codes bf16 is the default, for what is in high
                   precision
  shard=5GB        largest file of weights
  plugins=[NAME]   packages of classes of your own that the run needs;
                   --config-dir FOLDER: where they are

Of codes:

  stretch=100      a step of the steps whose codes are written; the default is
                   the last in which fprop quantised weights
  calibrate=4      batches of training text for the scales of activations; the
                   default takes what the run measured (eval.errors_every), or 4
  losses=false     do not measure the validation loss in high precision, in the
                   recipe and as served
  data.path=PATH   and other paths of the run's data, where it names some
                   outside of itself

The moments are not read. Neither the model nor the data is built, but for
losses and scales of activations.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4train.cli.output import fitted
from fp4train.cli.trained import source_named, with_weight_kinds
from fp4train.config.command_line import CommandLine, Count, WholeNumber, read_line
from fp4train.exchange import Measures, export_huggingface, export_quantised
from fp4train.exchange.huggingface import DTYPES
from fp4train.lab.studies import study_progress
from fp4train.paths import StoreText
from fp4train.run.remote import copied_to
from fp4train.text import check_choice

__doc__ = with_weight_kinds(__doc__)

TARGETS = ("hf", "compressed-tensors", "modelopt")
_OF_CODES = ("stretch", "calibrate", "losses")
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandLine):
    to: str
    out: StoreText
    step: WholeNumber | None = None
    dtype: str = ""
    shard: str = "5GB"
    stretch: WholeNumber | None = None
    calibrate: Count | None = None
    losses: bool | None = None

    def __post_init__(self) -> None:
        check_choice("to", self.to, TARGETS)
        check_choice("dtype", self.weight_dtype, DTYPES)
        if not Path(self.out).name:
            raise ValueError(f"out={self.out} must be the name of a new folder")
        if self.to == "hf":
            about_codes = [key for key in _OF_CODES if getattr(self, key) is not None]
            for key in (*about_codes, *self.paths):
                raise ValueError(f"{key}= is for codes, and to=hf writes the weights themselves")
        _ = self.shard_bytes  # refused where it is no size

    @property
    def weight_dtype(self) -> str:
        """The name of the dtype of weights and, beside codes, of what is in high precision."""
        default = "float32" if self.to == "hf" else "bf16"
        return self.dtype or default

    @property
    def shard_bytes(self) -> int:
        match = re.fullmatch(r"([1-9][0-9]{0,8})(kB|MB|GB)", self.shard)
        if match is None:
            raise ValueError(f"shard={self.shard!r} must be a size: 500MB, 5GB")
        return int(match[1]) * _UNITS[match[2]]


def main(arguments: list[str]) -> int:
    """Write the folder and print what it holds; returns the exit code."""
    line = read_line(arguments, ExportOptions, __doc__, keys=("plugins",), paths=True)
    source = source_named(line.run, line.step)
    with (
        line.using_plugins(),
        study_progress("tensor", every=10.0) as shown,
        copied_to(line.out) as out,
    ):
        how: dict[str, Any] = {
            "dtype": DTYPES[line.weight_dtype],
            "shard": line.shard_bytes,
            "tell": shown,
        }
        if line.to == "hf":
            exported = export_huggingface(source, out, **how)
        else:
            measures = Measures(
                calibrate=line.calibrate, losses=line.losses is not False, paths=line.paths
            )
            exported = export_quantised(
                source, out, line.to, stretch=line.stretch, measures=measures, **how
            )
    for note in exported.notes:
        print(fitted(note))
    if line.to == "hf":
        what = "of weights"
    else:
        what = "of codes, scales and weights"
    size = f"{exported.size / 1e6:,.1f} MB {what} in {line.weight_dtype}"
    print(fitted(f"{line.out}: step {exported.step}, {exported.parameters:,} parameters, {size}"))
    return 0
