"""The place of each answer in the rendering of a whole conversation.

The text that is learned is the one that the template writes for the conversation. A template that
marks answers with `{% generation %}` says itself what they are. For another one they are found by
rendering it with other contents:

    the conversation   <|user|> 2+2? <|end|> <|assistant|> 4 <|end|> <|user|> …
    contents of users replaced by words, to know what lies between them
    all contents replaced, to know what the template writes around an answer

Between two messages that are no answers, an answer begins where the text departs from what the
template writes as a prompt for it, and ends with what the template writes after an answer that is
the last message. Both are compared in whole markers, so that `<|end|><|user|>` and
`<|end|><|endoftext|>` share `<|end|>`. Where nothing is written after an answer, the marker that
begins the next message is what ends it (GLM-4).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile

from fp4train.data.rendering import Message, Renderer

ANSWERS = "assistant"
_MARKER = r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]|\[\|[^\s|\[\]]{1,32}\|\]"
"""What separates messages in templates whose tokenizer has no such token."""
_KINDS = 64
"""Surroundings of answers that are rendered by themselves for one conversation."""
_KEPT = 256
"""Sequences of roles whose surroundings are kept."""

Span = tuple[int, int]
"""Characters [start, end)."""


@dataclass(frozen=True)
class Conversation:
    """The text of a conversation and its answers, each with what ends it."""

    text: str
    answers: tuple[Span, ...]


class AnswerFinder:
    """Renders conversations and finds their answers.

    Args:
        special: tokens that a tokenizer makes one id of.
    """

    def __init__(self, renderer: Renderer, special: Sequence[str] = ()) -> None:
        self.renderer = renderer
        words = sorted(map(re.escape, special), key=len, reverse=True)
        self._markers = re.compile("|".join([*words, _MARKER]))
        self._frames: dict[tuple[tuple[str, str | None], ...], _Frames] = {}

    def find(self, messages: Sequence[Message]) -> Conversation:
        """The text of `messages` and its answers.

        Raises:
            ValueError: there is no answer, the template refuses the messages, or leaves the answers
                out or without a place.
        """
        if all(message["role"] != ANSWERS for message in messages):
            roles = ", ".join(sorted({message["role"] for message in messages})) or "none"
            raise ValueError(
                f'it has no message of the role "{ANSWERS}" to learn from; its roles: {roles[:100]}'
            )
        name = self.renderer.name
        if self.renderer.generation:
            rendered = self.renderer.render([(messages, False)])[0]
            marked = tuple(span for span in rendered.marks if span[0] < span[1])
            if not marked:
                raise ValueError(
                    f"{name} marks nothing of it with {{% generation %}}, so that there is "
                    "nothing to learn"
                )
            return Conversation(rendered.text, marked)
        words = _Words(messages, self.renderer.source)
        text, between = (
            rendered.text
            for rendered in self.renderer.render(
                [(messages, False), (words.put(messages, answers=False), False)]
            )
        )
        frames = self._frames_of(messages, words)
        all_filled = self._frames_without_empty(messages, words) or frames
        gaps, places = words.split(between)
        if places != frames.places:
            raise ValueError(
                f"{name} arranges messages by what they say, so that its answers have no place"
            )
        spans: list[Span] = []
        empty = dict(zip(all_filled.places, all_filled.gaps[1:], strict=True))
        starts = _starts(text, gaps, places, messages, name)
        for place, start, gap, frame in zip([-1, *places], starts, gaps, frames.gaps, strict=True):
            silent = all_filled.gaps[0] if place < 0 else empty.get(place)
            if silent is not None and _writes_silent(gap, silent, messages):
                answers = self._answers(gap, silent, all_filled, messages)
            else:
                answers = self._answers(gap, frame, frames, messages)
            spans += ((start + begin, start + end) for begin, end in answers)
        if not any(start < end for start, end in spans):
            raise ValueError(
                f"{name} writes nothing for its answers, so that there is nothing to learn: "
                "give another one, "
                "data.template=FILE.jinja"
            )
        return Conversation(text, tuple(spans))

    def _frames_without_empty(
        self, messages: Sequence[Message], words: "_Words"
    ) -> "_Frames | None":
        """What the template writes where the answers without text say something; None: all do, or
        it refuses that.
        """
        if all(_says_something(message) for message in messages if message["role"] == ANSWERS):
            return None
        filled = list(messages)
        for number, message in enumerate(messages):
            if message["role"] == ANSWERS and not _says_something(message):
                filled[number] = {**message, "content": "x"}
        try:
            return self._frames_of(filled, words)
        except ValueError:
            return None

    def _frames_of(self, messages: Sequence[Message], words: "_Words") -> "_Frames":
        roles = tuple(
            (message["role"], None if _says_something(message) else message["content"])
            for message in messages
        )
        if (frames := self._frames.get(roles)) is None:
            frames = _Frames(self.renderer, messages, self._markers)
            if len(self._frames) < _KEPT:
                self._frames[roles] = frames
        return frames

    def _answers(
        self, gap: str, frame: "_Gap", frames: "_Frames", messages: Sequence[Message]
    ) -> list[Span]:
        """The answers in what the template writes between two messages that are none."""
        if not frame.answers:
            return []
        start = frames.after_prompt(gap, frames.prompt(frame))
        last = frame.literals[-1]
        if not gap.endswith(last):
            raise ValueError(
                f"{self.renderer.name} ends an answer by what it says, so that answer "
                f"{frame.answers[-1] + 1} has no place: give another one, "
                "data.template=FILE.jinja"
            )
        spans: list[Span] = []
        for number, literal in zip(frame.answers[:-1], frame.literals[1:-1], strict=True):
            content = messages[number]["content"].strip()
            place = gap.find(content, start)
            end = place
            if place >= 0:
                end = gap.find(literal, place + len(content))
            if end < 0:
                raise ValueError(
                    f"{self.renderer.name} rewrites message {number + 1}, which then has no place"
                )
            spans.append((start, end + frames.ending(number, literal)))
            start = end + len(literal)
        end = len(gap) - len(last)
        spans.append((min(start, end), end + frames.ending(frame.answers[-1], last)))
        return spans


def _starts(
    text: str, gaps: Sequence[str], places: Sequence[int], messages: Sequence[Message], name: str
) -> list[int]:
    """Where in `text` each gap begins: it lies before the content of the message of the same place.

    Raises:
        ValueError: the text is not what the template writes around those contents.
    """
    starts = [0]
    at = len(gaps[0])
    fits = text.startswith(gaps[0])
    for (_, gap), number in zip(pairwise(gaps), places, strict=True):
        content = messages[number]["content"]
        ends = [
            at + len(variant)
            for variant in _variants(content)
            if text.startswith(variant + gap, at)
        ]
        start = ends[0] if ends else text.find(gap, at)
        fits = fits and start >= 0
        starts.append(start)
        at = start + len(gap)
    if not fits or at != len(text):
        raise ValueError(
            f"{name} writes other text around messages that say something else, so that its "
            "answers have no place"
        )
    return starts


def _variants(content: str) -> tuple[str, ...]:
    """A content as templates write it: as it is, or without the spaces around it."""
    return content, content.strip(), content.rstrip(), content.lstrip()


def _writes_silent(gap: str, frame: "_Gap", messages: Sequence[Message]) -> bool:
    """Whether a gap holds answers without text, written as those that say something are.

    Args:
        frame: texts that the template writes there where all answers say something.
    """
    if all(_says_something(messages[number]) for number in frame.answers) or not gap.startswith(
        frame.literals[0]
    ):
        return False
    at = len(frame.literals[0])
    for number, literal in zip(frame.answers, frame.literals[1:], strict=True):
        content = messages[number]["content"]
        if _says_something(messages[number]):
            end = gap.find(content.strip(), at)
            if end >= 0:
                end = gap.find(literal, end + len(content.strip()))
        else:
            ends = [
                at + len(variant)
                for variant in _variants(content)
                if gap.startswith(variant + literal, at)
            ]
            end = max(ends, default=-1)
        if end < 0:
            return False
        at = end + len(literal)
    return at == len(gap)


def _says_something(message: Message) -> bool:
    """Whether a template sees a content: an empty one may leave out what stands around it, too."""
    return bool(message["content"].strip())


class _Words:
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
            if _says_something(message) and (answers or message["role"] != ANSWERS):
                replaced[number] = {**message, "content": f"{self._stem}{number}e"}
        return replaced

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The texts between words, and the numbers of the messages that the words stand for."""
        parts = self._word.split(text)
        return parts[::2], [int(number) for number in parts[1::2]]


