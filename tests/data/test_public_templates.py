"""Published chat templates: conversations are learned in the text that transformers renders, and of
it the answers; what is refused is refused with its reason.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import VARIABLES
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from fp4train.data import AnswerFinder, ChatTemplate, Conversation
from fp4train.data.rendering import WORKER

FOLDER = Path(__file__).with_name("public_templates")
"""The templates; SOURCES.md says whose they are."""
TEMPLATES = {
    str(path.relative_to(FOLDER).with_suffix("")): path.read_text()
    for path in sorted(FOLDER.rglob("*.jinja"))
}
DAY = datetime(2026, 1, 2, 3, 4, 5)
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def talk(roles: str, *contents: str) -> list[dict[str, str]]:
    return [
        {"role": ROLES[role], "content": content}
        for role, content in zip(roles, contents, strict=True)
    ]


CONVERSATIONS = {
    "a system prompt": talk("sua", "Be brief.", "What is 2+2?", "It is four."),
    "two turns": talk("uaua", "What is 2+2?", "It is four.", "And 3+3?", "Six,\n of course."),
    "five turns": talk(
        "s" + "ua" * 5,
        "Be brief.",
        *(text for n in range(5) for text in (f"{n}+{n}?", f"It is {2 * n}.")),
    ),
    "thoughts": talk(
        "uaua",
        "What is 2+2?",
        "<think>\nTwo and two.\n</think>\n\nIt is four.",
        "And 3+3?",
        "<think>\nThree and three.\n</think>\n\nSix.",
    ),
    "spaces and signs": talk(
        "uaua",
        "  Write code: \n",
        "\n    def f(x):\n        return x  # <b> 'q' & é 漢字 😀 \n",
        "thx ",
        " ok ",
    ),
    "empty turns": talk("uauaua", "Hello!", "", "And more?", "yes", "", "What?"),
    "the result of a tool": talk("uata", "2+2?", "add(2, 2)", '{"sum": 4}', "It is four."),
    "the same words": talk("uauaua", *["yes"] * 6),
}

CONTENTS_OF_PARTS = "writes nothing (for its answers|of what its answers say where it marks them)"
REFUSED = {
    ("trl/idefics3", name): CONTENTS_OF_PARTS for name in CONVERSATIONS if name != "empty turns"
}
"""Pairs that transformers renders and no run learns, with the reason that is given: a template for
pictures writes no content that is text.
"""

MARKED_HEADERS = {"trl/deepseekv3": ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>")}
"""What begins an answer and is marked as a part of it, though a prompt holds it."""


@dataclass(frozen=True)
class Pair:
    """A conversation as transformers renders it, and as it is learned.

    Attributes:
        text: transformers' text; None: it refuses the conversation.
        marks: characters [start, end) that its `{% generation %}` marks.
        learned: what is learned; text: why it is refused.
        without: what is learned without each of the answers.
    """

    text: str | None
    marks: list[tuple[int, int]]
    learned: Conversation | str
    without: list[Conversation] = field(default_factory=list)


def pairs_of(source: str, finder: AnswerFinder) -> dict[str, Pair]:
    pairs = {}
    for name, messages in CONVERSATIONS.items():
        text = None
        marks: list[tuple[int, int]] = []
        learned: Conversation | str
        try:
            texts, spans = render_jinja_template(
                [messages],
                chat_template=source,
                return_assistant_tokens_mask="{% generation" in source,
                **VARIABLES,
            )
            text = texts[0]
            marks = [tuple(span) for span in (spans or [[]])[0]]
        except TemplateError:
            pass
        without = []
        try:
            learned = finder.find(messages)
            without = [
                finder.without(learned, messages, {number})
                for number, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
        except ValueError as error:
            learned = str(error)
        pairs[name] = Pair(text, marks, learned, without)
    return pairs


def characters(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


@pytest.fixture(scope="module")
def table() -> Mapping[tuple[str, str], Pair]:
    """Each template with each conversation, on the same day, by one process that renders: most of
    the time is that of its start.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return DAY

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Day)
        patch.setattr("subprocess.Popen", lambda *_, **__: process)
        # The process ends with the first of them that is gone.
        finders = {
            name: ChatTemplate(source=source, variables=VARIABLES, now=DAY.isoformat()).finder(
                tuple(VARIABLES.values())
            )
            for name, source in TEMPLATES.items()
        }
        return {
            (template, conversation): pair
            for template, finder in finders.items()
            for conversation, pair in pairs_of(TEMPLATES[template], finder).items()
        }


