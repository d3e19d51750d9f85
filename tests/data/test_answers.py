"""Conversations are learned as transformers renders them, and of them the answers alone, each with
what ends it.
"""

import hashlib
import json
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, VARIABLES
from lengths import long_but
from tokenizer_kinds import tokenizer_json
from tokenizers import AddedToken, Tokenizer

from fp4train.data import Chat, ChatTemplate
from fp4train.data.answers import VERSION, Conversation
from fp4train.data.tokenizers import Pretrained

Messages = list[dict[str, str]]


def talk(*contents: str, system: str = "") -> Messages:
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": content}
        for n, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *turns] if system else turns


CONVERSATIONS: dict[str, Messages] = {
    "one turn": talk("What is 2+2?", "It is four."),
    "a system prompt": talk("What is 2+2?", "It is four.", system="Be brief."),
    "two turns": talk("What is 2+2?", "It is four.", "And 3+3?", "Six,\n of course."),
    "four turns": talk(
        *(text for n in range(4) for text in (f"{n}+{n}?", f"It is {2 * n}.")), system="Be brief."
    ),
    "thoughts": talk(
        "What is 2+2?",
        "<think>\nTwo and two.\n</think>\n\nIt is four.",
        "And 3+3?",
        "<think>\nThree and three.\n</think>\n\nSix.",
    ),
    "spaces and signs": talk(
        "  Write code: \n",
        "\n    def f(x):\n        return x  # <b> 'q' & é 漢字 😀 \n",
        "thx ",
        " ok ",
    ),
}
NOW = datetime(2026, 1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' `strftime_now` writes the day on which these tests believe to be."""

    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Fixed)


