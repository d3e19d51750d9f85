"""fp4train export RUN to=hf|compressed-tensors|modelopt out=FOLDER [key=value…]

A run as a folder that other software loads: configuration, weights, tokenizer and model card (docs/exchange.md).

  to=hf            for Hugging Face's transformers, and what reads its folders
  to=compressed-tensors, to=modelopt  the codes and scales of NVFP4, MXFP8 or FP8 that training used, for vLLM, SGLang
                                      and TensorRT-LLM
  out=FOLDER       a new folder; it is whole, or not there
  step=200         the checkpoint, as RUN@200; the default is the newest. RUN:ema is the run's average of weights
  dtype=float32    of the weights: float32 keeps every bit, bf16 rounds to half the size; of codes bf16 is the default,
                   for what is in high precision
  shard=5GB        largest file of weights
  plugins=[NAME]   packages of classes of your own that the run needs; --config-dir FOLDER: where they are

Of codes:

  stretch=100      a step of the steps whose codes are written; the default is the last in which fprop quantised weights
  calibrate=4      batches of training text for the scales of activations; the default takes what the run measured
                   (eval.errors_every), or 4
  losses=false     do not measure the validation loss in high precision, in the recipe and as served
  data.path=PATH   and other paths of the run's data, where it names some outside of itself

The moments are not read. Neither the model nor the data is built, but for losses and scales of activations.
"""

import re
from pathlib import Path
from typing import Any

from fp4train.cli.output import fitted, usage
from fp4train.cli.trained import STEP, named_paths, source_named
from fp4train.config import overrides, plugins
from fp4train.config.overrides import Option, count, read_options
from fp4train.errors import UserError
from fp4train.exchange.huggingface import DTYPES, export_huggingface
from fp4train.exchange.quantised import Measures, export_quantised
from fp4train.lab.studies.record import study_progress
from fp4train.text import near_miss, whole_number

USAGE = usage(__doc__)
TARGETS = ("hf", "compressed-tensors", "modelopt")
_OF_CODES = ("stretch", "calibrate", "losses")
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"([1-9][0-9]{0,8})(kB|MB|GB)", text)
    if match:
        return int(match[1]) * _UNITS[match[2]]
    return None


OPTIONS = {
    "to": Option(),
    "out": Option(Path),
    "step": STEP,
    "dtype": Option(),
    "shard": Option(_bytes, "shard={!r} must be a size: 500MB, 5GB", _bytes("5GB")),
    "stretch": Option(
        whole_number, "stretch={!r} must be a step of the steps whose codes are written"
    ),
    "calibrate": Option(count, "calibrate={!r} must be a number of batches from 1 on"),
    "losses": Option(overrides.truth, "losses={}: losses=false does not measure losses"),
}


def main(arguments: list[str]) -> int:
    """Write the folder and print what it holds; returns the exit code."""
    line = read_options(arguments, OPTIONS, keys=("plugins",))
    to, out, step, dtype, shard, *of_codes = (line.options[key] for key in OPTIONS)
    folders = overrides.own_folders(line.flags)
    line.check_flags(USAGE)
    if len(line.runs) != 1:
        raise UserError(f"export needs one run directory: {USAGE}")
    dtype = dtype or ("float32" if to == "hf" else "bf16")
    for key, value, allowed in (("to", to, TARGETS), ("dtype", dtype, tuple(DTYPES))):
        if value not in allowed:
            setting = f"{key}={value}" if value else f"{key}= is missing"
            raise UserError(
                f"{setting}: allowed are {', '.join(allowed)}{near_miss(value or '', allowed)}"
            )
    paths = named_paths(overrides.parse(line.overrides), tuple(OPTIONS))
    if to == "hf" and (
        named := [key for key, value in zip(_OF_CODES, of_codes, strict=True) if value is not None]
    ):
        raise UserError(
            f"{named[0]}= is about codes, and to=hf writes the weights themselves: {USAGE}"
        )
    if out is None or not out.name:
        raise UserError(f"export needs the name of a new folder, out=FOLDER: {USAGE}")
    with (
        plugins.using(overrides.plugins(line.overrides), folders),
        study_progress("tensor", every=10.0) as shown,
    ):
        how: dict[str, Any] = {"dtype": DTYPES[dtype], "shard": shard, "tell": shown}
        if to == "hf":
            exported = export_huggingface(source_named(line.runs[0], step), out, **how)
        else:
            stretch, calibrate, losses = of_codes
            measures = Measures(calibrate=calibrate, losses=losses is not False, paths=paths)
            exported = export_quantised(
                source_named(line.runs[0], step), out, to, stretch=stretch, measures=measures, **how
            )
    for note in exported.notes:
        print(fitted(note))
    if to == "hf":
        what = "of weights"
    else:
        what = "of codes, scales and weights"
    size = f"{exported.parameters:,} parameters, {exported.size / 1e6:,.1f} MB {what} in {dtype}"
    print(fitted(f"{out}: step {exported.step}, {size}"))
    return 0
