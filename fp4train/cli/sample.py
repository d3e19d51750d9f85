"""fp4train sample RUN|FOLDER prompt="…" [tokens=64] [temperature=1] [seed=0] [recipe=NAME] [step=STEP] [--json]

Text that the model of a run, or of a Hugging Face folder, writes after a
prompt, in any recipe (docs/evaluation.md).

  prompt="def f("  the text to go on from
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
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from fp4train.cli.trained import KEYS, with_model, with_weight_kinds
from fp4train.config.command_line import CommandLine, WholeNumber, read_line
from fp4train.data.tokens import begin_of_document
from fp4train.errors import UserError
from fp4train.exchange import NamedRecipe, Sampling, TextStream, TrainedModel, generate
from fp4train.text import counted

__doc__ = with_weight_kinds(__doc__)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(CommandLine, Sampling):
    prompt: str
    step: WholeNumber | None = None


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


def _sample(trained: TrainedModel, named: NamedRecipe, line: SampleOptions) -> int:
    as_data = line.as_data
    tokenizer = trained.text_tokenizer()
    ids = tokenizer.encode(line.prompt)
    if (begin := begin_of_document(tokenizer)) is not None:
        ids = [begin, *ids]
    stream = TextStream(tokenizer, ids)
    began = time.perf_counter()
    written: list[int] = []
    for (token,) in generate(trained, [ids], line, named=named, ends=[tokenizer.end_of_document]):
        if not written and not as_data:
            print(line.prompt, end="")
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
            "prompt": line.prompt,
        }
        sampling = {field.name: getattr(line, field.name) for field in fields(Sampling)}
        print(json.dumps({**about, **sampling, "text": stream.text, **outcome}))
        return 0
    print(ending)
    complete = len(written) == line.tokens or written[-1] == tokenizer.end_of_document
    ended = "" if complete else "; the context is full"
    where = f"{trained.title} in {named.name}"
    print(f"{where}: {counted(len(written), 'token')} in {seconds:.2f} s{ended}", file=sys.stderr)
    return 0
