"""Evaluation of a trained model on text: its loss and bits per byte, in any recipe.

    bits per byte = −Σ log₂ p(token) / bytes of the text

The bytes are those of the text that the tokens stand for, by the tokenizer; the ends of documents
cost bits and stand for none. It compares models of different tokenizers, as a loss per token does
not.

`held_out` measures the run's own validation text, in the order and arithmetic of its `val/loss`.
`texts` measures other text: each document by itself, after the id that ends a document, in windows
of the context, so that each token is predicted once. Sequences of equal length share a batch:
padding would enter the scales of a recipe. Probabilities are over all ids of the head, padded ones
included, as in training and in other software.

Results are kept with the run that they are of (`record`): as events in its metrics, and so in its
tracker.

    {"step": 300, "event": "evaluation", "task": "held-out text", "recipe": "NVFP4", …}

The step is that of the checkpoint, so that a resume from before it leaves the event out with all
else that it undoes. Where no process trains in the directory, this one holds its lock and appends
to the log. Where one does, the log is that one's, and it is asked to log the results between two
steps, as it is asked for swaps (`run/record/inbox.py`).
"""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4train.checkpoint.layout import WEIGHTS
from fp4train.config.schema import plain
from fp4train.data.encoding import encode_document
from fp4train.data.files import files_of, read_pieces
from fp4train.data.passes import Passes
from fp4train.data.source import RunData
from fp4train.data.tokens import Ids, Tokenizer, begin_of_document, token_bytes
from fp4train.errors import UserError
from fp4train.exchange.trained import NamedRecipe, TrainedModel
from fp4train.precision.settings import ConstantWeights
from fp4train.run.record import directory as run_directory
from fp4train.run.record.inbox import EVALUATION, ask, cancel_request, wait_for_answer
from fp4train.run.record.trust import check_paths
from fp4train.track import NullTracker, read_metrics, start_tracker
from fp4train.track.config import METRICS

WAIT = 10.0
"""Seconds for the answer of the process that trains."""
HELD_OUT = "held-out text"
TEXT_SUFFIXES = (".txt", ".md", ".py")
LOGITS_AT_ONCE = 1 << 25
"""Logits of a batch: 128 MB in float32."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The scores of a model in one recipe on one task; `values` by the name of the metric."""

    task: str
    recipe: str
    values: dict[str, float]


def data_of(trained: TrainedModel) -> RunData:
    """The run's data, training and validation text; nothing of it is written.

    Raises:
        UserError: it is not there, or lies outside of the run and was not named by this user.
    """
    if trained.step is None:
        raise UserError(
            f"{trained.source} is no run and has no held-out text: give text=PATH or task=NAME"
        )
    check_paths(trained.cfg, trained.paths)
    with tempfile.TemporaryDirectory() as place:
        run_directory.copy_files(trained.source, Path(place), run_directory.TOKENIZER)
        return trained.config.data.build(
            Path(place), trained.config.train.seq_len, trained.config.run.seed
        )


def held_out(
    trained: TrainedModel, recipes: Sequence[NamedRecipe], batches: int | None
) -> Iterator[Score]:
    """The scores on the run's held-out text.

    Args:
        batches: most batches of the run's size; None: all of the text.

    Raises:
        UserError: the data is not there, or a loss is not finite.
    """
    settings = trained.config.train
    data = data_of(trained)
    loader = data.validation(batch_size=settings.batch_size, seq_len=settings.seq_len)
    passes = Passes(loader=loader, rows=settings.rows(1), batches=batches)
    table = token_bytes(data.tokenizer, data.vocab_size)
    for named in recipes:
        losses = []
        size = 0
        constant = ConstantWeights()
        with trained.masked():
            for number, part in enumerate(passes.parts):
                tokens, targets = passes.read(number)
                mean = trained.forward(named, tokens, targets, constant=constant)
                losses.append(float(mean * passes.weight(number)))
                scored = targets[: len(part)]
                size += _bytes(table, scored[scored >= 0].numpy())
        loss = sum(losses) / len(losses)
        yield _score(HELD_OUT, trained, named, loss, sum(passes.targets), size)


def texts(
    trained: TrainedModel, recipes: Sequence[NamedRecipe], path: str, rows: int
) -> Iterator[Score]:
    """The scores on a text file, or on all below a folder.

    Raises:
        UserError: there is no text, or no tokenizer, or a loss is not finite.
    """
    tokenizer = trained.text_tokenizer()
    table = token_bytes(tokenizer, trained.vocab_size)
    files = files_of(path, TEXT_SUFFIXES, "text")
    documents = [encode_document(read_pieces(file), tokenizer).tolist() for file in files]
    ids = [
        window for document in documents for window in windows(document, tokenizer, trained.context)
    ]
    tokens = sum(map(len, documents))
    if not tokens:
        raise UserError(f"text={path} holds no text")
    size = sum(_bytes(table, document) for document in documents)
    for named in recipes:
        loss = -sum(total for total, _ in log_likelihoods(trained, named, ids, rows)) / tokens
        yield _score(path, trained, named, loss, tokens, size)


