"""The chat template of a run: where it comes from, and the copy that the run keeps.

A template is Jinja2 as the tokenizers of `transformers` have it (`chat_template`), with `messages`,
`add_generation_prompt` and the tokenizer's special tokens, `bos_token` and the others. It is
rendered as transformers renders it, in a process that is bounded in time and memory
(`rendering.py`, `jinja_worker.py`); `answers.py` finds what of the text is learned. A template that
writes the day writes that on which the run began.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.data.answers import AnswerFinder
from fp4train.data.files import existing_path
from fp4train.data.rendering import Message, Renderer
from fp4train.data.tokenizer_settings import TOKENS, read_settings, texts
from fp4train.errors import DataError, data_errors, in_words, reason
from fp4train.text import printable, shortened

_log = logging.getLogger(__name__)

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""The template of a tokenizer that has none."""
MARKERS = ("<|im_start|>", "<|im_end|>")
KEPT = "chat_template.json"
"""The copy in a run's directory."""
TEMPLATE = "chat_template.jinja"
"""The template beside a tokenizer.json."""
_LIMIT = 1 << 20
_BEFORE = "2024-07-26T00:00:00"
"""The time of copies that name none: what Llama 3.2 writes where it knows no day."""


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template.

    Args:
        source: the Jinja2 text.
        variables: texts that it may name beside the messages: `bos_token`, `eos_token` and others.
        name: its name in errors.
        trained: whether the run learns conversations by it; else it came with the tokenizer, and
            exports hand it on.
        now: the time that it is told, in ISO 8601.
    """

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"
    trained: bool = True
    now: str = field(default_factory=lambda: datetime.now().isoformat(timespec="seconds"))

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.source, self.variables, now=self.now, name=self.name)

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt` it ends where an answer would begin.

        Raises:
            ValueError: the template refuses the messages, or costs too much.
        """
        return self._renderer.render([(messages, prompt)])[0].text

    def finder(self, special: Sequence[str] = ()) -> AnswerFinder:
        """What finds the answers of conversations.

        Args:
            special: tokens that the tokenizer makes one id of.
        """
        return AnswerFinder(self._renderer, special)

    @property
    def names(self) -> frozenset[str]:
        """The variables that it reads, as `messages` and `tools`.

        Raises:
            DataError: it is no template.
        """
        return self._renderer.names

    @property
    def key(self) -> list[Any]:
        """What texts of this template are known by."""
        timed = [self.now] if "strftime_now" in self.source else []
        return [self.source, dict(self.variables), *timed]

    def save(self, run_dir: Path) -> None:
        """Keep the template with a run.

        Raises:
            DataError: it cannot be written.
        """
        table = {
            "template": self.source,
            "variables": dict(self.variables),
            "trained": self.trained,
            "now": self.now,
        }
        with data_errors(
            OSError, before=f"the chat template cannot be kept in {run_dir}: ", message=reason
        ):
            files.write(run_dir / KEPT, json.dumps(table).encode(), create=True)


def find_template(path: str | None, tokenizer: str | None, run_dir: Path) -> ChatTemplate:
    """The run's own template; else a new one, which is kept with the run. A file comes before one
    that the run does not learn by.

    Args:
        path: a file that the user names; None: that of the tokenizer's folder, or where it has
            none, `CHATML`.
        tokenizer: the folder or file of a ready-made tokenizer; None: there is none.

    Raises:
        DataError: a file cannot be read, or holds no template.
    """
    kept = kept_template(run_dir)
    if kept is not None and kept.trained:
        return kept
    if path is not None:
        source = _text(existing_path(path, "data.template"))
        variables = {} if tokenizer is None else _special(read_settings(_folder(Path(tokenizer))))
        template = ChatTemplate(source=source, variables=variables, name=path)
    elif kept is not None:
        template = replace(kept, trained=True)
    else:
        of_folder = None
        if tokenizer is not None:
            of_folder = _of_tokenizer(Path(tokenizer))
            if of_folder is None:
                _log.warning(
                    "%s has no chat template: ChatML is taken (data.template=FILE names another)",
                    tokenizer,
                )
        template = of_folder or ChatTemplate(source=CHATML)
    template.save(run_dir)
    return template


def keep_template(tokenizer: Path, run_dir: Path) -> None:
    """Keep the template of a tokenizer's folder with a run that has none, for its exports.

    Raises:
        DataError: a file cannot be read or written.
    """
    if kept_template(run_dir) is None and (template := _of_tokenizer(tokenizer)) is not None:
        replace(template, trained=False).save(run_dir)


def kept_template(run_dir: Path) -> ChatTemplate | None:
    """The run's own template; None: it has none.

    Raises:
        DataError: it is damaged.
    """
    try:
        body = json.loads(files.read(run_dir / KEPT, _LIMIT))
        variables = {str(name): str(text) for name, text in body["variables"].items()}
        trained = body.get("trained", True) is True
        now = datetime.fromisoformat(body.get("now", _BEFORE)).isoformat(timespec="seconds")
        return ChatTemplate(
            source=str(body["template"]), variables=variables, trained=trained, now=now
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the run's {KEPT} in {run_dir} cannot be read: {in_words(error, KEPT)}. Use another "
            "run.name."
        ) from error


def template_of(place: Path) -> ChatTemplate | None:
    """The template of a run, or of a folder with a tokenizer; None: it has none.

    Raises:
        DataError: a file cannot be read.
    """
    return kept_template(place) or _of_tokenizer(place)


def _of_tokenizer(place: Path) -> ChatTemplate | None:
    """The template beside a tokenizer.json, with the texts of its special tokens."""
    folder = _folder(place)
    settings = read_settings(folder)
    beside = folder / TEMPLATE
    source: Any = settings.get("chat_template")
    if beside.is_file():
        source = _text(beside)
    others = [path.stem for path in folder.glob("additional_chat_templates/*.jinja")]
    if isinstance(source, list):  # several, by name, as transformers wrote them before
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named.pop("default", None)
        others += map(str, named)
    if others:
        listed = shortened(printable(", ".join(sorted(others))), 100)
        _log.warning("%s has more chat templates, which are left alone: %s", folder, listed)
    if not isinstance(source, str):
        return None
    name = f"the chat template of {folder}"
    return ChatTemplate(source=source, variables=_special(settings), name=name)


def _folder(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _special(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of settings, by name."""
    return {name: text for name, text in texts(settings).items() if name in TOKENS}


def _text(path: Path) -> str:
    with data_errors(OSError, ValueError, before=f"{path} cannot be read: "):
        return files.read(path.resolve(), _LIMIT).decode()
