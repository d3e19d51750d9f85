"""Marks of a template that enclose no answer are refused."""

import pytest

from fp4train.data import ChatTemplate


def talk(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}</s>"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "s",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% generation %}{{ m.content }}"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "zebra",
        ),
    ],
)
def test_marks_around_something_else_are_refused_whatever_an_answer_says(
    source: str, answer: str
) -> None:
    """An answer of one letter lies in the mark that ends answers, too."""
    finder = ChatTemplate(source=source).finder()
    for text in (answer, "four", answer):
        with pytest.raises(ValueError, match="writes nothing of what its answers say"):
            finder.find(talk("zebra", text))
