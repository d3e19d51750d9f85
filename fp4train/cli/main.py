"""fp4train [VERB] key=value…

fp4train recipe=nvfp4                       train (the default verb)
torchrun --nproc-per-node 8 -m fp4train parallel.dp_shard=8
                                            on 8 GPUs (docs/scale.md)
fp4train plan model=llama_1b recipe=nvfp4   which precision every GEMM runs in,
                                            and why; trains nothing
fp4train plan model=llama_8b gpu=B200       … and the time each GEMM would take
                                            on that GPU
fp4train plan gpu=H100 gpus=64 parallel.tp=8 train.batch_size=64
                                            what a mesh of GPUs holds, sends and
                                            costs
fp4train prepare data=text data.path=…      tokenise the data before a run;
                                            data.workers=8, part=3/16
fp4train -m recipe=bf16,mxfp8,nvfp4         a sweep
fp4train plan runs/a                        what a run was told, what it ran,
                                            and what is planned for the rest
fp4train resume=runs/a recipe=mxfp8         go on from a checkpoint, here with
                                            another recipe
fp4train resume=runs/a resume_step=200 …    … from a chosen one
fp4train init=runs/a data=text data.path=…  a new run with the weights of
                                            another
fp4train swap runs/a recipe=bf16 at=200     change the recipe of a run that is
                                            running
fp4train swap runs/a                        its swaps; with cancel=all, take
                                            back those that have not begun
fp4train compare runs/a runs/b              loss gap, table and plot
fp4train sensitivity runs/a recipe=nvfp4    which layers and operands a recipe
                                            harms; ends in a policy
fp4train rank runs/a recipe=bf16,nvfp4      paired forks of a checkpoint: gaps
                                            with intervals and tests
fp4train gate runs/a recipe=A margin=0.01   whether a recipe is within a margin
                                            of BF16: a sequential test, an exit
                                            code
fp4train report runs/a runs/b               one HTML file about runs: curves,
                                            gaps, errors, studies, differences
fp4train sample runs/a prompt="def f("      text that a model writes, in any
                                            recipe
fp4train export runs/a to=hf out=FOLDER     a folder that transformers loads,
                                            tokenizer and model card included
fp4train export runs/a to=compressed-tensors out=FOLDER
                                            NVFP4 codes and scales for vLLM and
                                            SGLang, or to=modelopt
fp4train verify FOLDER against=runs/a       whether an export has the codes,
                                            scales and weights of the run, bit
                                            by bit
fp4train eval runs/a recipe=bf16,nvfp4      bits per byte on held-out text, or
                                            task=…: tasks of lm_eval
fp4train formats                            the number formats
fp4train recipes                            the published recipes, their papers,
                                            what of them is mirrored; recipes
                                            NAME
fp4train doctor                             what this machine can do: recipes,
                                            kernels, versions; --json
fp4train check runs/a                       whether this machine computes what
                                            the plan of a run says
fp4train --cfg job                          the whole configuration
fp4train help plan                          the options of a verb, as plan
                                            --help
fp4train help train.steps                   what a key means; or a group
                                            (recipe), or recipe=mxfp8
"""

import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from fp4train import __version__
from fp4train.cli.output import (
    configure_logging,
    explained,
    open_streams,
    write_printable,
    written_by,
)
from fp4train.config import overrides
from fp4train.errors import UserError
from fp4train.text import near_miss

USAGE = __doc__ or ""

VERBS = (
    "train",
    "plan",
    "prepare",
    "swap",
    "compare",
    "sensitivity",
    "rank",
    "gate",
    "report",
    "export",
    "verify",
    "sample",
    "eval",
    "formats",
    "recipes",
    "check",
    "doctor",
)
"""Each is a module of this package, which is imported when it is asked for: its docstring is the
help, `main` runs it.
"""
COMPOSED = ("train", "plan", "prepare")
"""Verbs whose configuration Hydra composes; their help lists its keys."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. An error that the user can act on is one message on standard error, never a
    traceback.

    Exits with 0, 1 for an error that was explained, 3 for a run that diverged, 75 for a GPU or rank
    that was lost, or 128 + the signal that ended a run; `gate` with its verdict.
    """
    open_streams()
    with written_by(write_printable):  # the one place for all that is printed
        sys.exit(_run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    asks = arguments[:1] == ["help"]
    if asks:
        arguments = [*arguments[1:], "--help"]
    named = bool(arguments) and arguments[0] in VERBS
    verb = arguments.pop(0) if named else "train"
    try:
        if "--help" in arguments or "-h" in arguments:
            return explained(lambda: _help(verb, arguments, named=named, topics=asks and not named))
        return explained(lambda: _do(verb, arguments, named=named))
    except KeyboardInterrupt:
        print("fp4train: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _help(verb: str, arguments: list[str], *, named: bool, topics: bool) -> int:
    """Print the help of a verb, which the command may not have `named`, or of `topics`: keys,
    groups and options.
    """
    from fp4train.cli import help as screens

    words = [word for word in arguments if word not in ("--help", "-h")]
    if topics and any(not word.startswith("-") for word in words):
        print(screens.of_words(words, VERBS))
        return 0
    if not named and words and (unknown := _no_verb(words)):
        raise UserError(unknown)
    verb_help = import_module(f"{__package__}.{verb}").__doc__ if named else USAGE
    print(screens.of_verb(verb_help or "", words, keys=verb in COMPOSED))
    return 0


def _do(verb: str, arguments: list[str], *, named: bool) -> int:
    """Run a verb, which the command may not have `named`; returns the exit code."""
    module = import_module(f"{__package__}.{verb}")
    if "--version" in arguments:
        print(f"fp4train {__version__}")
        return 0
    if verb == "train" and (unknown := _no_verb(arguments)):
        raise UserError(unknown)
    configure_logging()
    code = int(module.main(arguments))
    sys.stdout.flush()
    return code


def _no_verb(arguments: list[str]) -> str:
    """Message about a command whose first word is neither a verb nor key=value; empty: it is one of
    them.
    """
    if not arguments or not re.fullmatch(r"\w[\w-]*", arguments[0]):
        return ""
    word, *following = arguments
    if following and "=" not in following[0] and (word == "resume" or word in overrides.groups()):
        return f"unknown verb {word!r}; did you mean {word}={following[0]}?"
    return f"unknown verb {word!r}{near_miss(word, VERBS) or '; fp4train help lists the verbs'}"
