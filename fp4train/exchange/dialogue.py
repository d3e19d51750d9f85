"""Conversations with a trained model, in the text of its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fp4train.data.rendering import Message
from fp4train.data.template import ChatTemplate, template_of
from fp4train.errors import UserError, user_errors
from fp4train.exchange.trained import TrainedModel

_QUESTION = "A question?"
_ANSWER = "An answer."


@dataclass(frozen=True)
class Dialogue:
    """What the chat template of a model makes of messages."""

    template: ChatTemplate
    tokenizer: Any

    @classmethod
    def of(cls, trained: TrainedModel) -> "Dialogue":
        """The chat of a run or a folder.

        Raises:
            UserError: it has no template.
        """
        if (template := template_of(trained.source)) is None:
            raise UserError(f"{trained.source} has no chat template: it can only go on with a text")
        return cls(template, trained.text_tokenizer())

    def text(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """The text of messages, with `prompt` up to where an answer begins.

        Raises:
            UserError: the template refuses them.
        """
        with user_errors(ValueError):
            return self.template.render(messages, prompt=prompt)

    def encode(self, text: str) -> list[int]:
        """The ids of a text whose special tokens are meant as such."""
        if (encode := getattr(self.tokenizer, "encode_markup", None)) is None:
            return list(self.tokenizer.encode(text))
        return list(map(int, encode(text).ids))

    @cached_property
    def end(self) -> str:
        """What the template writes behind an answer; where that is nothing, before the next
        question.
        """
        asked = {"role": "user", "content": _QUESTION}
        messages = [asked, {"role": "assistant", "content": _ANSWER}]
        for conversation in (messages, [*messages, asked]):
            behind = self.text(conversation, prompt=False).partition(_ANSWER)[2]
            if end := behind.partition(_QUESTION)[0].strip():
                return end
        return ""

    @property
    def ends(self) -> list[int]:
        """The ids that end an answer: the end of a document, and a special token behind it."""
        ids = self.encode(self.end)[:1] if self.spelt_end != self.end else []
        return [self.tokenizer.end_of_document, *ids]

    @property
    def spelt_end(self) -> str:
        """What is behind an answer, unless a special token says it."""
        special = tuple(getattr(self.tokenizer, "special_tokens", ()))
        return "" if self.end.startswith(special) else self.end
