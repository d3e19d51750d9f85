"""`fp4train export RUN to=hf`: a run as a folder that `transformers` loads.

    config.json  generation_config.json  model.safetensors (or shards and their index)
    tokenizer.json  tokenizer_config.json  special_tokens_map.json  README.md, the model card
    fp4train.json, which says of which step and kind the weights are

Float32, the default, keeps every bit of the weights; BF16 halves the folder and rounds each weight
to nearest, ties to even. Rows that pad the vocabulary stay: no token has their ids.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp4train.checkpoint.layout import WEIGHTS
from fp4train.checkpoint.source import WeightSource
from fp4train.checkpoint.tensors import StreamedTensor
from fp4train.data.template import kept_template
from fp4train.data.tokens import begin_of_document
from fp4train.errors import UserError
from fp4train.exchange.card import Description, measured, model_card
from fp4train.exchange.dialogue import Dialogue
from fp4train.exchange.folder import (
    SHARD_BYTES,
    Tell,
    new_export,
    silent,
    write_json,
    write_weights,
)
from fp4train.exchange.loaded import CURE, OTHER_CLASS, loaded_differently
from fp4train.exchange.stored import StoredModel, open_stored
from fp4train.exchange.tokenizer import (
    FileTokenizer,
    TokenizerSettings,
    stored_tokenizer,
    write_tokenizer,
)
from fp4train.files import Folder
from fp4train.run.record.generation import SETTINGS, kept_generation

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
CARD = "README.md"
RECORD = "fp4train.json"
"""The file that says which weights of the run a folder has."""
SPELLED = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An export: `size` is the bytes of all weights, `notes` are differences from the run, a
    sentence each.
    """

    step: int
    parameters: int
    size: int
    notes: list[str]


def export_huggingface(
    source: WeightSource | Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard: int = SHARD_BYTES,
    tell: Tell = silent,
) -> Exported:
    """Write the folder `out`: whole, or not at all.

    Args:
        source: weights of a run; of a path the newest.
        dtype: dtype of the weights in the folder, float32 or BF16.
        shard: bytes of weights in one file, at most.
        tell: hears how far it is.

    Raises:
        UserError: there is no run or no such checkpoint, or its weights are damaged; the model has
            no form in `transformers`; `out` is there already, or the disk does not take it.
    """
    with new_export(out) as folder:
        tell(0, None, "verifying the checkpoint")
        model = open_stored(source)
        exact = all(model.dtype(name) == dtype for name in model.parts)
        if exact:
            how = "every bit kept"
        else:
            how = "rounded to nearest, ties to even, from the float32 weights of training"
        return write_model(
            folder,
            model,
            (model.streamed(name, dtype) for name in model.parts),
            Description(
                origin="Written by `fp4train export RUN to=hf`; the weights are in "
                f"{SPELLED[dtype]}, {how}.",
                layout="hf",
                in_transformers=model.family.loaded is None,
                config={"dtype": SPELLED[dtype]},
            ),
            shard=shard,
            tell=tell,
        )


def write_model(
    folder: Folder,
    model: StoredModel,
    tensors: Iterable[StreamedTensor],
    described: Description,
    *,
    shard: int = SHARD_BYTES,
    tell: Tell = silent,
) -> Exported:
    """Write into a new folder what every export has: configuration, tokenizer, card, record and
    weights; the notes of the tokenizer are added to those of `described`.
    """
    notes = [*described.notes, *write_tables(folder, model, described.config)]
    if (kind := model.source.kind) != WEIGHTS:
        notes.append(
            f"The weights are those that the run keeps as {kind}; its losses are of others."
        )
    tokenizer = stored_tokenizer(model.config, model.run)
    differences = list(loaded_differently(folder.path, tokenizer))
    notes += [f"{difference}. {CURE}." for difference in differences]
    results = measured(model)
    notes += results.notes
    reader = "AutoTokenizer"
    if differences:
        reader = OTHER_CLASS
    described = replace(described, notes=notes, tokenizer="" if tokenizer is None else reader)
    card = model_card(model, results, described)
    folder.write(CARD, card.encode())
    weights = {"step": model.saved.step, "weights": model.source.kind}
    write_json(folder, RECORD, {**weights, **described.record})
    size = write_weights(folder, tensors, shard=shard, tell=tell)
    return Exported(step=model.saved.step, parameters=model.parameters, size=size, notes=notes)


def write_tables(folder: Folder, model: StoredModel, config: Mapping[str, Any]) -> list[str]:
    """Write `config.json`, `generation_config.json` and the tokenizer; returns what differs from
    the run, a sentence each.

    Args:
        config: entries of its `config.json` beside the model's shape and tokens.
    """
    tokenizer = stored_tokenizer(model.config, model.run)
    generation = kept_generation(model.run)
    ends: list[int] = []
    spelt = pad = settings = None
    if tokenizer is not None:
        ends, spelt = _ends(tokenizer, model.run)
        settings = TokenizerSettings.of_run(tokenizer, model.run, generation.pad)
        pad = settings.pad
    ids = {
        "bos_token_id": begin_of_document(tokenizer),
        "eos_token_id": generation.ends_of_model(ends),
        "pad_token_id": None,  # the row of a padding token is not learned
    }
    described = model.described()
    write_json(folder, "config.json", {**described, **ids, **config})
    write_json(folder, SETTINGS, generation.settings_of_model(ends, pad))
    if tokenizer is None or settings is None:
        return ["The run was trained on token ids: the folder has no tokenizer."]
    # of a recurrence there is none
    most = described.get("max_position_embeddings", model.config.train.seq_len)
    notes = write_tokenizer(folder, tokenizer, settings, model.run, most)
    if spelt:
        notes.append(
            f"Answers end with the text {spelt!r}, which is no token: stop generation there."
        )
    if (spare := model.vocab_size - tokenizer.vocab_size) > 0:
        notes.append(
            f"The last {spare} of {model.vocab_size} rows of the vocabulary pad it: no token "
            "has them."
        )
    return notes


def _ends(tokenizer: FileTokenizer, run: Path) -> tuple[list[int], str]:
    """The ids that end a text, those of learned answers too, and a text that ends them instead."""
    template = kept_template(run)
    if template is not None and template.trained:
        dialogue = Dialogue(template, tokenizer)
        with suppress(UserError):  # some refuse a question alone
            return dialogue.ends, dialogue.spelt_end
    return [tokenizer.end_of_document], ""
