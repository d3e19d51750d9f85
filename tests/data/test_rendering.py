"""The environment of templates is that of transformers, and what a template may cost is bounded."""

import time
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from chat_templates import VARIABLES
from hypothesis import given, settings, strategies as st
from lengths import long_but
from transformers.utils.chat_template_utils import render_jinja_template

from fp4train.data import ChatTemplate, jinja_worker, rendering
from fp4train.errors import DataError

TALK = [
    {"role": "user", "content": "hi <b>'&\" é 漢 😀"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "so\n"},
]


def theirs(source: str, marks: bool = False) -> Any:
    texts, spans = render_jinja_template(
        [TALK], chat_template=source, return_assistant_tokens_mask=marks, **VARIABLES
    )
    return (texts[0], spans[0]) if marks else texts[0]


def ours(source: str) -> tuple[str, list[tuple[int, int]]]:
    """The text and the marks of a template, as the process of a run renders it."""
    made = jinja_worker.environment(datetime(2026, 1, 2))
    generation = made.extensions[jinja_worker.Generation.identifier]
    assert isinstance(generation, jinja_worker.Generation)
    return jinja_worker.render(made.from_string(source), generation, TALK, False, VARIABLES)


STYLES = [
    style for style in product(("", "-", "+"), repeat=4) if "" in style[:2] and "" in style[2:]
]


@pytest.mark.parametrize("style", STYLES, ids=["|".join(style) for style in STYLES])
def test_generation_controls_white_space_as_in_transformers(
    style: tuple[str, str, str, str],
) -> None:
    """A newline or spaces on each side of both tags."""
    before, after, before_end, after_end = style
    source = (
        "{% for m in messages %}\n"
        "  {% if m.role == 'assistant' %}\nA: \n"
        f"  {{%{before} generation {after}%}}\n  {{{{ m.content }}}}\n  {{%{before_end} "
        f"endgeneration {after_end}%}}\n"
        "  {% else %}\nU: {{ m.content }}\n  {% endif %}\n{% endfor %}"
    )
    text, spans = theirs(source, marks=True)
    rendered, marks = ours(source)
    assert rendered == text
    assert [mark for mark in marks if mark[0] < mark[1]] == spans


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': \"<'&>\"} | "
        "tojson(sort_keys=True, ensure_ascii=True) }}",
        "{{ messages | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
        "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ pad_token is "
        "defined }} {{ bos_token }}",
        "{% set d = dict(a=1, b='<') %}{{ d.a }}{{ d['b'] }}{{ dict.fromkeys(['x'], 2) }}",
        "{% set ns = namespace(n=0, self=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 "
        "%}{% endfor %}{{ ns.n }}",
        "{{ messages[0].content | e }}{{ '<b>' }}{{ messages[0]['content'].upper() }}{{ "
        "messages[-1].missing }}",
        "  {% for m in messages %}\n    {% if true %}\n  x{{ m.role }}  \n    {% endif "
        "%}\n{% endfor %}\n\n",
        "  {%+ if true %} a {% endif +%}\n b {#- c -#}  \n {% raw %}{{ x }}{% endraw %}",
        "{{ 'a\nb' | indent(2, true) }}{{ [1, 2] | join('-') }}{{ 'x' ~ 1 }}{{ '%s' | "
        "format('y') }}",
        "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% "
        "endfor %}",
    ],
)
def test_templates_write_what_they_write_in_transformers(source: str) -> None:
    assert ours(source)[0] == theirs(source)


