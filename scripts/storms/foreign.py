"""Files that somebody else prepared: Hugging Face folders, token caches, tokenizers, chat templates.

What is in them is read, or refused in one line within bounds. A class of changes is an entry of `CHANGES`; each takes a
copy of the base run and the trial's random numbers, and says how it changed a file and which command reads it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from storms.ground import (
    TINY,
    Ground,
    Result,
    begin,
    end_measured,
    explained,
    losses,
    small_memory,
)

SECONDS = 10.0
"""Processor time that a command may take with such a file; with a sound one it takes one or two."""
MEMORY = 1 << 30
"""Bytes of address space that it may take beside what this process has."""
PEAK = 10**9
"""Bytes of memory that a reader of a folder may hold, those that torch takes among them."""
NUMBERS = (2**62, 10**9, 10**400, -1, 0, 1.5, 1e308, float("nan"), float("inf"))
TEXTS = ("4", "x" * 10**6, "\x1b[2J", "(a+)+$", "(?", "\\p{L}{9999}")
TABLES: tuple[Any, ...] = ([], [1], [[1]], {}, {"a": []}, [None] * 1000, None, True)
VALUES = (*NUMBERS, *TEXTS, *TABLES)
COSTLY_JSON = (
    b"[" * 10**6,
    b"[" + b"[]," * 4_000_000 + b"1]",
    b'{"a":' * 5000,
    b"\xff\xfe",
    b"null",
    b"",
)
MODELS = ("qwen2", "qwen3", "mixtral", "qwen3_moe", "nemotron_h", "mamba2", "gemma3")
STRAY = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "modeling_own.py",
    "vocab.json",
    "added_tokens.json",
    "params.json",
)
TEMPLATES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{% generation %}{{ m.content + '</s>' }}{% endgeneration %}{% endif %}{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}"
    "{{ ns.n ~ '. ' ~ m['role'] ~ ': ' ~ m['content'] | trim ~ '\\n' }}{%- endfor -%}",
)
COSTLY_JINJA = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ lipsum(n=10**6) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ range(10**18) | list }}",
    "{{ strftime_now('%Y' * 10**8) }}",
    "{{ '((((((((((' | replace('(', '((((((((((') * 9**6 }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% set x = namespace() %}{% set x.y = x %}{{ x | tojson }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if true %}" * 3000,
)
COMMANDS = (
    ("sample", "hf", "prompt=the", "tokens=2"),
    ("plan", "init=hf"),
    (*TINY, "init=hf", "run.name=c", "train.steps=1"),
    ("eval", "hf", "text=../text.txt"),
    ("verify", "hf", "against=runs/a"),
)
"""What reads a folder."""
Change = Callable[[Path, random.Random], str]
"""Changes a file or a folder; returns in a few words how."""


def other_value(table: Any, draw: random.Random) -> str:
    """A value somewhere in a table of JSON is another; returns which."""
    names: list[str] = []
    while True:
        keys = list(table) if isinstance(table, dict) else list(range(len(table)))
        key = draw.choice(keys)
        names.append(str(key))
        inner = table[key]
        if not (isinstance(inner, dict | list) and inner) or draw.random() < 0.2:
            table[key] = draw.choice(VALUES)
            return f"{'.'.join(names)}={str(table[key])[:40]}"
        table = inner


def damaged_table(path: Path, draw: random.Random) -> str:
    """A JSON file has another value, or costs much, or is damaged."""
    how = draw.choice(("value", "value", "value", "new", "costly", "file"))
    if how == "file":
        return damaged_file(path, draw)
    if how == "costly":
        path.write_bytes(draw.choice(COSTLY_JSON))
        return f"{path.name} costly"
    table = json.loads(path.read_text())
    if how == "new":
        key = draw.choice(("rope_theta", "layer_types", "quantization_config", "auto_map"))
        table[key] = draw.choice(VALUES)
        how = f"new {key}={str(table[key])[:40]}"
    else:
        how = other_value(table, draw)
    path.write_text(json.dumps(table))
    return f"{path.name}: {how}"


def damaged_file(path: Path, draw: random.Random) -> str:
    """Bytes are changed, inserted or gone, or the file is another thing."""
    data = path.read_bytes()
    place = draw.randrange(len(data))
    contents: dict[str, bytes] = {
        "flip": data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :],
        "cut": data[:place],
        "more": data[:place] + draw.randbytes(draw.choice((1, 64, 5000))) + data[place:],
        "zeros": bytes(len(data)),
        "twice": data + data,
    }
    things: dict[str, Callable[[], None]] = {
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "gone": lambda: None,
    }
    how = draw.choice((*contents, *things, "sparse"))
    if how == "sparse":
        os.truncate(path, 1 << 36)
    elif how in contents:
        path.write_bytes(contents[how])
    else:
        path.unlink()
        things[how]()
    return f"{path.name} {how}"


def tables(folder: Path, draw: random.Random) -> str:
    """A table of a Hugging Face folder, or the family that it names."""
    names = ("config.json", "config.json", "tokenizer_config.json", "generation_config.json")
    path = folder / draw.choice(names)
    if draw.random() < 0.8:
        return damaged_table(path, draw)
    path = folder / "config.json"
    table = json.loads(path.read_text())
    table |= {"model_type": draw.choice(MODELS), "architectures": None}
    path.write_text(json.dumps(table))
    return str(table["model_type"])


def weights(folder: Path, draw: random.Random) -> str:
    """A tensor's place, shape, dtype or name is another, or the file has more bytes."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    name = draw.choice([key for key in header if key != "__metadata__"])
    tensor = header[name]
    how = draw.choice(("place", "shape", "dtype", "name", "more", "less", "many"))
    if how == "place":
        first, end = tensor["data_offsets"]
        tensor["data_offsets"] = [0, end - first]
    elif how == "shape":
        tensor["shape"] = draw.choice(([2**62], [-1], [0], [1] * 1000, tensor["shape"][::-1]))
    elif how == "dtype":
        tensor["dtype"] = draw.choice(("I8", "F64", "C64", "F4", 3))
    elif how == "name":
        header[draw.choice(("../x", "a" * 10**6, "", "\x1b[2J"))] = header.pop(name)
    elif how == "more":
        body += bytes(64)
    elif how == "less":
        body = body[:-4]
    else:
        empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        header |= {f"t{number}": empty for number in range(400_000)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return f"{how} of {name}"


def files(folder: Path, draw: random.Random) -> str:
    """A file is added, or one is damaged or another thing."""
    if draw.random() < 0.6:
        path = draw.choice(sorted(folder.iterdir()))
        return damaged_file(path, draw)
    name = draw.choice(STRAY)
    (folder / name).write_text(draw.choice(("{}", "", "[", "import os\n")))
    return f"stray {name}"


def of_folder(
    change: Change, place: Path, draw: random.Random, number: int
) -> tuple[str, tuple[str, ...]]:
    """A change of the folder, and each command that reads it in turn."""
    return change(place / "hf", draw), COMMANDS[number % len(COMMANDS)]


def cache(place: Path, draw: random.Random, number: int) -> tuple[str, tuple[str, ...]]:
    """The entry that a run has made; a run that reads it is as one that tokenises anew, or
    refuses.
    """
    entries = sorted((place / "runs/a/cache").glob("*.bin"))
    entries += sorted((place / "runs/a/cache").glob("*.json"))
    path = draw.choice(entries)
    change = damaged_table if path.suffix == ".json" else damaged_file
    return change(path, draw), (*TINY, "run.name=c", "data.cache_dir=runs/a/cache")


def sound_tokenizer() -> str:
    """The JSON of a small tokenizer that has every part."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["</s>", "<s>", *letters, "th", "the", "qu"]
    merges = [("t", "h"), ("th", "e"), ("q", "u")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    sound = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    spaces = normalizers.Replace("\u00a0", " ")
    sound.normalizer = normalizers.Sequence([normalizers.NFC(), spaces])
    sound.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sound.decoder = decoders.ByteLevel()
    begins = [("<s>", 1)]
    sound.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begins)
    sound.add_special_tokens(["</s>", "<s>"])
    return str(sound.to_str())


def tokenizer(place: Path, draw: random.Random, number: int) -> tuple[str, tuple[str, ...]]:
    """A tokenizer.json of somebody else."""
    path = place / "tokenizer.json"
    path.write_text(sound_tokenizer())
    how = damaged_table(path, draw)
    words = ("data/tokenizer=pretrained", "data.tokenizer.name=tokenizer.json")
    return how, (*TINY, *words, "run.name=c", "train.steps=1")


def template(place: Path, draw: random.Random, number: int) -> tuple[str, tuple[str, ...]]:
    """A chat template of somebody else, changed in its text, or with a costly part."""
    source = draw.choice(TEMPLATES)
    size = 0
    if draw.random() < 0.5:
        part = draw.choice(COSTLY_JINJA)
        outputs = [at for at in range(len(source)) if source.startswith("{{", at)]
        at = draw.choice([0, len(source), *outputs])
    else:
        part = draw.choice(("", "{%", "}}", "-", "|", "\0", "\u202e", "%}"))
        size = draw.choice((1, 2, 5, 20))
        at = draw.randrange(len(source))
    (place / "own.jinja").write_text(source[:at] + part + source[at + size :])
    texts = (("user", "2+2?"), ("assistant", "4")) * 2
    turns = [{"role": role, "content": text} for role, text in texts]
    (place / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 200)
    named = ("data=chat", "data.path=chat.jsonl", "data.template=own.jinja", "train.seq_len=128")
    words = [word for word in TINY if not word.startswith(("data", "train.seq_len"))]
    command = (*words, *named, "data.cache_dir=cache", "run.name=c", "train.steps=1")
    return f"{part[:60]!r} for {size} characters at {at}", command


CHANGES: dict[str, Callable[[Path, random.Random, int], tuple[str, tuple[str, ...]]]] = {
    "tables": partial(of_folder, tables),
    "weights": partial(of_folder, weights),
    "files": partial(of_folder, files),
    "caches": cache,
    "tokenizers": tokenizer,
    "templates": template,
}


def foreign_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each class in turn. What a damaged cache gives equals what an undisturbed run does."""
    ground.copy(place)
    kind = tuple(CHANGES)[number % len(CHANGES)]
    how, command = CHANGES[kind](place, draw, number // len(CHANGES))
    bounds = partial(small_memory, MEMORY)
    ended = end_measured(begin(place, *command, around=bounds), place, 120.0)
    out = ended.out
    differs = ended.code == 1 and "differs from" in out and "Traceback" not in out
    problems = {
        "unexplained": not (explained(ended.code, out) or differs),
        "too long": ended.seconds >= SECONDS or len(out) > 20_000,
        "too much memory": command in COMMANDS and ended.peak > PEAK,
        "an escape": "\x1b[2J" in out,
    }
    if kind == "caches" and ended.code == 0:
        undisturbed = ground.undisturbed("start").result["losses"]
        problems["other losses"] = losses(place / "runs/c") != undisturbed
    seen = ", ".join(problem for problem, there in problems.items() if there)
    cost = f"{ended.seconds:.0f} s, {ended.peak / 1e6:,.0f} MB"
    return Result(kind, not seen, f"{how}, {command[0]}: {seen}: {cost}: {out[-400:]}")
