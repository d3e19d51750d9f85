"""`data=chat`: the keys of records and messages, which say what is learned, are notes, or are refused."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from chats import TALKS, documents, source, write

from fp4train.errors import DataError


def turns(*marks: dict[str, Any]) -> dict[str, Any]:
    """A conversation of a question and an answer for each table of keys beside role and content."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "brief"}]
    for number, keys in enumerate(marks):
        messages.append({"role": "user", "content": f"q{number}"})
        messages.append({"role": "assistant", "content": f"a{number}", **keys})
    return {"messages": messages}


def answers_of(path: Path, **changes: Any) -> list[str]:
    """The text that is learned of each training conversation."""
    run = path.with_name(f"run {Path(changes.get('template', '')).stem}")
    data = source(path, **changes).build(run, 400, 0)
    return [answers.replace("<|im_end|>\n", ";") for _, answers in documents(data.train)]


KEYS = ("weight", "loss", "train", "training", "trainable", "loss_mask")


@pytest.mark.parametrize(("no", "yes"), [(0, 1), (0.0, 1.0), (False, True)])
def test_a_turn_that_its_key_takes_out_is_not_learned(
    tmp_path: Path, no: object, yes: object
) -> None:
    talks = [turns({key: no}, {key: yes}, {key: None}) for key in KEYS]
    talks += [turns({}, {"weight": no}), turns({})]
    learned = ["a1;a2;"] * 6
    assert answers_of(write(tmp_path / "a.jsonl", talks)) == learned
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "a.parquet")
    assert answers_of(tmp_path / "a.parquet") == learned
    assert answers_of(write(tmp_path / "b.jsonl", talks[6:] * 4)) == ["a0;"] * 6


def test_a_weight_may_be_a_decimal_of_a_table(tmp_path: Path) -> None:
    talks = [turns({"weight": Decimal("0.0")}, {"weight": Decimal("1.0")})] * 4
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "a.parquet")
    assert answers_of(tmp_path / "a.parquet") == ["a1;"] * 3


def test_a_conversation_of_which_nothing_is_learned_is_left_out(tmp_path: Path) -> None:
    talks = [turns({"weight": 0}), turns({}), turns({"weight": 0}, {"train": False})] * 4
    assert answers_of(write(tmp_path / "a.jsonl", talks)) == ["a0;"] * 3
    with pytest.raises(DataError, match="no answer that is to be learned lies within"):
        answers_of(write(tmp_path / "b.jsonl", [turns({"weight": 0})] * 4))


