"""fp4train sample RUN|FOLDER prompt="…"|chat="…" [tokens=64] [temperature=1] [recipe=NAME] [step=STEP] [--json]

Text that the model of a run, or of a Hugging Face folder, writes after a
prompt, in any recipe (docs/evaluation.md).

  prompt="def f("  the text to go on from
  chat="2+2?"      a question instead, which the model's chat template asks
  tokens=64        most tokens to write; it ends earlier at the end of a
                   document, and where the context is full
  temperature=1    what the logits are divided by; 0: the most likely token each
                   time
  top_k=40         only so many of the most likely tokens
  top_p=0.9        only the most likely tokens that together have this
                   probability
  seed=0           of the random numbers: the same command writes the same text
  recipe=bf16      and recipe.KEY=VALUE, policy=NAME; the default is the recipe
                   that the forward pass was trained in
  step=200         the checkpoint, as RUN@200; the default is the newest
{kinds}
  plugins=[NAME]   packages of the classes of your own that the run uses
  --json           as data, with the token ids
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from fp4train.cli.trained import KEYS, with_model, with_weight_kinds
from fp4train.config.command_line import CommandLine, WholeNumber, read_line
from fp4train.data.tokens import Tokenizer, begin_of_document
from fp4train.errors import UserError, user_errors
from fp4train.exchange import NamedRecipe, Sampling, TextStream, TrainedModel, generate
from fp4train.exchange.dialogue import Dialogue
from fp4train.text import counted

_log = logging.getLogger(__name__)

__doc__ = with_weight_kinds(__doc__)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(CommandLine, Sampling):
    prompt: str | None = None
    chat: str | None = None
    step: WholeNumber | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.chat is None):
            raise ValueError("sample needs prompt=… or chat=…, one of them")


def main(arguments: list[str]) -> int:
    """Print the text as it is sampled; returns the exit code."""
    line = read_line(arguments, SampleOptions, __doc__, keys=KEYS, paths=True, data=True)

    def task(trained: TrainedModel, named: Sequence[NamedRecipe]) -> int:
        if len(named) > 1:
            raise UserError(
                f"sample writes in one recipe, not in {', '.join(recipe.name for recipe in named)}"
            )
        return _sample(trained, named[0] if named else trained.own, line)

    return with_model(line, line.step, task)


class _Prompt(NamedTuple):
    """What a text is written behind.

    Args:
        ends: tokens that end the text. end: text that ends it, in an answer; empty: there is none.
    """

    text: str
    ids: list[int]
    ends: Sequence[int]
    end: str = ""


def _prompt(trained: TrainedModel, tokenizer: Tokenizer, line: SampleOptions) -> _Prompt:
    """The prompt, or the question in the chat template of the data."""
    asked = line.prompt or line.chat or ""
    with user_errors(UnicodeEncodeError, before="what is asked is no UTF-8 text: "):
        asked.encode()
    spelt = next((s for s in getattr(tokenizer, "special_tokens", ()) if s in asked), None)
    if line.chat is not None:
        if spelt is not None:
            _log.warning("chat= spells %s, which is read as that token", spelt)
        chat = Dialogue.of(trained)
        text = chat.text([{"role": "user", "content": line.chat}])
        return _Prompt(text, chat.encode(text), chat.ends, chat.spelt_end)
    if spelt is not None:
        _log.warning("prompt= is text: %s is read as its characters; chat= asks", spelt)
    ids = tokenizer.encode(asked)
    if (begin := begin_of_document(tokenizer)) is not None:
        ids = [begin, *ids]
    return _Prompt(asked, ids, [tokenizer.end_of_document])


def _sample(trained: TrainedModel, named: NamedRecipe, line: SampleOptions) -> int:
    tokenizer = trained.text_tokenizer()
    prompt, ids, ends, end = _prompt(trained, tokenizer, line)
    shows_tokens = not (line.as_data or end)
    stream = TextStream(tokenizer, ids)

    def stops(row: int) -> bool:
        return end != "" and end in stream.text

    began = time.perf_counter()
    written: list[int] = []
    for (token,) in generate(trained, [ids], line, named=named, ends=ends, stops=stops):
        if not written and line.chat is None and not line.as_data:
            print(prompt, end="")
        assert token is not None
        written.append(token)
        grown = stream.add(token)
        if shows_tokens:
            print(grown, end="", flush=True)
    ending = stream.end()
    seconds = time.perf_counter() - began
    ended = written[-1] in ends or stops(0)
    text = stream.text.partition(end)[0] if end else stream.text
    if line.as_data:
        body = {
            "run": str(trained.source),
            "step": trained.step,
            "recipe": named.name,
            "prompt": prompt,
            **{field.name: getattr(line, field.name) for field in fields(Sampling)},
            "text": text,
            "ids": written,
            "ended": ended,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(body))
        return 0
    print(ending if shows_tokens else text)
    full = "" if ended or len(written) == line.tokens else "; the context is full"
    where = f"{trained.title} in {named.name}"
    print(f"{where}: {counted(len(written), 'token')} in {seconds:.2f} s{full}", file=sys.stderr)
    return 0
