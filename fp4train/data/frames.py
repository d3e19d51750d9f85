"""What a chat template writes around messages: its text for messages whose contents are words that
stand for any content.

    <|user|> Zq0vx0e <|end|> <|assistant|> Zq0vx1e <|end|>

The texts between words are the frame of a sequence of roles. Prompts and endings of answers are
read off conversations that stop there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from fp4train.data.rendering import Message, Renderer

ANSWERS = "assistant"
"""The role of the messages that are learned."""
_KINDS = 64
"""Surroundings of answers that are rendered by themselves for one conversation."""


def says_something(message: Message) -> bool:
    """Whether a template sees a content: an empty one may leave out what stands around it, too."""
    return bool(message["content"].strip())


class Words:
    """Words that stand for the contents of messages."""

    def __init__(self, messages: Sequence[Message], source: str) -> None:
        texts = [source, *(message["content"] for message in messages)]
        stem = next(
            stem
            for stem in (f"Zq{number}vx" for number in range(1 << 30))
            if not any(stem in text for text in texts)
        )
        self._stem = stem
        self._word = re.compile(rf"{stem}(\d+)e")

    def put(self, messages: Sequence[Message], *, answers: bool) -> list[Message]:
        """The messages with words in the place of their contents; with `answers` in that of
        answers, too.
        """
        replaced = list(messages)
        for number, message in enumerate(messages):
            if says_something(message) and (answers or message["role"] != ANSWERS):
                replaced[number] = {**message, "content": f"{self._stem}{number}e"}
        return replaced

    def append(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, each with its word at the end of what its content says."""
        marked = list(messages)
        for number, message in enumerate(messages):
            if says_something(message):
                text = message["content"].rstrip()
                spaces = message["content"][len(text) :]
                marked[number] = {**message, "content": f"{text}{self._stem}{number}e{spaces}"}
        return marked

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The texts between words, and the numbers of the messages that the words stand for."""
        parts = self._word.split(text)
        return parts[::2], [int(number) for number in parts[1::2]]


class Markers:
    """What separates messages in a template.

    Args:
        expression: regular expression of the markers.
    """

    def __init__(self, expression: str) -> None:
        self._expression = re.compile(expression)

    def at_start(self, text: str) -> str:
        """The marker that a text begins with; empty: it begins with none."""
        marker = self._expression.match(text)
        return marker[0] if marker else ""

    def atoms(self, text: str) -> list[str]:
        """The markers of a text, and the characters between them."""
        atoms: list[str] = []
        at = 0
        for marker in self._expression.finditer(text):
            atoms += text[at : marker.start()]
            atoms.append(marker[0])
            at = marker.end()
        return atoms + list(text[at:])

    def common(self, text: str, other: str, *, from_end: bool = False) -> int:
        """Characters that both texts begin with, without a part of a marker.

        Args:
            from_end: count those that both end with instead.
        """
        atoms = [self.atoms(part) for part in (text, other)]
        if from_end:
            atoms = [part[::-1] for part in atoms]
        pairs = zip(*atoms, strict=False)
        return sum(len(ours) for ours, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass
class Gap:
    """What a template writes between two messages that are no answers.

    Args:
        preceding: number of the message before it; -1: there is none.
        literals: texts around the contents of `answers`, in order.
        answers: numbers of the answers in it.
    """

    preceding: int
    literals: list[str]
    answers: list[int]


class Frames:
    """What a template writes around messages of given roles, whatever they say."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], markers: Markers) -> None:
        self._renderer = renderer
        self._markers = markers
        self._words = Words([], renderer.source)
        self._messages = self._words.put(messages, answers=True)
        literals, places = self._words.split(renderer.render([(self._messages, False)])[0].text)
        self.places: list[int] = []
        self.gaps = [Gap(-1, [literals[0]], [])]
        for number, literal in zip(places, literals[1:], strict=True):
            if self._messages[number]["role"] == ANSWERS:
                self.gaps[-1].answers.append(number)
                self.gaps[-1].literals.append(literal)
            else:
                self.places.append(number)
                self.gaps.append(Gap(number, [literal], []))
        self._prompts: dict[tuple[str, str], str] = {}
        self._endings: dict[str, int] = {}
        self._endings_alike: dict[str, int] = {}
        """By what is written with its numbers replaced, for templates that count turns."""

    def prompt(self, gap: Gap) -> str:
        """What the template writes after the message before `gap`, as a prompt for its first
        answer.
        """
        written = gap.literals[0]
        if gap.preceding < 0:
            role = ""
        else:
            role = self._messages[gap.preceding]["role"]
        key = role, written
        if key not in self._prompts:
            if len(self._prompts) >= _KINDS:
                return written
            prompt = (
                self._after(self._messages[: gap.answers[0]], gap.preceding, prompt=True) or written
            )
            if gap.preceding < 0:
                prompt = self._first_prompt(prompt, written)
            self._prompts[key] = prompt
        return self._prompts[key]

    def _first_prompt(self, prompt: str, written: str) -> str:
        """The prompt for an answer that no message stands before: a template that writes prompts
        behind the last message writes none behind nothing, so that it is read off what is written
        behind a user's.

        Args:
            prompt: text that the template writes as a prompt where there are no messages.
            written: text that it writes before the answer.
        """
        _, unprompted, prompted = self._opening
        header = prompted[self._markers.common(prompted, unprompted) :]
        place = written.rfind(header) if header else -1
        if place < 0:
            return prompt
        return written[: place + len(header)]

    @cached_property
    def _opening(self) -> tuple[str, str, str]:
        """What the template writes before a first message of a user, after it, and after it with a
        prompt.
        """
        user = self._words.put([{"role": "user", "content": "x"}], answers=True)
        try:
            texts = self._renderer.render([(user, False), (user, True)])
        except ValueError:
            return "", "", ""
        (plain, _), (with_prompt, _) = (self._words.split(rendered.text) for rendered in texts)
        if len(plain) != 2 or len(with_prompt) != 2:
            return "", "", ""
        return plain[0], plain[1], with_prompt[1]

    def ending(self, number: int, written: str) -> int:
        """How many characters of what is written after answer `number` end it."""
        alike = re.sub(r"\d+", "0", written)
        if written not in self._endings:
            full = len(self._endings) >= _KINDS
            if full and (alike in self._endings_alike or len(self._endings_alike) >= _KINDS):
                return min(self._endings_alike.get(alike, 0), len(written))
            alone = written
            if number < len(self._messages) - 1:
                alone = self._after(self._messages[: number + 1], number, prompt=False) or ""
            length = self._markers.common(written, alone)
            _, unprompted, prompted = self._opening
            marker = self._markers.at_start(written.lstrip())
            if not written[:length].strip() and marker:
                length = len(written) - len(written.lstrip()) + len(marker)
            elif prompted == unprompted and (ending := self._before_user(number)):
                length = min(length, self._markers.common(written, ending))
            self._endings[written] = self._endings_alike[alike] = length
        return self._endings[written]

    def _before_user(self, number: int) -> str:
        """What the template writes between answer `number` and the turn of a user who goes on;
        empty: it is not known.

        It ends an answer where a template writes the marker of the next turn whether it is asked
        for or not.
        """
        user = self._words.put(
            [*self._messages[: number + 1], {"role": "user", "content": "x"}], answers=True
        )
        try:
            literals, places = self._words.split(self._renderer.render([(user, False)])[0].text)
        except ValueError:
            return ""
        if places[-2:] != [number, number + 1]:
            return ""
        between = literals[-2]
        shared = self._markers.common(between, self._opening[0], from_end=True)
        return between[: len(between) - shared]

    def _after(self, messages: Sequence[Message], number: int, *, prompt: bool) -> str | None:
        """What the template writes after the last word of message `number`; None: it refuses the
        messages.
        """
        try:
            text = self._renderer.render([(messages, prompt)])[0].text
        except ValueError:
            return None
        literals, places = self._words.split(text)
        if number < 0:
            return literals[0] if not places else None
        return literals[-1] if number in places else None

    def after_prompt(self, text: str, prompt: str) -> int:
        """Characters of `text` that are the prompt for an answer: as far as both agree, or, where
        `text` holds all of the prompt but spaces, to the end of it.
        """
        length = self._markers.common(text, prompt)
        if length == len(prompt):
            return length
        atoms = self._markers.atoms(text)
        place = 0
        for atom in self._markers.atoms(prompt):
            if not atom.isspace():
                while place < len(atoms) and atoms[place].isspace():
                    place += 1
            if place < len(atoms) and atoms[place] == atom:
                place += 1
            elif not atom.isspace():
                return length
        return sum(map(len, atoms[:place]))
