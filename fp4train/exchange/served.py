"""The loss of an exported folder as `transformers` computes it, beside that of the run."""

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fp4train.checkpoint.model_folder import read_config
from fp4train.data.passes import Passes
from fp4train.data.tokens import TokenData
from fp4train.errors import UserError, user_errors
from fp4train.exchange.evaluation import data_of, held_out
from fp4train.exchange.formats import COMPRESSED_TENSORS, MODELOPT
from fp4train.exchange.servers import not_in_transformers
from fp4train.exchange.trained import TrainedModel, load_trained
from fp4train.exchange.verify import Verified
from fp4train.text import printable, shortened

_REASON = 300
"""Characters of what transformers says of a folder that it does not load."""


def one_line(error: Exception) -> str:
    """An error of other software in one line."""
    return shortened(f"{type(error).__name__}: {' '.join(printable(str(error)).split())}", _REASON)


def served_losses(
    verified: Verified, batches: int, paths: Mapping[str, str | None] | None = None
) -> dict[str, float]:
    """Nats per token on so many batches of the run's held-out text, by what computed them.

    Raises:
        UserError: transformers, or what it needs for the folder, is not installed, or does not read
            the layout; or the data is not there.
    """
    if verified.layout == MODELOPT:
        raise UserError(
            f"loss={batches}: transformers does not run folders of ModelOpt; export "
            "to=compressed-tensors has the same "
            "codes, and vLLM runs both"
        )
    if verified.layout == COMPRESSED_TENSORS:
        codes = not_in_transformers(
            str(read_config(verified.folder).get("model_type")),
            [layer.module for layer in verified.layers],
            four_bits=any("weight_packed" in layer.parts for layer in verified.layers),
        )
        if codes is not None:
            raise UserError(
                f"loss={batches}: transformers does not load {codes}; the folder is for vLLM"
            )
    trained = load_trained(verified.source, paths)
    loss, tokens = transformers_loss(
        verified.folder, trained, batches, compressed=verified.layout == COMPRESSED_TENSORS
    )
    recipes = [trained.high_precision]
    if trained.trained_in is not None:
        recipes.append(trained.own)
    run_losses = {
        f"the run in {score.recipe}": score.values["loss"]
        for score in held_out(trained, recipes, batches)
    }
    return {f"the folder in transformers, {tokens:,} tokens": loss, **run_losses}


def transformers_loss(
    folder: Path, trained: TrainedModel, batches: int, *, compressed: bool
) -> tuple[float, int]:
    """(The mean loss, the targets that it is of); codes are multiplied in BF16, as
    compressed-tensors emulates them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it and its parts deprecate
        try:
            transformers: Any = importlib.import_module("transformers")
            if compressed:
                importlib.import_module("compressed_tensors")
        except ImportError as error:
            raise UserError(
                f"loss= needs {error.name}: pip install transformers compressed-tensors"
            ) from error
        with user_errors(
            Exception, before=f"loss=: transformers does not load {folder}: ", message=one_line
        ):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16 if compressed else torch.float32
            ).eval()
        settings = trained.config.train
        data = data_of(trained)
        if isinstance(data, TokenData):  # these models read ids alone
            data = replace(data, val=replace(data.val, inner_ends=None))
        loader = data.validation(batch_size=settings.batch_size, seq_len=settings.seq_len)
        passes = Passes(loader=loader, rows=settings.rows(1), batches=batches)
        total = 0.0
        for part in passes.parts:
            tokens, targets = loader.rows(part.start, len(part))
            with (
                torch.no_grad(),
                user_errors(
                    Exception,
                    before=f"loss=: transformers does not run {folder}: ",
                    message=one_line,
                ),
            ):
                logits = model(input_ids=tokens).logits.float()
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            total += float(losses)
    count = sum(passes.targets)
    return total / count, count
