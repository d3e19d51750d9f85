"""Errors about keys and options that there are not: what is near them, and what there is."""

import re
from collections.abc import Collection, Sequence

from fp4train.config.folders import own_options
from fp4train.errors import UserError
from fp4train.text import near_miss, nearest

_ABSENT = {
    "audit.repeat": "steps are no longer computed twice: audit.every=1 compares a layer of every "
    "step, audit.sums=1 the state",
    "model.draw": "a Llama of 500 M weights or more in its blocks, and any other family, draws each "
    "weight from seed, name and position; smaller Llamas draw theirs from torch's generator",
    "parallel.amax": "it went: the largest magnitude of a tensor is that of all ranks that share "
    "it, as with parallel.amax=tp; for codes that do not depend on how a batch is cut, take "
    "microbatches of one size (train.microbatch) on any number of ranks",
    "parallel.norm": "the gradient norm is summed in float64 on any number of ranks, and there is "
    "nothing to choose",
    "plan parallel": "a mesh is named by its sizes, parallel.dp_replicate, parallel.dp_shard, parallel.tp "
    "and parallel.pp; plan prices the one that they name",
    "compare margin": "the table has the 95 % interval of a gap over seeds; fp4train gate RUN margin=0.01 "
    "shows whether it is within a margin",
    "sensitivity budget": "batches=N says how many batches every part is measured on",
    "sensitivity cells": "a study measures single operands in all layers, and single layers; "
    "policy.keep=[mlp.down:fprop] keeps one GEMM",
    "sensitivity cost": "keep=0.15 is the share of the multiply-adds that the policy may keep",
    "sensitivity gpu": "times of a GPU are those of fp4train plan RUN gpu=B200",
    "verify loss": "equal bits are equal weights; transformers computes the loss of a folder, fp4train eval "
    "RUN that of the run",
    "report gpu": "times of a GPU are those of fp4train plan RUN gpu=B200",
}
"""Full key, or verb and key → why there is none, and what to take instead."""
_PARTS = re.compile("[./=]")
_ALMOST = 0.8
_ALIKE = 0.65
"""Smallest similarity of a name, and of its last part beside others of its section, to one that is
suggested.
"""


def unknown_key(key: str, have: Collection[str], others: Collection[str] = ()) -> UserError:
    """The error about a key that there is not; the message suggests one.

    Args:
        key: key of a command line.
        have: keys that there are; those in its section are listed.
        others: names that are suggested, too, such as keys of other options.
    """
    if reason := why_absent(key):
        return UserError(f"unknown key {key!r}: {reason}")
    section, dot, _ = key.rpartition(".")
    beside = [name.rpartition(".")[2] for name in have if name.rpartition(".")[0] == section]
    listing = f" (known: {', '.join(beside)})" if dot and beside else ""
    meant = near_key(key, [*have, *others])
    hint = f"; did you mean {meant!r}?" if meant else ""
    return UserError(f"unknown key {key!r}{hint}{listing}")


def why_absent(key: str) -> str:
    """Why there is no such key, and what to take instead; empty: nothing is known of it."""
    return _ABSENT.get(key, "")


def near_key(key: str, have: Collection[str]) -> str | None:
    """The name that is meant by a key: one that is almost equal, or one with a similar last part,
    in its own section first.
    """
    section, _, last = key.rpartition(".")
    siblings = [name for name in have if section and name.rpartition(".")[0] == section]
    meant = nearest(key, have, _ALMOST)
    for names, alike in ((siblings, _ALIKE), (have, _ALMOST)):
        parts = [_PARTS.split(name)[-1] for name in names]
        if meant is None and (part := nearest(last, parts, alike)):
            meant = nearest(key, [n for n, p in zip(names, parts, strict=True) if p == part], 0.0)
    group = "" if meant is None else meant.replace(".", "/")
    return group if group in own_options() else meant


def check_option(group: str, option: str, options: Sequence[str]) -> None:
    """Refuse an option that the group `group` does not have.

    Raises:
        UserError: it is none of `options`; the message suggests one.
    """
    if option in options or (group == "experiment" and option in ("null", "None")):
        return
    longer = [name for name in options if name.startswith(f"{option}_")]
    hint = f"; did you mean {' or '.join(longer)}?" if longer else near_miss(option, options)
    yours = ""
    if "/" not in group and group != "experiment":
        yours = f"; one of your own: {group}=FILE.yaml, or --config-dir FOLDER"
    raise UserError(
        f"{group}={option}: there is no such {group}{hint} (known: {', '.join(options)}{yours})"
    )