@pytest.mark.long
def test_what_transformers_renders_is_learned(table: Mapping[tuple[str, str], Pair]) -> None:
    """At least 97 of 100: the others are `REFUSED`, each with its reason."""
    rendered = {key: pair for key, pair in table.items() if pair.text is not None}
    learned = [
        key
        for key, pair in rendered.items()
        if isinstance(pair.learned, Conversation) and pair.learned.text == pair.text
    ]
    others = {key: pair.learned for key, pair in rendered.items() if key not in learned}
    assert set(others) == set(REFUSED)
    for key, reason in REFUSED.items():
        with pytest.raises(ValueError, match=reason):
            raise ValueError(others[key])
    assert len(rendered) >= 432 and len(learned) >= 420 / 432 * len(rendered)


@pytest.mark.long
def test_what_transformers_refuses_is_refused_in_its_words(
    table: Mapping[tuple[str, str], Pair],
) -> None:
    refused = [pair.learned for pair in table.values() if pair.text is None]
    assert refused
    for reason in refused:
        assert isinstance(reason, str) and "refuses it: " in reason


@pytest.mark.long
def test_marked_answers_are_those_of_transformers(table: Mapping[tuple[str, str], Pair]) -> None:
    marked = {key: pair for key, pair in table.items() if pair.marks}
    assert len({template for template, _ in marked}) >= 12
    for key, pair in marked.items():
        assert isinstance(pair.learned, Conversation), key
        assert [span for span in pair.marks if span[0] < span[1]] == [*pair.learned.answers], key


@pytest.mark.long
def test_answers_that_are_found_are_those_that_a_second_template_marks(
    table: Mapping[tuple[str, str], Pair],
) -> None:
    """For many models there is a second template that writes the same text and marks answers."""
    compared = 0
    for (template, conversation), pair in table.items():
        marked = table.get((f"{template}_training", conversation))
        if marked is None or not marked.marks or pair.text != marked.text:
            continue
        if not all(message["content"].strip() for message in CONVERSATIONS[conversation]):
            continue  # an answer without text is marked, and not learned
        assert isinstance(pair.text, str) and isinstance(pair.learned, Conversation)
        found = characters(pair.learned.answers)
        assert not found - characters(marked.marks), (template, conversation)
        missing = "".join(pair.text[at] for at in sorted(characters(marked.marks) - found))
        for header in MARKED_HEADERS.get(template, ()):
            missing = missing.replace(header, "")
        assert not missing, (template, conversation)
        compared += 1
    assert compared >= 65


@pytest.mark.long
def test_every_answer_is_learned_whole(table: Mapping[tuple[str, str], Pair]) -> None:
    for key, pair in table.items():
        if not isinstance(pair.learned, Conversation):
            continue
        text = "".join(pair.learned.text[start:end] for start, end in pair.learned.answers)
        for message in CONVERSATIONS[key[1]]:
            words = message["content"].split("</think>")[-1].strip()
            if message["role"] == "assistant":
                assert words in text, key
            elif words not in {
                other["content"] for other in CONVERSATIONS[key[1]] if other["role"] == "assistant"
            }:
                assert not words or words not in text, key


@pytest.mark.long
def test_each_answer_can_be_left_out_alone(table: Mapping[tuple[str, str], Pair]) -> None:
    for key, pair in table.items():
        if not isinstance(pair.learned, Conversation):
            continue
        left_out = [set(pair.learned.answers) - set(part.answers) for part in pair.without]
        answers = [message for message in CONVERSATIONS[key[1]] if message["role"] == "assistant"]
        assert sorted(span for spans in left_out for span in spans) == [*pair.learned.answers], key
        for message, spans in zip(answers, left_out, strict=True):
            text = "".join(pair.learned.text[start:end] for start, end in sorted(spans))
            assert message["content"].split("</think>")[-1].strip() in text, key
