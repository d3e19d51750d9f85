"""What turns text into ids, as somebody else left it: entries of the token cache, tokenizers, chat templates.

A class of changes is an entry of `CLASSES`; each trial makes a sound file and changes it by the trial's random numbers.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from storms.ground import TINY, Ground, Result, begin, end_measured, explained, losses
from storms.surroundings import small_memory

SECONDS = 10.0
"""Processor time that a command may take with such a file; with a sound one it takes one or two."""
MEMORY = 1 << 30
"""Bytes of address space that it may take beside what this process has."""
VALUES: tuple[Any, ...] = (
    *(
        2**62,
        10**400,
        -1,
        0,
        1.5,
        float("nan"),
        True,
        "4",
        "x" * 10**6,
        "\x1b[2J",
        "(a+)+$",
        "(?",
        "\\p{L}{9999}",
    ),
    *([], [1], [[1]], {}, {"a": []}, [None] * 1000, None),
)
TEMPLATES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}{% endif %}{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
    "{{ ns.n ~ '. ' ~ m['role'] ~ ': ' ~ m['content'] | trim ~ '\\n' }}{%- endfor -%}",
)
COSTLY = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ lipsum(n=10**6) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ [0] * 10**10 }}",
    "{{ '%9999999999d' % 1 }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ messages.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ ('a' * 99999) | batch(1) | list | tojson }}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ '((((((((((' | replace('(', '((((((((((') * 9**6 }}",
    "{% set x = namespace() %}{% set x.y = x %}{{ x | tojson }}",
    *(
        "{{ strftime_now('%Y' * 10**8) }}",
        "{{ range(10**18) | list }}",
        "{{ messages | map('upper') | list }}",
        "{" * 5000,
    ),
    *(
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% if true %}" * 3000,
        "{{ '{:9999999999}'.format(1) }}",
    ),
)
Prepare = Callable[[Path, random.Random], tuple[str, tuple[str, ...]]]
"""Changes something in a copy of the base run; returns how, and the command that reads it."""


def _damaged(path: Path, draw: random.Random) -> str:
    """Bytes are changed, inserted or gone, or the file is another thing."""
    data = path.read_bytes()
    how = draw.choice(
        ("flip", "flip", "cut", "more", "zeros", "twice", "pipe", "link", "folder", "sparse")
    )
    place = draw.randrange(len(data))
    if how == "flip":
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 8))):
            changed[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(changed)
    elif how == "cut":
        path.write_bytes(data[:place])
    elif how == "more":
        path.write_bytes(data[:place] + draw.randbytes(draw.choice((1, 64, 5000))) + data[place:])
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    elif how == "twice":
        path.write_bytes(data + data)
    elif how == "sparse":
        os.truncate(path, 1 << 36)
    else:
        path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        elif how == "link":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
    return f"{path.suffix} {how}"


def _hostile(table: Any, draw: random.Random) -> str:
    """A value somewhere in a table of JSON is another; returns where."""
    names: list[str] = []
    while True:
        keys = list(table) if isinstance(table, dict) else list(range(len(table)))
        key = draw.choice(keys)
        names.append(str(key))
        inner = table[key]
        if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
            table = inner
            continue
        table[key] = draw.choice(VALUES)
        return f"{'.'.join(names)}={str(table[key])[:40]}"


def _cache(place: Path, draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """The entry that a run has made; a run that reads it is as one that tokenises anew, or
    refuses.
    """
    entries = sorted(
        path for path in (place / "runs/a/cache").iterdir() if path.suffix in (".bin", ".json")
    )
    path = draw.choice(entries)
    if path.suffix == ".json" and draw.random() < 0.6:
        table = json.loads(path.read_text())
        how = _hostile(table, draw)
        path.write_text(json.dumps(table))
    elif path.suffix == ".json" and draw.random() < 0.3:
        path.write_bytes(draw.choice((b"[" * 10**6, b'{"a":' * 5000, b"null", b"\xff\xfe", b"")))
        how = "hostile JSON"
    else:
        how = _damaged(path, draw)
    return how, (*TINY, "run.name=c", "data.cache_dir=runs/a/cache")


def _tokenizer_json() -> dict[str, Any]:
    """A small sound tokenizer that has every part."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["</s>", "<s>", *letters, "th", "the", "qu"]
    merges = [("t", "h"), ("th", "e"), ("q", "u")]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    sound = Tokenizer(model)
    sound.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\u00a0", " ")])
    sound.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sound.decoder = decoders.ByteLevel()
    sound.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    sound.add_special_tokens(["</s>", "<s>"])
    table: dict[str, Any] = json.loads(sound.to_str())
    return table


def _tokenizer(place: Path, draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """A tokenizer.json of somebody else."""
    table = _tokenizer_json()
    path = place / "tokenizer.json"
    how = _hostile(table, draw) if draw.random() < 0.7 else ""
    path.write_text(json.dumps(table))
    how = how or _damaged(path, draw)
    named = ("data/tokenizer=pretrained", "data.tokenizer.name=tokenizer.json")
    return how, (*TINY, *named, "run.name=c", "train.steps=1")


def _template(place: Path, draw: random.Random) -> tuple[str, tuple[str, ...]]:
    """A chat template of somebody else, changed in its text, or with a costly part."""
    source = draw.choice(TEMPLATES)
    at = draw.randrange(len(source))
    if draw.random() < 0.5:
        part = draw.choice(COSTLY)
        places = [0, len(source), *(n for n in range(len(source)) if source.startswith("{{", n))]
        at = draw.choice(places)
        source = source[:at] + part + source[at:]
        how = part[:60]
    else:
        size = draw.choice((1, 2, 5, 20))
        source = (
            source[:at]
            + draw.choice(("", "{%", "}}", "-", "|", "\0", "\u202e", "%}"))
            + source[at + size :]
        )
        how = f"{size} characters at {at}"
    (place / "own.jinja").write_text(source)
    turns = [
        {"role": role, "content": text} for role, text in (("user", "2+2?"), ("assistant", "4")) * 2
    ]
    (place / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 200)
    named = ("data=chat", "data.path=chat.jsonl", "data.template=own.jinja", "train.seq_len=128")
    words = [word for word in TINY if not word.startswith(("data", "train.seq_len"))]
    return how, (*words, *named, "data.cache_dir=cache", "run.name=c", "train.steps=1")


CLASSES: dict[str, Prepare] = {"caches": _cache, "tokenizers": _tokenizer, "templates": _template}
"""Classes of changes by name."""


def text_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each class in turn. What a damaged cache gives equals what an undisturbed run does."""
    ground.copy(place)
    kind = tuple(CLASSES)[number % len(CLASSES)]
    how, command = CLASSES[kind](place, draw)
    ended = end_measured(begin(place, *command, around=partial(small_memory, MEMORY)), place, 120.0)
    code = ended.code
    out = ended.out
    seen = "" if explained(code, out) else "unexplained"
    if ended.seconds >= SECONDS or len(out) > 20_000 or "\x1b[2J" in out:
        seen = "too long, or an escape"
    if (
        kind == "caches"
        and code == 0
        and losses(place / "runs/c") != ground.undisturbed("start").result["losses"]
    ):
        seen = seen or "other losses"
    return Result(
        kind, not seen, seen and f"{how}: {seen}: exit {code}, {ended.seconds:.0f} s: {out[-400:]}"
    )