def theirs(source: str, messages: Messages) -> str | None:
    """The text as transformers renders it; None: it refuses to."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([messages], chat_template=source, **VARIABLES)
    except TemplateError:
        return None
    return str(texts[0])


ENDS = {
    "ChatML": "<|im_end|>\n",
    "Zephyr": "</s>\n",
    "Llama 2": " </s>",
    "Mistral 1": "</s>",
    "Phi-3, end at the end": "<|end|>\n",
    "Qwen 3": "<|im_end|>\n",
    "DeepSeek R1": "<｜end▁of▁sentence｜>",
    "GLM 4": "<|user|>",
    "Metharme": "<|user|>",
    "gpt-oss": "<|end|>",
    "LLaVA": " ",
    "a prompt that is always written": "<|/answer|><|end|>",
    "every message has its number": "\n",
    "marked answers": "<|im_end|>",
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_with_what_ends_it(name: str) -> None:
    template = ChatTemplate(source=TEMPLATES[name], variables=VARIABLES, now=NOW.isoformat())
    found = template.finder(tuple(VARIABLES.values())).find(CONVERSATIONS["two turns"])
    start, end = found.answers[0]
    assert found.text[start:end].endswith("It is four." + ENDS[name])


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a prompt that is always written", "<|answer|>", "<|/answer|><|end|>"),
        ("every message has its number", "", "\n"),
        ("ChatML", "", "<|im_end|>\n"),
    ],
)
def test_no_answer_is_learned_with_the_header_of_a_turn(name: str, before: str, after: str) -> None:
    messages = talk(*(text for n in range(80) for text in (f"{n}+{n}?", f"It is {2 * n}.")))
    template = ChatTemplate(source=TEMPLATES[name], variables=VARIABLES, now=NOW.isoformat())
    found = template.finder(tuple(VARIABLES.values())).find(messages)
    assert [found.text[a:b] for a, b in found.answers] == [
        f"{before}It is {2 * n}.{after}" for n in range(80)
    ]


def test_an_answer_before_any_other_message_is_learned_without_its_header() -> None:
    """This template writes a prompt behind the last message, and so none where there is no
    message.
    """
    source = """{{- bos_token }}{% for m in messages %}{{- '<|' + m.role + '|>' + m.content }}
    {%- if m.role == 'assistant' %}{{- eos_token }}{% endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
    {%- endfor %}"""
    messages = [{"role": "assistant", "content": "Welcome!"}, *talk("hi", "yo")]
    found = (
        ChatTemplate(source=source, variables=VARIABLES)
        .finder(tuple(VARIABLES.values()))
        .find(messages)
    )
    assert [found.text[a:b] for a, b in found.answers] == ["Welcome!</s>", "yo</s>"]


def test_a_prompt_that_thinks_leaves_an_answer_without_thoughts_whole() -> None:
    template = ChatTemplate(source=TEMPLATES["DeepSeek R1"], variables=VARIABLES)
    found = template.finder().find(CONVERSATIONS["one turn"])
    assert [found.text[a:b] for a, b in found.answers] == ["It is four.<｜end▁of▁sentence｜>"]


def test_answers_that_follow_each_other_and_empty_messages_keep_their_places() -> None:
    messages = [
        {"role": "system", "content": ""},
        *talk("hello", "yes", "", "two"),
        {"role": "assistant", "content": "two and a half"},
        {"role": "user", "content": "bye"},
    ]
    template = ChatTemplate(source=TEMPLATES["ChatML"])
    found = template.finder().find(messages)
    assert [found.text[a:b] for a, b in found.answers] == [
        f"{t}<|im_end|>\n" for t in ("yes", "two", "two and a half")
    ]


SILENCE = {
    "or": "{{ m.content or '(none)' }}<|end|>",
    "default": "{{ m.content | default('n/a', true) }}<|end|>",
    "trim or": "{{ m.content | trim or '(none)' }}<|end|>",
    "if and else": "{% if m.content %}{{ m.content }}{% else %}<|silence|>{% endif %}<|end|>",
    "the role": "{{ m.content or m.role + ' says nothing' }}<|end|>",
}
SILENT_OR_NOT = {
    "spaces": talk("zebra", "   ", "apple", "yes"),
    "an empty one after a full one": [*talk("zebra", "yes"), {"role": "assistant", "content": ""}],
    "an empty one before a full one": [*talk("zebra", ""), {"role": "assistant", "content": "yes"}],
    "spaces between": [*talk("zebra", "one"), *talk("", "\t", "", "two")[1::2]],
    "an empty one": talk("hi", "", "more", "yes"),
    "an empty one last": talk("hi", "yes", "more", ""),
    "one that says what stands for nothing": talk("hi", "(none)", "more", "", "and", "n/a"),
    "empty questions too": talk("hi", "yes", "", "", "bye", "no"),
    "two empty ones that follow each other": [*talk("hi", "", "x", "y"), *talk("", "")[1:]],
}


def around(turn: str, marks: tuple[str, str] = ("", "")) -> str:
    """A template whose answers have the text `turn`, between `marks`."""
    begin, end = marks
    return f"""{{%- for m in messages -%}}
    {{{{- '<|' + m.role + '|>' -}}}}
    {{%- if m.role == 'assistant' -%}}{begin}{turn}{end}
    {{%- else -%}}{{{{- m.content + '<|end|>' -}}}}{{%- endif -%}}
    {{%- endfor -%}}{{%- if add_generation_prompt -%}}<|assistant|>{{%- endif -%}}"""


@pytest.mark.parametrize("silence", SILENCE)
def test_an_answer_without_text_is_not_learned(silence: str) -> None:
    turn = SILENCE[silence]
    finder = ChatTemplate(source=around(turn)).finder()
    marks = ("{%- generation -%}", "{%- endgeneration -%}")
    marked_finder = ChatTemplate(source=around(turn, marks)).finder()
    for what, messages in SILENT_OR_NOT.items():
        expected = marked_finder.find(messages)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        pairs = zip(answers, expected.answers, strict=True)
        speaking = tuple(span for content, span in pairs if content.strip())
        assert finder.find(messages) == Conversation(expected.text, speaking), what


LEFT_OUT = {
    "the turn": around("{{ m.content }}<|end|>").replace(
        "in messages", "in messages if m.content or m.role == 'user'"
    ),
    "all but the header": around("{{ m.content + '<|end|>' if m.content else '' }}"),
    "the turn, with questions joined": """{%- set ns = namespace(last='') -%}
    {%- for m in messages if m.content -%}
    {%- if m.role == ns.last -%}{{- '\n' + m.content -}}
    {%- else -%}{{- ('<|end|>' if ns.last else '') + '<|' + m.role + '|>' + m.content -}}
    {%- endif -%}{%- set ns.last = m.role -%}{%- endfor -%}<|end|>
    {%- if add_generation_prompt -%}<|assistant|>{%- endif -%}""",
    "the turn, where turns are numbered": """{%- for m in messages if m.content -%}
    {{- loop.index }}. {{ m.role }}: {{ m.content + '\n' }}{%- endfor -%}
    {%- set count = messages | selectattr('content') | list | length -%}
    {%- if add_generation_prompt %}{{- count + 1 -}}. assistant: {% endif -%}""",
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_where_the_template_leaves_it_out_the_other_answers_are_learned(name: str) -> None:
    finder = ChatTemplate(source=LEFT_OUT[name]).finder()
    for messages in (talk("hi", "", "more", "yes"), talk("hi", "", "more", "", "and", "yes")):
        found = finder.find(messages)
        ((start, end),) = found.answers
        assert found.text[start:end].strip() in ("yes<|end|>", "yes")


@pytest.mark.long
def test_the_version_is_another_where_other_answers_are_learned() -> None:
    """Cached conversations are known by it: a mended answer is learned where the cache has the old
    one.
    """
    learned = []
    silent = {name: around(turn) for name, turn in SILENCE.items()}
    for name, source in (TEMPLATES | silent).items():
        template = ChatTemplate(source=source, variables=VARIABLES, now=NOW.isoformat())
        finder = template.finder(tuple(VARIABLES.values()))
        few = {what: CONVERSATIONS[what] for what in ("a system prompt", "thoughts")}
        for what, messages in (SILENT_OR_NOT if name in silent else few).items():
            try:
                found = finder.find(messages)
            except ValueError:
                continue
            learned.append([name, what, found.text, found.answers])
    digest = hashlib.sha256(json.dumps(learned).encode()).hexdigest()[:16]
    assert {VERSION: digest} == {4: "3d7a7fcf6f05a304"}, (
        "other text is learned than before: raise VERSION in fp4train/data/answers.py, and write "
        "it here with the new digest"
    )


def test_contents_that_repeat_what_the_template_writes_stay_apart() -> None:
    """Places come from the template, not from a search for contents."""
    messages = talk("four", "four", "ASSISTANT: four", "ASSISTANT: four USER: four")
    template = ChatTemplate(source=TEMPLATES["LLaVA"])
    found = template.finder().find(messages)
    assert [found.text[a:b] for a, b in found.answers] == ["four ", "ASSISTANT: four USER: four "]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
            "has no place|around messages",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "writes nothing for its answers",
        ),
        (
            "{% for m in messages | sort(attribute='content') %}[{{ m.content }}]{% endfor %}",
            "around messages",
        ),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}",
            "marks nothing of it",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% for part in "
            "m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}</s>"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "writes nothing of what its answers say where it marks them",
        ),
        (
            "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ 'text ' + x }}",
            "marks a text that a macro, a filter or a set block",
        ),
    ],
)
def test_what_cannot_be_learned_is_refused_with_the_reason(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(source=source).finder().find(talk("zebra", "yes", "apple", "no"))


def test_a_conversation_of_thousands_of_messages_takes_seconds() -> None:
    """Each answer's place needs no rendering of all before it: at one rendering each it would take
    many minutes.
    """
    messages = talk(*(f"message {n}" for n in range(3000)))
    template = ChatTemplate(source=TEMPLATES["ChatGLM, numbered turns"], variables=VARIABLES)
    assert len(template.finder().find(messages).answers) == 1500


MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<s>",
    "<think>",
    "[INST]",
    "[/INST]",
)


def chat_tokenizer(kind: str) -> Tokenizer:
    made = Tokenizer.from_str(tokenizer_json(kind))
    made.add_special_tokens(
        [AddedToken(text, special=True) for text in MARKERS if text != "<think>"]
    )
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


KINDS = ("byte level, Llama 3", "prepend", "first", "always", "never", "Gemma")
NAMES = ("ChatML", "Llama 2", "Mistral 3", "Zephyr", "Phi-3, end at the end", "Qwen 3")
PAIRS = list(product(NAMES, KINDS))


@pytest.mark.parametrize("pair", long_but([*zip(NAMES, KINDS, strict=True)], PAIRS), ids=", ".join)
def test_ids_are_those_of_the_whole_text(tmp_path: Path, pair: tuple[str, str]) -> None:
    """As transformers encodes what it renders; learned are the ids with a character of an
    answer.
    """
    from transformers import PreTrainedTokenizerFast

    name, kind = pair
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made = chat_tokenizer(kind)
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    (folder / "tokenizer_config.json").write_text(json.dumps(VARIABLES))
    chosen = [
        messages
        for messages in CONVERSATIONS.values()
        if theirs(TEMPLATES[name], messages) is not None
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in chosen * 2)
    )
    source = Chat(
        path=str(tmp_path / "a.jsonl"),
        tokenizer=Pretrained(name=str(folder), end_of_document="</s>"),
        cache_dir=str(tmp_path / "cache"),
        val=0.5,
    )
    data = source.build(tmp_path / "run", 1024, 0)
    library = PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=TEMPLATES[name], **VARIABLES
    )
    template = ChatTemplate(source=TEMPLATES[name], variables=VARIABLES)
    for tokens in (data.train, data.val):
        assert tokens.scored is not None
        ids = tokens.ids.tolist()
        for messages in chosen:
            expected = library.apply_chat_template(messages, tokenize=True, return_dict=False)
            place = next(at for at in range(len(ids)) if ids[at : at + len(expected)] == expected)
            learned = np.flatnonzero(tokens.scored[place : place + len(expected)])
            found = template.finder(("</s>", *MARKERS)).find(messages)
            offsets = made.encode(found.text, add_special_tokens=False).offsets
            answers = [
                number
                for number, (start, end) in enumerate(offsets)
                if any(start < last and end > first for first, last in found.answers)
            ]
            assert learned.tolist() == answers