@dataclass
class _Gap:
    """What a template writes between two messages that are no answers.

    Args:
        preceding: number of the message before it; -1: there is none.
        literals: texts around the contents of `answers`, in order.
        answers: numbers of the answers in it.
    """

    preceding: int
    literals: list[str]
    answers: list[int]


class _Frames:
    """What a template writes around messages of given roles, whatever they say."""

    def __init__(
        self, renderer: Renderer, messages: Sequence[Message], markers: "re.Pattern[str]"
    ) -> None:
        self._renderer = renderer
        self._markers = markers
        self._words = _Words([], renderer.source)
        self._messages = self._words.put(messages, answers=True)
        literals, places = self._words.split(renderer.render([(self._messages, False)])[0].text)
        self.places: list[int] = []
        self.gaps = [_Gap(-1, [literals[0]], [])]
        for number, literal in zip(places, literals[1:], strict=True):
            if self._messages[number]["role"] == ANSWERS:
                self.gaps[-1].answers.append(number)
                self.gaps[-1].literals.append(literal)
            else:
                self.places.append(number)
                self.gaps.append(_Gap(number, [literal], []))
        self._prompts: dict[tuple[str, str], str] = {}
        self._endings: dict[str, int] = {}
        self._endings_alike: dict[str, int] = {}
        """By what is written with its numbers replaced, for templates that count turns."""

    def prompt(self, gap: _Gap) -> str:
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
        header = self._prompted[self.common(self._prompted, self._unprompted) :]
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

    @property
    def _unprompted(self) -> str:
        return self._opening[1]

    @property
    def _prompted(self) -> str:
        return self._opening[2]

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
            length = self.common(written, alone)
            if not written[:length].strip() and (marker := self._markers.match(written.lstrip())):
                length = len(written) - len(written.lstrip()) + marker.end()
            elif self._prompted == self._unprompted and (ending := self._before_user(number)):
                length = min(length, self.common(written, ending))
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
        header = zip(
            reversed(self._atoms(between)), reversed(self._atoms(self._opening[0])), strict=False
        )
        shared = sum(len(ours) for ours, _ in takewhile(lambda pair: pair[0] == pair[1], header))
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

    def common(self, text: str, other: str) -> int:
        """Characters that both texts begin with, without a part of a marker."""
        length = 0
        for ours, theirs in zip(self._atoms(text), self._atoms(other), strict=False):
            if ours != theirs:
                break
            length += len(ours)
        return length

    def after_prompt(self, text: str, prompt: str) -> int:
        """Characters of `text` that are the prompt for an answer: as far as both agree, or, where
        `text` holds all of the prompt but spaces, to the end of it.
        """
        length = self.common(text, prompt)
        if length == len(prompt):
            return length
        atoms = self._atoms(text)
        place = 0
        for atom in self._atoms(prompt):
            if not atom.isspace():
                while place < len(atoms) and atoms[place].isspace():
                    place += 1
            if place < len(atoms) and atoms[place] == atom:
                place += 1
            elif not atom.isspace():
                return length
        return sum(map(len, atoms[:place]))

    def _atoms(self, text: str) -> list[str]:
        """Markers, and the characters between them."""
        atoms: list[str] = []
        at = 0
        for marker in self._markers.finditer(text):
            atoms += text[at : marker.start()]
            atoms.append(marker[0])
            at = marker.end()
        return atoms + list(text[at:])
