"""`fp4train export RUN to=compressed-tensors|modelopt`: a run as a folder of codes that serving
software multiplies.

    config.json         with quantization_config; for ModelOpt also hf_quant_config.json
    model.safetensors   or shards and their index: codes, scales, and what the plan keeps in high
                        precision
    the rest            as of to=hf; fp4train.json also says of which steps the codes are

vLLM, SGLang and TensorRT-LLM read such folders, transformers those of compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp4train.checkpoint.source import WeightSource
from fp4train.errors import UserError
from fp4train.exchange import activations
from fp4train.exchange.card import Description
from fp4train.exchange.evaluation import held_out
from fp4train.exchange.folder import SHARD_BYTES, Tell, new_export, silent, write_json
from fp4train.exchange.formats import (
    COMPRESSED_TENSORS,
    MODELOPT,
    configuration,
    modelopt_configuration,
)
from fp4train.exchange.huggingface import SPELLED, Exported, write_model
from fp4train.exchange.packed import PackedModel, pack
from fp4train.exchange.servers import not_in_transformers, not_served
from fp4train.exchange.stored import open_stored
from fp4train.exchange.trained import NamedRecipe, load_trained
from fp4train.text import counted, first_few, screen

CALIBRATION = 4
"""Batches of calibration, where the run did not measure its activations."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measurements of an export, for which the model runs: scales of activations, validation
    losses.

    Args:
        calibrate: number of batches over which the activations' scales are taken; None: those that
            the run measured, or 4.
        losses: True: the validation losses are measured: in high precision, in the recipe, and as
            served.
        paths: full key → path of the run's data, as the command line gives it.
    """

    calibrate: int | None = None
    losses: bool = True
    paths: Mapping[str, str | None] | None = None


def export_quantised(
    source: WeightSource | Path,
    out: Path,
    layout: str,
    *,
    stretch: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    measures: Measures = Measures(),
    shard: int = SHARD_BYTES,
    tell: Tell = silent,
) -> Exported:
    """Write the folder `out`: whole, or not at all.

    Args:
        source: weights of a run; of a path the newest.
        layout: "compressed-tensors" or "modelopt".
        stretch: a step of the stretch whose codes are packed; None: of the last one in which fprop
            quantised weights.
        dtype: dtype of the weights in high precision.

    Raises:
        UserError: there is no run, checkpoint or stretch; the layout has no format for what the
            stretch quantised, or the model none in `transformers`; the data for calibration is not
            there; `out` is there already, or the disk does not take it.
    """
    with new_export(out) as folder:
        tell(0, None, "verifying the checkpoint")
        model = open_stored(source)
        if model.family.loaded is not None:
            kind = type(model.config.model).__name__
            raise UserError(
                f"to={layout}: no serving software reads the codes of a {kind}; to=hf writes "
                "its weights"
            )
        packed = pack(model, layout, stretch)
        tell(0, None, "measuring losses and activations")
        x_amax, notes, losses = _measured(packed, measures)
        kept = packed.kept
        config = {"quantization_config": configuration(packed.format, layout, kept)}
        if layout == MODELOPT:
            write_json(folder, "hf_quant_config.json", modelopt_configuration(packed.format, kept))
        packed_stretch = packed.stretch
        not_loaded = _not_loaded(packed)
        described = Description(
            origin=f"Written by `fp4train export RUN to={layout}`: the weights of "
            f"{len(packed.layers)} linear layers as "
            f"{packed.format.name}, {packed.bytes_per_weight:.4f} bytes each; the rest in "
            f"{SPELLED[dtype]}.",
            layout=layout,
            in_transformers=layout == COMPRESSED_TENSORS and not not_loaded,
            config={**config, "dtype": SPELLED[dtype]},
            record={
                "recipe": packed_stretch.recipe.name,
                "stretch": [packed_stretch.start, packed_stretch.stop],
                "requantised": len(packed.requantised),
                "losses": losses,
            },
            notes=[*notes, *not_served(packed.format, layout), *not_loaded],
        )
        tensors = packed.streamed(x_amax, dtype)
        return write_model(folder, model, tensors, described, shard=shard, tell=tell)


def _not_loaded(packed: PackedModel) -> list[str]:
    """A sentence where transformers reads the layout, and does not load these codes."""
    if packed.layout != COMPRESSED_TENSORS:
        return []
    codes = not_in_transformers(
        packed.model.described()["model_type"],
        [*(layer.module for layer in packed.layers.values()), *packed.kept],
        four_bits=any(layer.spec.format.bits == 4 for layer in packed.layers.values()),
    )
    return [] if codes is None else [f"transformers does not load {codes}."]


def _measured(
    packed: PackedModel, measures: Measures
) -> tuple[dict[str, float], list[str], dict[str, float]]:
    """(The largest |x| of each packed layer; what is to be said, a sentence each; losses by what
    they are of).
    """
    model = packed.model
    stretch = packed.stretch
    if packed.format.static and measures.calibrate is None:
        recorded = activations.measured(packed)
    else:
        recorded = None
    scales = ""
    x_amax: dict[str, float] = {}
    unseen: list[str] = []
    if recorded is not None:
        amaxes, steps = recorded
        x_amax, unseen = activations.joint(packed, amaxes)
        scales = f"the last {steps} measured steps of training"
    losses: dict[str, float] = {}
    if measures.losses or (packed.format.static and recorded is None):
        trained = load_trained(model.source, measures.paths)
        trained_recipe = NamedRecipe(
            name=stretch.recipe.name, recipe=stretch.recipe, policy=trained.config.policy
        )
        if packed.format.static and recorded is None:
            if measures.calibrate is None:
                batches = CALIBRATION
            else:
                batches = measures.calibrate
            amaxes = activations.calibrated(trained, trained_recipe, batches)
            x_amax, unseen = activations.joint(packed, amaxes)
            scales = f"{counted(batches, 'batch', 'batches')} of training text"
        if measures.losses:
            recipes = {
                "high precision": trained.high_precision,
                stretch.recipe.name: trained_recipe,
            }
            if packed.requantised:
                served = replace(stretch.recipe, fused_scales=True)
                recipes |= {served.name: replace(trained_recipe, name=served.name, recipe=served)}
            scores = held_out(trained, list(recipes.values()), trained.config.eval.batches)
            losses = {
                name: score.values["loss"] for name, score in zip(recipes, scores, strict=True)
            }
    notes = screen(
        __package__,
        "notes.txt",
        packed=packed,
        divided=packed.divided,
        scales=scales,
        unseen=first_few(unseen, 3),
        losses=losses,
    )
    return x_amax, notes.splitlines(), losses
