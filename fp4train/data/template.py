"""Conversations as text: a chat template, rendered in a sandbox, and which parts of the text are answers.

A template is Jinja2 as the tokenizers of `transformers` have it (`chat_template`), with `messages`,
`add_generation_prompt`, `bos_token`, `eos_token` and `raise_exception`. It runs in Jinja2's immutable sandbox: it sees
these values and no attributes behind them.

The answer of message i is what the rendered text has more with it than with a prompt for it:

    answer = render(messages[: i + 1]) − render(messages[:i], add_generation_prompt=true)

so that a model learns what it is asked for when it generates. A template whose texts do not begin with one another
cannot be used for training.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.data.files import existing_path
from fp4train.errors import DataError, data_errors, reason

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
ANSWERS = "assistant"
_LIMIT = 1 << 20
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template.

    Args:
        source: the Jinja2 text.
        variables: texts that it may name beside the messages: `bos_token`, `eos_token`.
        name: what errors call it.
        trained: whether the run learns conversations by it; else it came with the tokenizer, and exports hand it on.
    """

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    name: str = "the chat template"
    trained: bool = True

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(text: str) -> None:
            raise TemplateError(text)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
        with data_errors(TemplateError, before=f"{self.name} is no template: "):
            return environment.from_string(_GENERATION.sub("", self.source))

    def render(self, messages: Sequence[Mapping[str, str]], *, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt` it ends where an answer would begin.

        Raises:
            ValueError: the template refuses the messages.
        """
        from jinja2 import TemplateError

        compiled = self._compiled
        try:
            found: str = compiled.render(
                messages=[dict(each) for each in messages], add_generation_prompt=prompt, **self.variables
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{self.name} refuses it: {str(error) or type(error).__name__}") from error
        return found

    def parts(self, messages: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, bool]]:
        """The text of a conversation in order, and of each part whether it is an answer.

        Raises:
            ValueError: there is no answer, or the template leaves all out, refuses messages or rewrites earlier ones.
        """
        if all(message["role"] != ANSWERS for message in messages):
            raise ValueError(f'it has no message of the role "{ANSWERS}" to learn from')
        done, answered = "", False
        for index, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            before, after = self.render(messages[:index], prompt=True), self.render(messages[: index + 1])
            yield self._rest(before, done), False
            answer = self._rest(after, before)
            yield answer, True
            done, answered = after, answered or bool(answer)
        if not answered:
            raise ValueError(
                f"{self.name} writes nothing for its answers, so that there is nothing to learn: give another one, "
                "data.template=FILE.jinja"
            )
        yield self._rest(self.render(messages), done), False

    def _rest(self, text: str, beginning: str) -> str:
        if not text.startswith(beginning):
            raise ValueError(
                f"{self.name} renders a conversation differently when it goes on, so that its answers have no place: "
                "give another one, data.template=FILE.jinja"
            )
        return text[len(beginning) :]

    def save(self, run_dir: Path) -> None:
        """Keep the template with a run.

        Raises:
            DataError: it cannot be written.
        """
        body = json.dumps({"template": self.source, "variables": dict(self.variables), "trained": self.trained})
        with data_errors(OSError, before=f"the chat template cannot be kept in {run_dir}: ", message=reason):
            files.write(run_dir / KEPT, body.encode(), create=True)


def find_template(path: str | None, tokenizer: str | None, run_dir: Path) -> ChatTemplate:
    """The run's own template; else a new one, which is kept with the run. A file comes before one that the run does
    not learn by.

    Args:
        path: a file that the user names; None: that of the tokenizer's folder, or where it has none, `CHATML`.
        tokenizer: the folder or file of a ready-made tokenizer; None: there is none.

    Raises:
        DataError: a file cannot be read, or holds no template.
    """
    kept = kept_template(run_dir)
    if kept is not None and kept.trained:
        return kept
    if path is not None:
        found = ChatTemplate(source=_text(existing_path(path, "data.template")), name=path)
    elif kept is not None:
        found = replace(kept, trained=True)
    else:
        found = (None if tokenizer is None else _of_tokenizer(Path(tokenizer))) or ChatTemplate(source=CHATML)
    found.save(run_dir)
    return found


def keep_template(tokenizer: Path, run_dir: Path) -> None:
    """Keep the template of a tokenizer's folder with a run that has none, for its exports.

    Raises:
        DataError: a file cannot be read or written.
    """
    if kept_template(run_dir) is None and (found := _of_tokenizer(tokenizer)) is not None:
        replace(found, trained=False).save(run_dir)


def kept_template(run_dir: Path) -> ChatTemplate | None:
    """The run's own template; None: it has none.

    Raises:
        DataError: it is damaged.
    """
    try:
        body = json.loads(files.read(run_dir / KEPT, _LIMIT))
        variables = {str(name): str(text) for name, text in body["variables"].items()}
        trained = body.get("trained", True) is True
        return ChatTemplate(source=str(body["template"]), variables=variables, trained=trained)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"the run's {KEPT} in {run_dir} cannot be read: {error}. Use another run.name.") from error


def _of_tokenizer(place: Path) -> ChatTemplate | None:
    """The template beside a tokenizer.json, with the texts of its special tokens."""
    folder = place if place.is_dir() else place.parent
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        refused = f"{folder / 'tokenizer_config.json'} is no JSON table: "
        with data_errors(ValueError, TypeError, RecursionError, before=refused):
            settings = dict(json.loads(_text(folder / "tokenizer_config.json")))
    own = folder / "chat_template.jinja"
    source = _text(own) if own.is_file() else settings.get("chat_template")
    if not isinstance(source, str):
        return None
    tokens = {name: settings.get(name) for name in ("bos_token", "eos_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    variables = {name: text if isinstance(text, str) else "" for name, text in texts.items()}
    return ChatTemplate(source=source, variables=variables, name=f"the chat template of {folder}")


def _text(path: Path) -> str:
    with data_errors(OSError, ValueError, before=f"{path} cannot be read: "):
        return files.read(path, _LIMIT).decode()
