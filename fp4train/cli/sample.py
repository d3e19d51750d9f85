"""fp4train sample RUN|FOLDER prompt="…" [tokens=64] [temperature=1] [seed=0] [recipe=NAME] [step=STEP] [--json]

Text that the model of a run, or of a Hugging Face folder, writes after a prompt, in any recipe (docs/evaluation.md).

  prompt="def f("  the text to go on from
  tokens=64        most tokens to write; it ends earlier at the end of a document, and where the context is full
  temperature=1    what the logits are divided by; 0: the most likely token each time
  top_k=40         only so many of the most likely tokens
  top_p=0.9        only the most likely tokens that together have this probability
  seed=0           of the random numbers: the same command writes the same text
  recipe=bf16      and recipe.KEY=VALUE, policy=NAME; the default is the recipe that the forward pass was trained in
  step=200         the checkpoint, as RUN@200; the default is the newest. RUN:ema is the run's average of weights
  plugins=[NAME]   packages of the classes of your own that the run uses
  --json           as data, with the token ids
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from fp4train.cli.output import usage
from fp4train.cli.trained import CHOSEN, STEP, with_model
from fp4train.config.overrides import Option, count, number, read_options
from fp4train.data.tokens import begin_of_document
from fp4train.errors import UserError, user_errors
from fp4train.exchange.generation import Sampling, TextStream, generate
from fp4train.exchange.trained import NamedRecipe, TrainedModel
from fp4train.text import counted, whole_number

USAGE = usage(__doc__)
OPTIONS = {
    "prompt": Option(),
    "step": STEP,
    "tokens": Option(count, "tokens={!r} must be a whole number from 1", 64),
    "temperature": Option(number, "temperature={!r} must be a number ≥ 0", 1.0),
    "top_k": Option(count, "top_k={!r} must be a whole number from 1"),
    "top_p": Option(number, "top_p={!r} must be a number above 0 and at most 1", 1.0),
    "seed": Option(whole_number, "seed={!r} must be a whole number from 0", 0),
}


def main(arguments: list[str]) -> int:
    """Print the text as it is sampled; returns the exit code."""
    line = read_options(arguments, OPTIONS, keys=(*CHOSEN, "plugins"), data=True)
    prompt, step, *_ = line.options.values()
    if prompt is None:
        raise UserError(f'sample needs prompt="…": {USAGE}')
    with user_errors(ValueError):
        sampling = Sampling(
            **{key: value for key, value in line.options.items() if key not in ("prompt", "step")}
        )

    def task(trained: TrainedModel, named: Sequence[NamedRecipe]) -> int:
        if len(named) > 1:
            raise UserError(
                f"sample writes in one recipe, not in {', '.join(recipe.name for recipe in named)}"
            )
        return _sample(trained, named[0] if named else trained.own, prompt, sampling, line.as_data)

    return with_model(USAGE, line, list(OPTIONS), step, task)


def _sample(
    trained: TrainedModel, named: NamedRecipe, prompt: str, sampling: Sampling, as_data: bool
) -> int:
    tokenizer = trained.text_tokenizer()
    ids = tokenizer.encode(prompt)
    if (begin := begin_of_document(tokenizer)) is not None:
        ids = [begin, *ids]
    stream = TextStream(tokenizer, ids)
    began = time.perf_counter()
    written: list[int] = []
    for (token,) in generate(
        trained, [ids], sampling, named=named, ends=[tokenizer.end_of_document]
    ):
        if not written and not as_data:
            print(prompt, end="")
        assert token is not None
        written.append(token)
        grown = stream.add(token)
        if not as_data:
            print(grown, end="", flush=True)
    ending = stream.end()
    seconds = time.perf_counter() - began
    if as_data:
        outcome = {
            "ids": written,
            "ended": written[-1] == tokenizer.end_of_document,
            "seconds": round(seconds, 3),
        }
        about = {
            "run": str(trained.source),
            "step": trained.step,
            "recipe": named.name,
            "prompt": prompt,
        }
        print(json.dumps({**about, **asdict(sampling), "text": stream.text, **outcome}))
        return 0
    print(ending)
    complete = len(written) == sampling.tokens or written[-1] == tokenizer.end_of_document
    ended = "" if complete else "; the context is full"
    where = f"{trained.title} in {named.name}"
    print(f"{where}: {counted(len(written), 'token')} in {seconds:.2f} s{ended}", file=sys.stderr)
    return 0