def before_document(tokenizer: Tokenizer) -> int:
    """The id that stands before a document: the one that begins it, else the one that ends
    another.
    """
    begin = begin_of_document(tokenizer)
    if begin is None:
        return tokenizer.end_of_document
    return begin


Scored = tuple[Sequence[int], int]
"""Tokens, and how many of the last of them are scored; the first one never is."""


def windows(tokens: Sequence[int], tokenizer: Tokenizer, context: int) -> Iterator[Scored]:
    """A document in windows of at most `context` inputs: each of its tokens is scored once, the
    first one after the id that stands before a document; the last window reaches back as far as it
    can.
    """
    sequence = [before_document(tokenizer), *tokens]
    for start in range(1, len(sequence), context):
        end = min(start + context, len(sequence))
        yield sequence[max(0, end - context - 1) : end], end - start


def log_likelihoods(
    trained: TrainedModel, named: NamedRecipe, requests: Sequence[Scored], rows: int
) -> list[tuple[float, bool]]:
    """(The sum of log p of its scored tokens in nats, whether each of them is the most likely one)
    of each request.

    Args:
        rows: most sequences of a batch; those of a batch have the same length.
    """
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
    by_length: dict[int, list[int]] = {}
    constant = ConstantWeights()
    for number, (tokens, scored) in enumerate(requests):
        if scored:
            by_length.setdefault(len(tokens), []).append(number)
    for length, numbers in sorted(by_length.items(), reverse=True):
        most = max(1, min(rows, LOGITS_AT_ONCE // (length * trained.vocab_size)))
        for start in range(0, len(numbers), most):
            batch = numbers[start : start + most]
            inputs = torch.tensor([list(requests[number][0]) for number in batch])
            logits_BTV = trained.forward(named, inputs[:, :-1], constant=constant).float().cpu()
            for number, logits_TV, tokens_T in zip(batch, logits_BTV, inputs, strict=True):
                scores[number] = _scored(logits_TV, tokens_T[1:], requests[number][1])
    return scores


def _scored(logits_TV: Tensor, targets_T: Tensor, scored: int) -> tuple[float, bool]:
    logits_TV = logits_TV[-scored:]
    targets_T = targets_T[-scored:]
    total = logits_TV.log_softmax(-1).gather(1, targets_T[:, None]).double().sum()
    return float(total), bool((logits_TV.argmax(-1) == targets_T).all())


def _score(
    task: str, trained: TrainedModel, named: NamedRecipe, loss: float, tokens: int, size: int
) -> Score:
    """The scores of a loss per token.

    Args:
        size: bytes of the text; 0: they are not known.

    Raises:
        UserError: the loss is not finite.
    """
    if not math.isfinite(loss):
        raise UserError(f"the loss of {trained.title} is {loss} in {named.name}")
    values: dict[str, float] = {"loss": loss, "tokens": tokens}
    if size:
        values |= {"bytes": size, "bits_per_byte": loss * tokens / size / math.log(2)}
    return Score(task=task, recipe=named.name, values=values)


def _bytes(table: Ids | None, ids: Any) -> int:
    return 0 if table is None else int(table[ids].sum())


def record(trained: TrainedModel, scores: Sequence[Score]) -> str:
    """Keep scores with the run; a sentence that says where.

    Raises:
        UserError: the run's metrics cannot be read or written.
    """
    if trained.step is None:
        return f"{trained.source} is no run: not recorded"
    source = trained.source
    if not os.access(source, os.W_OK):
        return f"{source} cannot be written: not recorded"
    of = "" if trained.weights.kind == WEIGHTS else f" of {trained.weights.kind}"
    entries = [
        {
            "task": f"{s.task}{of}",
            "recipe": s.recipe,
            **{f"eval/{k}": v for k, v in s.values.items()},
        }
        for s in scores
    ]
    if run_directory.is_running(source):
        request = ask(source, {EVALUATION: {"step": trained.step, "scores": entries}})
        answer = wait_for_answer(source, request, WAIT)
        ended = answer is None and not run_directory.is_running(source)
        if answer is None and not (ended and cancel_request(source, request)):
            return (
                f"{source} is asked to record this: it does so between two steps, or when it is "
                "resumed"
            )
        if answer is not None:
            return f"{source}: {answer[1]}"
    with run_directory.locked(
        source, "another process uses it: run the command again to record the results"
    ):
        path = source / METRICS
        if path.exists():
            last = max((int(line["step"]) for line in read_metrics(path)), default=0)
        else:
            last = 0
        # No line is of a later step than this, so that none is dropped.
        end = max(last, trained.config.train.steps)
        tracker = start_tracker(
            trained.config.track,
            source,
            trained.config.run.name,
            plain(trained.cfg),
            resume_step=end,
        )
        try:
            for entry in entries:
                tracker.log_event(trained.step, EVALUATION, entry)
        finally:
            tracker.finish()
    if isinstance(tracker, NullTracker):
        return f"{source} has no metrics (track=none): not recorded"
    return str(path)
