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

An answer without text may change what stands around it. It is learned as the template writes it,
"(none)" in its place too, where that stands between what the template writes around an answer
with text. One that the template leaves out has no place.

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
VERSION = 3
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
        all_filled = self._frames_without_empty(messages, words) or frames
        gaps, places = words.split(between)
        if places != frames.places:
            raise ValueError(
                f"{name} arranges messages by what they say, so that its answers have no place"
            )
        spans: list[Span] = []
        filled = {gap.preceding: gap for gap in all_filled.gaps}
        starts = _starts(text, gaps, places, messages, name)
        for start, gap, plain in zip(starts, gaps, frames.gaps, strict=True):
            with_text = filled.get(plain.preceding, plain)
            answers = None
            if not all(says_something(messages[number]) for number in with_text.answers):
                answers = self._with_silent(gap, plain, with_text, all_filled, messages)
                if answers is None and not self._leaves_out(plain, with_text, messages, text):
                    raise ValueError(_no_place(name, with_text, messages))
            if answers is None:
                answers = self._answers(gap, plain, frames, messages)
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

    def _frames_without_empty(self, messages: Sequence[Message], words: Words) -> Frames | None:
        """What the template writes where the answers without text say something; None: all do, or
        it refuses that.
        """
        if all(says_something(message) for message in messages if message["role"] == ANSWERS):
            return None
        filled = list(messages)
        for number, message in enumerate(messages):
            if message["role"] == ANSWERS and not says_something(message):
                filled[number] = {**message, "content": "x"}
        try:
            return self._frames_of(filled, words)
        except ValueError:
            return None

    def _frames_of(self, messages: Sequence[Message], words: Words) -> Frames:
        roles = _roles(messages)
        if (frames := self._frames.get(roles)) is None:
            frames = Frames(self.renderer, messages, self._markers)
            if len(self._frames) < _KEPT:
                self._frames[roles] = frames
        return frames

    def _with_silent(
        self, gap: str, plain: Gap, filled: Gap, frames: Frames, messages: Sequence[Message]
    ) -> list[Span] | None:
        """The answers between two messages that are none, some of them without text; None: the
        template does not write those as answers.

        Args:
            plain: texts around the answers with text.
            filled: texts around all answers where all of them have text, out of `frames`.
        """
        if _fits(gap, filled, messages):
            return self._answers(gap, filled, frames, messages)
        if (written := _texts_for_silent(plain, filled)) is not None:
            spoken = list(messages)
            for number, text in written.items():
                spoken[number] = {**messages[number], "content": text}
            if _fits(gap, filled, spoken):
                return self._answers(gap, filled, frames, spoken)
        if len(filled.answers) > 1:
            return None
        prompt = frames.prompt(filled)
        header, following = filled.literals
        start = frames.after_prompt(gap, prompt)
        after = following[frames.ending(filled.answers[0], following) :]
        end = len(gap) - len(after)
        asked = gap[:start] == header[: frames.after_prompt(header, prompt)]
        if asked and start < end and gap.endswith(after):
            return [(start, end)]
        # a part of the header, and all that follows an answer: the answer is its ending
        end = len(gap) - len(following)
        ends = gap.endswith(following) and len(after) < len(following)
        if ends and end > 0 and header.startswith(gap[:end]):
            return [(end, len(gap) - len(after))]
        return None

    def _leaves_out(self, plain: Gap, filled: Gap, messages: Sequence[Message], text: str) -> bool:
        """Whether the template writes nothing of its own for the answers without text.

        Either parts of what stands around an answer are all that it writes, or `text`, that of the
        conversation, is the same without those answers.
        """
        if (runs := _runs(plain, filled)) is not None and all(
            not run.silent
            or self._markers.common(run.written, run.literals[0])
            + self._markers.common(run.written, run.literals[-1], from_end=True)
            >= len(run.written)
            for run in runs
        ):
            return True
        speaking = [
            message for message in messages if message["role"] != ANSWERS or says_something(message)
        ]
        try:
            return self.renderer.render([(speaking, False)])[0].text == text
        except ValueError:
            return False

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


def _fits(gap: str, frame: Gap, messages: Sequence[Message]) -> bool:
    """Whether a gap holds the contents of its answers, each between the texts of `frame`."""
    if not gap.startswith(frame.literals[0]):
        return False
    at = len(frame.literals[0])
    for number, literal in zip(frame.answers, frame.literals[1:], strict=True):
        content = messages[number]["content"]
        if says_something(messages[number]):
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


@dataclass(frozen=True)
class _Run:
    """What a template writes between two answers with text, or to the ends of a gap.

    Args:
        written: the text.
        silent: numbers of the answers without text that stand there.
        literals: texts around them where they have text.
    """

    written: str
    silent: list[int]
    literals: list[str]


def _runs(plain: Gap, filled: Gap) -> list[_Run] | None:
    """The texts of a gap, as they are and as they are where all answers have text; None: those
    that have text are not the same.
    """
    speaking = set(plain.answers)
    if [number for number in filled.answers if number in speaking] != plain.answers:
        return None
    runs = [_Run(plain.literals[0], [], [filled.literals[0]])]
    for number, literal in zip(filled.answers, filled.literals[1:], strict=True):
        if number in speaking:
            runs.append(_Run(plain.literals[len(runs)], [], [literal]))
        else:
            runs[-1].silent.append(number)
            runs[-1].literals.append(literal)
    return runs


def _texts_for_silent(plain: Gap, filled: Gap) -> dict[int, str] | None:
    """What the template writes in the place of each answer without text, by its number; None: it
    writes something else around it, or more than one place is possible.
    """
    if (runs := _runs(plain, filled)) is None:
        return None
    texts: dict[int, str] = {}
    for run in runs:
        if not run.silent:
            continue
        opening, *between, closing = run.literals
        start = len(opening)
        stop = len(run.written) - len(closing)
        if stop < start or not (run.written.startswith(opening) and run.written.endswith(closing)):
            return None
        for number, literal in zip(run.silent, [*between, None], strict=True):
            end = stop if literal is None else run.written.find(literal, start, stop)
            if end < 0:
                return None
            texts[number] = run.written[start:end]
            start = end + len(literal or "")
        # from the right, too: equal texts leave one place each
        for literal, number in zip(reversed(between), reversed(run.silent), strict=False):
            start = run.written.rfind(literal, len(opening), stop) + len(literal)
            if run.written[start:stop] != texts[number]:
                return None
            stop = start - len(literal)
    return texts


def _no_place(name: str, gap: Gap, messages: Sequence[Message]) -> str:
    number = next(number for number in gap.answers if not says_something(messages[number]))
    return (
        f"{name} writes other text around message {number + 1}, an answer that says nothing, so "
        "that it has no place: leave such answers out of the data, or give another template, "
        "data.template=FILE.jinja"
    )
