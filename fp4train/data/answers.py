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

An answer without text is not learned: what a template writes for it may be anything.

Answers that are not to be learned are told by words at the ends of the contents: an answer in the
text belongs to the message whose word stands in it.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fp4train.data.frames import ANSWERS, Frames, Gap, Markers, Words, says_something
from fp4train.data.rendering import Message, Renderer

_MARKER = r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]|\[\|[^\s|\[\]]{1,32}\|\]"
"""What separates messages in templates whose tokenizer has no such token."""
_KEPT = 256
"""Sequences of roles whose surroundings are kept."""
VERSION = 4
"""Part of the key of cached conversations: another number where equal conversations give other
answers, texts or sequences.
"""

Roles = tuple[tuple[str, str | None], ...]
"""The role of each message, and its content where that is blank."""
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
        self._markers = Markers("|".join([*words, _MARKER]))
        self._frames: dict[Roles, Frames] = {}
        self._marks_answers: set[Roles] = set()

    def find(self, messages: Sequence[Message]) -> Conversation:
        """The text of `messages` and its answers.

        Raises:
            ValueError: there is no answer, the template refuses the messages, or leaves the answers
                out or without a place.
        """
        if not any(message["role"] == ANSWERS and says_something(message) for message in messages):
            roles = ", ".join(sorted({message["role"] for message in messages})) or "none"
            raise ValueError(
                f'it has no message of the role "{ANSWERS}" with text to learn from; its roles: '
                f"{roles[:100]}"
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
            self._check_marks(messages)
            return Conversation(rendered.text, marked)
        words = Words(messages, self.renderer.source)
        text, between = (
            rendered.text
            for rendered in self.renderer.render(
                [(messages, False), (words.put(messages, answers=False), False)]
            )
        )
        frames = self._frames_of(messages, words)
        gaps, places = words.split(between)
        if places != frames.places:
            raise ValueError(
                f"{name} arranges messages by what they say, so that its answers have no place"
            )
        spans: list[Span] = []
        starts = _starts(text, gaps, places, messages, name)
        for start, gap, frame in zip(starts, gaps, frames.gaps, strict=True):
            answers = self._answers(gap, frame, frames, messages)
            spans += ((start + begin, start + end) for begin, end in answers)
        if not any(start < end for start, end in spans):
            raise ValueError(
                f"{name} writes nothing for its answers, so that there is nothing to learn: "
                "give another one, "
                "data.template=FILE.jinja"
            )
        return Conversation(text, tuple(spans))

    def without(
        self, conversation: Conversation, messages: Sequence[Message], unlearned: Container[int]
    ) -> Conversation:
        """The conversation without the answers that are not to be learned.

        Args:
            messages: its messages, with all their keys.
            unlearned: numbers of those that are not.

        Raises:
            ValueError: the template writes a key beside role and content, or leaves the answers
                without places of their own.
        """
        words = Words(messages, self.renderer.source)
        rendered = self.renderer.render([(words.append(messages), False)])[0]
        texts, numbers = words.split(rendered.text)
        if "".join(texts) != conversation.text:
            keys = {key: None for message in messages for key in message}
            raise ValueError(
                f"{self.renderer.name} writes other text where messages have the keys "
                f"{', '.join(keys)}: leave out those that it reads beside role and content"
            )
        places = list(zip(accumulate(map(len, texts)), numbers, strict=False))
        learned: list[Span] = []
        for span in conversation.answers:
            flags = {number not in unlearned for number in _speakers(span, places, messages)}
            if len(flags) != 1:
                raise ValueError(
                    f"{self.renderer.name} writes answers that are learned and others that are "
                    "not as one: give another one, data.template=FILE.jinja"
                )
            if flags == {True}:
                learned.append(span)
        return Conversation(conversation.text, tuple(learned))

    def _check_marks(self, messages: Sequence[Message]) -> None:
        """Refuse a template whose marks enclose nothing of what any answer says: words in the place
        of contents tell, once for each sequence of roles.

        Raises:
            ValueError: it is one.
        """
        roles = _roles(messages)
        if roles in self._marks_answers or (ANSWERS, None) not in roles:
            return
        words = Words(messages, self.renderer.source)
        probe = self.renderer.render([(words.put(messages, answers=True), False)])[0]
        for start, end in probe.marks:
            _, places = words.split(probe.text[start:end])
            if any(messages[place]["role"] == ANSWERS for place in places):
                if len(self._marks_answers) < _KEPT:
                    self._marks_answers.add(roles)
                return
        raise ValueError(
            f"{self.renderer.name} writes nothing of what its answers say where it marks them: "
            "it may take contents that are lists of parts, as models of pictures do. Give another "
            "one, data.template=FILE.jinja"
        )

    def _frames_of(self, messages: Sequence[Message], words: Words) -> Frames:
        roles = _roles(messages)
        if (frames := self._frames.get(roles)) is None:
            frames = Frames(self.renderer, messages, self._markers)
            if len(self._frames) < _KEPT:
                self._frames[roles] = frames
        return frames

    def _answers(
        self, gap: str, frame: Gap, frames: Frames, messages: Sequence[Message]
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


def _speakers(
    span: Span, places: Sequence[tuple[int, int]], messages: Sequence[Message]
) -> list[int]:
    """The numbers of the messages that a part of a text may belong to: those whose contents end in
    it, or, where none does, the answers from the message before it to the one behind.

    Args:
        places: the end of the content of each message, and the number of the message.
    """
    start, end = span
    if inside := [number for place, number in places if start < place <= end]:
        return inside
    before = [number for place, number in places if place <= start]
    behind = [number for place, number in places if place > end]
    first = before[-1] if before else 0
    last = behind[0] if behind else len(messages) - 1
    return [number for number in range(first, last + 1) if messages[number]["role"] == ANSWERS]


def _roles(messages: Sequence[Message]) -> Roles:
    return tuple(
        (message["role"], None if says_something(message) else message["content"])
        for message in messages
    )


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
