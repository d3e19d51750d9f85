"""A process that renders one chat template, whatever it costs within bounds: `python -I
jinja_worker.py`.

A template comes from a stranger's folder, and Jinja has no bound on loops, on the length of a text
or on memory. So it is rendered here, in a process that may use `MEMORY` bytes of address space and,
for all conversations of a run together, `SECONDS` of a processor and `EACH` for each message; the
kernel ends it beyond that. The program imports the standard library and Jinja alone, and starts in
0.1 s.

It reads requests from its standard input and writes replies to its standard output, each a line of
JSON. A request names the template; those after it hold conversations to render:

    {"source": "{% for …", "now": "2026-01-31T12:00:00"}
        → {"generation": false, "names": […]}
    {"renders": [{"messages": […], "prompt": false}], "variables": {…}}
        → {"texts": ["…"], "marks": [[[5, 9]]]}

or `{"error": "…"}`. The environment is that of transformers (`render_jinja_template`): Jinja's
immutable sandbox with `trim_blocks` and `lstrip_blocks`, `break` and `continue`, `{% generation
%}`, a `tojson` that does not escape HTML, `raise_exception`, `strftime_now`, and a `dict` and a
`namespace` without ways to the objects behind them. Marks are the characters that `{% generation
%}` encloses.
"""

import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 3.0
"""Of a processor, at the beginning; no request has more."""
EACH = 0.01
"""Seconds that each message adds."""
MEMORY = 1 << 29
"""Bytes of address space."""
CHARACTERS = 1 << 25
"""Characters of a rendered text."""
AROUND = 1 << 16
"""Characters that a template may write of its own, beside `TIMES` what the messages say."""
AROUND_EACH = 1 << 10
"""Characters that it may write more for each message."""
TIMES = 8


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what a model is to learn."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.used = False
        self.written = 0
        """Characters that the template has given before the block that runs."""
        self.marks: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _mark(self, context: Any, caller: Callable[[], str]) -> str:
        text = caller()
        self.marks.append((self.written, text))
        return text


class Dict:
    """`dict` of a template."""

    def __call__(self, *arguments: Any, **items: Any) -> dict[Any, Any]:
        return dict(*arguments, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class PlainNamespace(Namespace):
    """`namespace` of a template, without names that begin with an underscore."""

    def __init__(*arguments: Any, **items: Any) -> None:
        # The object itself comes among the arguments, so that `namespace(self=…)` works, as in
        # Jinja.
        attributes = dict(*arguments[1:], **items)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(arguments[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


def environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """The environment of a template.

    Args:
        now: time that `strftime_now` writes.
    """

    def raise_exception(message: object) -> None:
        raise TemplateError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    sandbox.globals |= {"dict": Dict(), "namespace": PlainNamespace}
    return sandbox


def render(
    template: Template,
    generation: Generation,
    messages: list[dict[str, Any]],
    prompt: bool,
    variables: dict[str, str],
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the characters in it that are marked.

    Raises:
        ValueError: the text is too long, or marks lie in a text that the template changes or moves.
    """
    generation.marks = []
    generation.written = 0
    spoken = sum(len(message[key]) for message in messages for key in ("role", "content"))
    most = min(CHARACTERS, AROUND + AROUND_EACH * len(messages) + TIMES * spoken)
    values = {
        **variables,
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": prompt,
    }
    blocks: list[str] = []
    for block in template.generate(values):
        blocks.append(block)
        generation.written += len(block)
        if generation.written > most:
            raise ValueError(
                f"it writes more than {most:,} characters for one conversation, whose "
                f"messages have {spoken:,}"
            )
    text = "".join(blocks)
    spans = [(start, start + len(marked)) for start, marked in generation.marks]
    for (start, end), (_, marked) in zip(spans, generation.marks, strict=True):
        if text[start:end] != marked:
            raise ValueError(
                "{% generation %} marks a text that a macro, a filter or a set block changes "
                "or moves"
            )
    return text, spans


def serve() -> None:
    """Answer requests until the standard input ends."""
    # where the system has no such limit, time alone bounds a request
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    state: tuple[Template, Generation] | None = None
    left = SECONDS
    for line in sys.stdin:
        request = json.loads(line)
        messages = sum(len(item["messages"]) for item in request.get("renders", []))
        left = min(SECONDS, max(left, 0.0) + EACH * max(messages, 1))
        signal.setitimer(signal.ITIMER_PROF, left)
        began = time.process_time()
        try:
            if "source" in request:
                state = None
                sandbox = environment(datetime.fromisoformat(request["now"]))
                generation = sandbox.extensions[Generation.identifier]
                assert isinstance(generation, Generation)
                state = sandbox.from_string(request["source"]), generation
                names = meta.find_undeclared_variables(sandbox.parse(request["source"])) - set(
                    sandbox.globals
                )
                reply: dict[str, Any] = {"generation": generation.used, "names": sorted(names)}
            else:
                assert state is not None
                rendered = [
                    render(*state, item["messages"], item["prompt"], request["variables"])
                    for item in request["renders"]
                ]
                reply = {
                    "texts": [text for text, _ in rendered],
                    "marks": [marks for _, marks in rendered],
                }
            answer = json.dumps(reply)
        except MemoryError:
            answer = json.dumps({"error": f"it needs more than {MEMORY >> 20} MB of memory"})
        except Exception as error:  # whatever a template makes of its values
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:500]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        left -= time.process_time() - began
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