PARTS = [
    "{% for m in messages %}", "{%- for m in messages -%}\n", "{% endfor %}\n", "{%- endfor -%}", "{% if loop %}",
    "{% endif %}", "{%+ if true -%}\n", "{{ m.content }}", "{{- m.role -}}\n", "{{ messages[0] | tojson }}",
    " ", "\n", "{{ eos_token }}", "\t{% generation %}", "{% endgeneration -%}\n ",
    *("{% set a = 'x' %}\n", "{{ a }}", "text", "{# c #}\n"),
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(source=st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_any_template_is_rendered_or_refused_as_in_transformers(source: str) -> None:
    from jinja2 import TemplateError

    try:
        expected = theirs(source)
    except TemplateError:
        with pytest.raises(TemplateError):
            ours(source)
        return
    assert ours(source)[0] == expected


def test_the_day_is_that_on_which_the_run_began() -> None:
    now = datetime(2026, 3, 4).isoformat()
    assert (
        ChatTemplate(source="{{ strftime_now('%d %b %Y') }}", now=now).render(TALK) == "04 Mar 2026"
    )
    timed, plain = (
        ChatTemplate(source=source, now=now) for source in ("{{ strftime_now('%d') }}", "x")
    )
    assert now in timed.key and now not in plain.key


DOUBLING = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ACT %}{% endfor "
    "%}{{ ns.x }}"
)
COSTLY = {
    "product": ("{{ 'a' * 10**10 }}", "512 MB of memory"),
    "ljust": ("{{ 'a'.ljust(10**9) }}", "512 MB of memory"),
    "format": ("{{ '{:1000000000}'.format(1) }}", "512 MB of memory"),
    "filter": ("{{ 'a' | center(10**10) }}", "512 MB of memory"),
    "list": ("{{ [0] * 10**10 }}", "512 MB of memory"),
    # in large steps, so that few pages are touched: they cost time, which has a limit too
    "concatenation": (
        DOUBLING.replace("ACT", " ~ ".join(["ns.x"] * 32)),
        "512 MB of memory",
    ),
    "replace": (DOUBLING.replace("ACT", "ns.x | replace('a', 'a' * 1024)"), "512 MB of memory"),
    "output": (
        "{% for a in range(99999) %}{% for b in range(9999) %}"
        + "a" * 99
        + "{% endfor %}{% endfor %}",
        r"writes more than [67]\d,\d\d\d characters for one conversation, whose messages have \d+",
    ),
    "a long text for each of many conversations": (
        "{{ ('a' * 99999) | batch(1) | list | tojson }}",
        r"writes more than [67]\d,\d\d\d characters for one conversation",
    ),
    "lipsum": (
        "{{ lipsum(n=1000) }}",
        r"writes more than [67]\d,\d\d\d characters for one conversation",
    ),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "import": ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
    "loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "takes more than .* s and 10 ms for each message",
    ),
    "numbers": (
        DOUBLING.replace("'ab'", "3").replace("ACT", "ns.x * ns.x"),
        "takes more than .* s and 10 ms for each message",
    ),
}


@pytest.mark.parametrize(
    "name",
    long_but([name for name in COSTLY if name not in ("numbers", "loops")], COSTLY),
)
def test_what_costs_too_much_is_refused(name: str) -> None:
    source, reason = COSTLY[name]
    began = time.process_time()
    with pytest.raises(ValueError, match=reason) as raised:
        ChatTemplate(source=source).finder().find(TALK)
    assert "\n" not in str(raised.value)
    assert time.process_time() - began < 1  # it is another process that works


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", marks=pytest.mark.long),
        "{% if 1 %}" * 3000,
        "{% for %}",
    ],
)
def test_nested_and_broken_templates_are_no_templates(source: str) -> None:
    with pytest.raises(DataError, match="is no template: "):
        ChatTemplate(source=source).render(TALK)


@pytest.mark.parametrize(
    ("source", "possible"),
    [
        (COSTLY["loops"][0], range(1)),
        (COSTLY["loops"][0].replace("99999", "1000"), range(1, 60)),
        ("{{ 1 }}", range(100, 101)),
    ],
    ids=["one conversation", "a file of conversations", "none"],
)
def test_a_template_that_takes_longer_than_the_limit_is_ended(
    source: str, possible: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the limit: a template takes as long as that."""
    program = rendering.WORKER.read_text("utf-8")
    shorter = program.replace(f"\nSECONDS = {jinja_worker.SECONDS}\n", "\nSECONDS = 0.3\n")
    assert shorter != program
    worker = tmp_path / "worker.py"
    worker.write_text(shorter, "utf-8")
    monkeypatch.setattr(rendering, "WORKER", worker)
    template = ChatTemplate(source=source)
    rendered = 0
    refused: list[str] = []
    for _ in range(100):
        try:
            template.render(TALK[:1])
            rendered += 1
        except ValueError as error:
            refused.append(str(error))
    assert rendered in possible
    ends = "takes more than 3 s and 10 ms for each message"
    assert {error[-len(ends) :] for error in refused} == ({ends} if rendered < 100 else set())


def test_a_template_that_was_ended_is_started_again() -> None:
    template = ChatTemplate(
        source="{{ 'a' * (10 ** 10 if messages | length == 1 else 1) }}{{ messages[0].content }}"
    )
    with pytest.raises(ValueError, match="memory"):
        template.render(TALK[:1])
    process = template._renderer._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(ValueError, match="ended the process that renders it"):
        template.render(TALK)
    assert template.render(TALK) == "a" + TALK[0]["content"]


def test_the_limits_are_within_what_a_folder_of_somebody_else_may_cost() -> None:
    assert jinja_worker.SECONDS <= 10 and jinja_worker.MEMORY <= 1 << 30