def test_marked_answers_and_answers_in_a_row_are_taken_out(tmp_path: Path) -> None:
    tools = [
        {"role": "system", "content": "s", "weight": 0},
        {"role": "user", "content": "q", "trainable": False},
        {"role": "assistant", "content": "call", "weight": 0},
        {"role": "tool", "content": "4", "loss_mask": 0},
        {"role": "assistant", "content": " it is four ", "weight": 0},
        {"role": "assistant", "content": "four"},
    ]
    path = write(tmp_path / "a.jsonl", [{"messages": tools}] * 4)
    assert answers_of(path) == ["four;"] * 3
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }};{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert answers_of(path, template=str(tmp_path / "own.jinja")) == ["four;"] * 3
    (tmp_path / "one.jinja").write_text(
        "{% generation %}{% for m in messages %}{{ m.content }};{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(DataError, match=r"line 1: .*learned and others that are not as one"):
        answers_of(path, template=str(tmp_path / "one.jinja"))


NOTES = {
    **{"name": "bob", "id": 7, "timestamp": 1.5, "createdAt": "today", "parent_message_id": None},
    **{"model": "x", "metadata": {"a": [1]}, "toxic": False, "token_count": 0, "tool_calls": []},
}


def test_keys_that_no_template_reads_change_nothing(tmp_path: Path) -> None:
    assert answers_of(write(tmp_path / "a.jsonl", [turns(NOTES)] * 4)) == ["a0;"] * 3
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: "
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(DataError, match=r"line 1: .*own\.jinja writes other text where .* name"):
        answers_of(tmp_path / "a.jsonl", template=str(tmp_path / "own.jinja"))


@pytest.mark.parametrize(
    ("role", "keys", "said"),
    [
        ("assistant", {"weight": 0.5}, 'message 1 has "weight": 0.5, and a message is learned'),
        ("assistant", {"loss": "no"}, "message 1 has \"loss\": 'no', and"),
        ("assistant", {"loss_mask": ""}, "message 1 has \"loss_mask\": '', and"),
        ("assistant", {"train": {}}, 'message 1 has "train": {}, and'),
        ("assistant", {"loss_mask": [0, 1]}, r'message 1 has "loss_mask": \[0, 1\], and'),
        ("assistant", {"weight": 1, "train": False}, '"weight": 1, "train": False: nobody says'),
        ("assistant", {"masked": False}, "message 1 has 'masked', which is not supported"),
        ("assistant", {"reasoning_content": "hm"}, "has 'reasoning_content', which is not"),
        ("assistant", {"metadata": {"train": False}}, "has 'metadata', which is not supported"),
        ("assistant", {"meta": '[{"loss": 0}]'}, "has 'meta', which is not supported"),
        ("user", {"weight": 1}, 'message 1, of the role "user", has "weight", as if it were'),
    ],
)
def test_a_key_that_cannot_be_obeyed_is_refused_by_name(
    tmp_path: Path, role: str, keys: dict[str, Any], said: str
) -> None:
    other = {"role": role, "content": "x", **keys}
    record = {"messages": [other, *TALKS[0]["messages"]]}
    with pytest.raises(DataError, match=f"line 1: .*{said}"):
        answers_of(write(tmp_path / "a.jsonl", [record, TALKS[0]]))


def test_a_mark_that_stands_twice_with_other_values_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [turns({"weight": 0})] * 4)
    path.write_text(path.read_text().replace('"weight": 0', '"weight": 0, "weight": 1'))
    with pytest.raises(DataError, match=r'"weight" several times: \(0, 1\)\. Write it once'):
        answers_of(path)


@pytest.mark.parametrize(
    "note",
    [{"metadata": {"tags": ["no_train"]}}, {"metadata": ["no_loss"]}, {"status": "masked"}],
)
def test_a_note_that_says_in_a_word_that_nothing_is_learned_is_refused(
    tmp_path: Path, note: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.jsonl", [turns(note)] * 4)
    with pytest.raises(DataError, match=next(iter(note))):
        answers_of(path)
    assert answers_of(path, ignore=[next(iter(note))]) == ["a0;"] * 3


def test_a_weight_of_a_whole_record_is_refused_unless_it_is_one(tmp_path: Path) -> None:
    answers_of(write(tmp_path / "a.jsonl", [record | {"weight": 1.0} for record in TALKS]))
    with pytest.raises(DataError, match='line 2: "weight" beside "messages" may say which'):
        answers_of(write(tmp_path / "b.jsonl", [TALKS[0], TALKS[1] | {"weight": 0}]))


BESIDE: dict[str, Any] = {
    "mask": [1, 1],
    "train_mask": [False, True],
    "trainedTurns": {"1": 0},
    "train_on": "last",
    "loss_from": 2,
    "skip": 1,
    "last_turn_only": True,
    "labels": [-100, 5],
    "w": [[0.0], [0.5]],
    "sft": {"turns": {"masked": "01"}},
    "parts": [{"keep": [0, 1]}],
    "SFTMask": "0,1",
    "lossmask": 2,
    "selected": "last",
    "训练": 0,
    "y": [[{"train": 0}]],
}
FACTS: dict[str, Any] = {
    "id": 7,
    "tags": ["a", {}],
    "quality_scores": [0, 2],
    "is_safe": False,
    "labels": {"spam": {"value": 0.1}},
    "meta": {"tokens": [3, 4]},
    "prompt": "train on the last turn",
    "chosen": TALKS[1]["messages"],
    "status": "open",
    "masks": [],
}


@pytest.mark.parametrize("form", ["jsonl", pytest.param("parquet", marks=pytest.mark.long)])
def test_what_may_say_beside_messages_which_are_learned_is_refused_until_it_is_ignored(
    tmp_path: Path, form: str
) -> None:
    """A name of learning at any depth, and numbers in a list; what else stands there is a fact."""

    def learned(extra: dict[str, Any], **changes: Any) -> list[str]:
        rows = [talk | extra for talk in TALKS]
        path = tmp_path / f"{next(iter(extra))}.{form}"
        if form == "jsonl":
            write(path, rows)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return answers_of(path, **changes)

    facts = {key: value for key, value in FACTS.items() if form == "jsonl" or key != "tags"}
    expected = learned(facts)
    assert len(expected) == 6
    for key, value in BESIDE.items():
        with pytest.raises(DataError, match=f'"{key}" beside "messages" may say which .*ignore'):
            learned({key: value})
        assert learned({key: value}, ignore=(key,)) == expected


def test_ignored_keys_of_messages_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [turns({"reasoning_content": "hm", "weight": 0}, {})] * 4)
    assert answers_of(path, ignore=["reasoning_content"]) == ["a1;"] * 3
    assert answers_of(path, ignore=["reasoning_content", "weight"]) == ["a0;a1;"] * 3
    write(tmp_path / "b.jsonl", [talk | {"info": '{"train": false}'} for talk in TALKS])
    with pytest.raises(DataError, match='"info" beside "messages" may say which'):
        answers_of(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="holds content, which conversations are made of"):
        source(path, ignore=["id", "content"])


def test_what_the_template_reads_beside_messages_is_refused_and_what_it_does_not_read_is_not(
    tmp_path: Path,
) -> None:
    reads = "{% if thinking %}THINK {% endif %}{% set shown = thinking %}"
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "own.jinja").write_text(
        f"{reads}{turns}{{% if add_generation_prompt %}}assistant: {{% endif %}}"
    )
    template = str(tmp_path / "own.jinja")
    unread = write(
        tmp_path / "a.jsonl", [record | {"shown": False, "thinking": None} for record in TALKS]
    )
    source(unread, template=template).build(tmp_path / "run", 128, 0)
    read = write(tmp_path / "b.jsonl", [*TALKS, TALKS[0] | {"thinking": False}])
    with pytest.raises(DataError, match=r'b\.jsonl, line 9: it has "thinking" beside "messages"'):
        source(read, template=template).build(tmp_path / "run", 128, 0)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([TALKS[0] | {"thinking": False}] * 2), tmp_path / "c.parquet"
    )
    with pytest.raises(
        DataError, match=r'c\.parquet, row group 0, row 0: it has "thinking" beside'
    ):
        source(tmp_path / "c.parquet", template=template).build(tmp_path / "run", 128, 0)
