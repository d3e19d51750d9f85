"""`data=chat`: tokens, answers and sequences of conversations, batches, lines that are refused by
their number.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from chats import END, TALKS, documents, source, talk, write
from huggingface_hub.errors import EntryNotFoundError

from fp4train.data import CHATML, IGNORED, Chat, Loader, Piece, TokenArray, chat, kept_template
from fp4train.data.answers import VERSION
from fp4train.data.tokenizers import BytePairs, Bytes, Pretrained
from fp4train.errors import DataError


def test_every_conversation_is_there_once_and_its_answer_is_learned(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.jsonl", TALKS)).build(tmp_path / "run", 128, 0)
    train = documents(data.train)
    val = documents(data.val)
    assert len(train) == 6 and len(val) == 2
    expected = {(f"what is {n}?", f"it is {n}" + "!" * (n % 5)) for n in range(8)}
    for text, answers in [*train, *val]:
        question = text.split("user\n")[1].split("<|im_end|>")[0]
        answer = answers.removesuffix("<|im_end|>\n")
        expected.remove((question, answer))
    assert not expected


def test_the_template_of_a_hub_tokenizer_is_taken_and_chatml_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    BytePairs(vocab_size=300).build(lambda: iter([Piece("4 and 7 " * 99)]), tmp_path / "hub")
    (tmp_path / "cache").mkdir()

    def download(name: str, file: str, revision: str | None) -> str:
        if not (tmp_path / "hub" / file).exists():
            raise EntryNotFoundError(file)
        link = tmp_path / "cache" / file
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "hub" / file)
        return str(link)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    path = write(tmp_path / "a.jsonl", TALKS)
    for run, of_hub in (("first", False), ("second", True)):
        if of_hub:
            text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            (tmp_path / "hub/tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
        tokenizer = Pretrained(name="somebody/model", end_of_document="<|endoftext|>")
        source(path, tokenizer=tokenizer).build(tmp_path / run, 128, 0)
        kept = kept_template(tmp_path / run)
        assert kept is not None and (kept.source == CHATML) is not of_hub
    assert caplog.text.count("has no chat template: ChatML is taken") == 1


def test_no_conversation_lies_in_two_sequences(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.jsonl", TALKS)).build(tmp_path / "run", 256, 0)
    for tokens in (data.train, data.val):
        assert (len(tokens) - 1) % 256 == 0
        assert set(tokens.ids.tolist()[255:-1:256]) == {END}
    lengths = [len(text.encode()) + 1 for text, _ in documents(data.train)]
    # most of a sequence is filled
    assert (len(data.train) - 1) // 256 <= -(-sum(lengths) // 256) * 1.5


def test_targets_that_are_no_answers_are_ignored_and_weighed_out(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.jsonl", TALKS)).build(tmp_path / "run", 128, 0)
    loader = Loader(data.train, batch_size=4, seq_len=128, seed=0)
    tokens, targets = loader.rows(3, 4)
    kept = targets != IGNORED
    assert bool((targets[kept] >= 0).all()) and 0 < int(kept.sum()) < targets.numel()
    assert loader.loss_factor(3, 4) == targets.numel() / int(kept.sum())
    shown = Bytes().decode(targets[0][kept[0]].tolist())
    assert "it is" in shown and "what" not in shown
    assert bool((tokens[:, 1:][kept[:, :-1]] == targets[:, :-1][kept[:, :-1]]).all())


def test_data_without_answers_counts_all_targets() -> None:
    loader = Loader(
        TokenArray(np.arange(100, dtype=np.uint8), 256, "train"), batch_size=2, seq_len=8, seed=0
    )
    assert loader.loss_factor(0, 2) == 1.0 and bool((loader.rows(0, 2)[1] >= 0).all())


def test_the_cache_gives_the_same_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TALKS)
    first, second = (source(path).build(tmp_path / "run", 128, 0) for _ in range(2))
    assert (
        first.fingerprint == second.fingerprint
        and len(list((tmp_path / "cache").glob("*/*.bin"))) == 2
    )
    assert np.array_equal(first.train.ids, second.train.ids)
    other = source(path).build(tmp_path / "run", 256, 0)
    assert other.fingerprint != first.fingerprint


def test_answers_of_an_earlier_version_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", TALKS)
    source(path).build(tmp_path / "run", 128, 0)
    monkeypatch.setattr(chat, "VERSION", VERSION + 1)
    source(path).build(tmp_path / "run", 128, 0)
    assert len(list((tmp_path / "cache").glob("*/*.bin"))) == 4


def test_what_is_learned_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The same tokens with other answers are other data."""
    path = write(tmp_path / "a.jsonl", TALKS)
    messages = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    swapped = messages + "{% if add_generation_prompt %}{{ %s }}{% endif %}"
    found = []
    for name, prompt in (("a", "'assistant'"), ("b", "'assi'")):
        (tmp_path / f"{name}.jinja").write_text(swapped.replace("%s", prompt))
        found.append(
            source(path, template=str(tmp_path / f"{name}.jinja")).build(tmp_path / name, 128, 0)
        )
    assert (
        np.array_equal(found[0].train.ids, found[1].train.ids)
        and found[0].fingerprint != found[1].fingerprint
    )


def test_long_conversations_lose_their_ends_and_this_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [talk("hi", "x" * 300), talk("y" * 300, "no"), *TALKS])
    data = source(path).build(tmp_path / "run", 128, 0)
    assert (
        "2 conversations are longer than train.seq_len=128 and lose their ends; 1 with no "
        "answer left" in caplog.text
    )
    assert "x" * 60 in Bytes().decode(data.train.ids.tolist())


def test_special_tokens_of_a_tokenizer_are_tokens_in_the_template_alone(tmp_path: Path) -> None:
    trained = _tokenizer(tmp_path)
    settings = Pretrained(name=str(tmp_path / "tok"), end_of_document="<|endoftext|>")
    data = source(write(tmp_path / "a.jsonl", TALKS), tokenizer=settings).build(
        tmp_path / "run", 128, 0
    )
    marker = trained.token_to_id("<|im_end|>")
    scored = data.train.scored
    assert scored is not None and int((np.asarray(data.train.ids) == marker).sum()) == 12
    # of each answer
    assert int(((np.asarray(data.train.ids) == marker) & (np.asarray(scored) != 0)).sum()) == 6


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    (folder / "tok").mkdir()
    made.save(str(folder / "tok" / "tokenizer.json"))
    return made


def test_an_answer_may_think_in_special_tokens(tmp_path: Path) -> None:
    """A pair of tokens that enclose separates no messages; a question may not hold it."""
    made = _tokenizer(tmp_path)
    made.add_special_tokens(["<think>", "</think>"])
    made.save(str(tmp_path / "tok" / "tokenizer.json"))
    settings = Pretrained(name=str(tmp_path / "tok"), end_of_document="<|endoftext|>")
    path = write(tmp_path / "a.jsonl", [talk("why?", "<think>so</think>thus")] * 4)
    data = source(path, tokenizer=settings).build(tmp_path / "run", 128, 0)
    assert int((np.asarray(data.train.ids) == made.token_to_id("</think>")).sum()) == 3
    write(tmp_path / "a.jsonl", [talk("why <think>?", "thus")] * 4)
    with pytest.raises(DataError, match="message 1 spells <think>"):
        source(path, tokenizer=settings).build(tmp_path / "other", 128, 0)


def test_turns_that_end_with_the_end_of_a_document_attend_to_each_other(tmp_path: Path) -> None:
    """The inputs say which of these ids end no conversation; targets are the ids themselves."""
    end = _tokenizer(tmp_path).token_to_id("<|im_end|>")
    settings = Pretrained(name=str(tmp_path / "tok"), end_of_document="<|im_end|>")
    data = source(write(tmp_path / "a.jsonl", TALKS), tokenizer=settings).build(
        tmp_path / "run", 128, 0
    )
    assert data.train.inner_ends is not None
    inner = np.asarray(data.train.inner_ends)
    assert int(np.count_nonzero(inner)) == 12  # of 6 conversations: a line break follows each
    assert set(np.asarray(data.train.ids)[inner != 0].tolist()) == {end}
    tokens, targets = Loader(data.train, batch_size=4, seq_len=128, seed=0).rows(0, 4)
    assert int((tokens < 0).sum()) and set(tokens[tokens < 0].tolist()) == {~end}
    assert bool((targets[targets != IGNORED] >= 0).all())


def test_conversations_of_several_files_packed_or_not_are_those_of_one(tmp_path: Path) -> None:
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = source(write(tmp_path / "whole/a.jsonl", TALKS)).build(tmp_path / "run", 128, 0)
    first = write(tmp_path / "parts/a.jsonl", TALKS[:3])
    second = write(tmp_path / "parts/b.jsonl", TALKS[3:])
    packed = second.with_name("b.jsonl.gz")
    packed.write_bytes(gzip.compress(second.read_bytes()))
    second.unlink()
    for path in (
        str(tmp_path / "parts"),
        [str(first), str(packed)],
        str(tmp_path / "parts/*.jsonl*"),
    ):
        data = Chat(path=path, cache_dir=str(tmp_path / "cache"), val=0.25).build(
            tmp_path / "run", 128, 0
        )
        assert np.array_equal(np.asarray(data.train.ids), np.asarray(whole.train.ids))


def test_a_tokenizer_is_trained_on_the_conversations(tmp_path: Path) -> None:
    data = source(write(tmp_path / "a.jsonl", TALKS), tokenizer=BytePairs(vocab_size=300)).build(
        tmp_path / "run", 64, 0
    )
    assert data.tokenizer is not None and len(data.tokenizer.encode("what is 7?")) < 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it is no JSON object but a list"),
        ('{"text": "x"}', 'it has no "messages"; its keys: text'),
        ('{"messages": []}', "holds no list of messages"),
        ('{"messages": [{"role": "user"}]}', "message 1 is no object with a role and a content"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "message 1 is no object",
        ),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the role"),
        (json.dumps(talk("a<|im_end|>b", "c")), r"message 1 spells <\|im_end\|>"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}',
            "has 'tool_calls', which is not",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x\\ud800"}]}',
            r"message 1 holds half of a UTF-16 pair",
        ),
        ("[" * 100000, "line 3: "),
        (
            json.dumps({"tools": [{"name": "x"}]} | talk("a", "b")),
            'it has "tools" beside "messages"',
        ),
        (
            '{"messages": [{"from": "human", "value": "x"}]}',
            "and a content, both of them text; it has: from, value",
        ),
        (
            '{"messages": [{"from": "human", "value": "x"}]}',
            "Write from as role, human and gpt as user and assistant",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', r"it has: role, content \(null\)"),
        (
            '{"id": 1, "talks": [{"role": "user", "content": "x"}]}',
            r"its keys: id, talks \(data\.column=talks\)",
        ),
        (
            '{"messages": [{"role": "model", "content": "x"}]}',
            "no message of the role .* its roles: model",
        ),
    ],
)
def test_broken_lines_are_refused_with_their_number(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "a.jsonl", [TALKS[0], "", line, TALKS[1]])
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{said.removeprefix('line 3: ')}"):
        source(path).build(tmp_path / "run", 128, 0)
    assert not list((tmp_path / "cache").glob("*/*.bin"))


def in_parquet(path: Path) -> None:
    rows = [{"tools": None, "system": ""} | record for record in TALKS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)


def in_arrow(path: Path) -> None:
    table = pyarrow.Table.from_pylist([{"id": 1, "documents": []} | record for record in TALKS])
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def as_text() -> list[dict[str, str]]:
    """The records with their messages as JSON text, as tables without nested columns have them."""
    return [
        {"tools": "[]", "messages": json.dumps(record["messages"], indent=1)} for record in TALKS
    ]


def text_in_arrow(path: Path) -> None:
    table = pyarrow.Table.from_pylist(as_text())
    column = table.column("messages").cast(pyarrow.large_string()).dictionary_encode()
    table = table.set_column(1, "messages", column)
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


FORMS: dict[str, Callable[[Path], object]] = {
    "c.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress("\n".join(map(json.dumps, TALKS)).encode())
    ),
    "d.parquet": in_parquet,
    "e.arrow": in_arrow,
    "f.parquet": lambda path: pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(as_text()), path
    ),
    "g.arrow": text_in_arrow,
    "h.jsonl": lambda path: write(path, as_text()),
}


def test_conversations_are_the_same_in_every_form_of_file(tmp_path: Path) -> None:
    expected = source(write(tmp_path / "lines.jsonl", TALKS)).build(tmp_path / "run", 128, 0)
    for name, make in FORMS.items():
        make(tmp_path / name)
        data = source(tmp_path / name).build(tmp_path / "run", 128, 0)
        assert data.fingerprint == expected.fingerprint, name


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"messages": [1, 2]},
            "data.column=messages of .* holds int64, neither lists of messages nor text that is",
        ),
        (
            {"messages": [json.dumps(TALKS[0]["messages"]), "a"]},
            r'a\.parquet, row group 0, row 1: "messages" holds text that is no list of messages in '
            "JSON: Expecting value, character 1$",
        ),
        ({"messages": ['{"role": "user"}'] * 2}, 'row 0: "messages" holds no list of messages'),
        ({"text": ["a", "b"]}, "data.column=messages is not in .* Its columns: text"),
        (
            {"id": [1], "talks": [[{"role": "user"}]]},
            r"Its columns: id, talks \(data\.column=talks\)",
        ),
        (
            {"messages": [[{"role": "user"}]] * 2, "tools": ["", "y"]},
            "row group 0, row 0: message 1 is no object with",
        ),
        (
            {"messages": [TALKS[0]["messages"]] * 2, "tools": [None, "y"]},
            'row 1: it has "tools" beside "messages"',
        ),
        (
            {"messages": [[{"role": "user", "content": None}]] * 2},
            "row group 0, row 0: message 1 is no object with",
        ),
    ],
)
def test_a_table_without_conversations_is_refused(
    tmp_path: Path, table: dict[str, Any], said: str
) -> None:
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=said):
        source(tmp_path / "a.parquet").build(tmp_path / "run", 128, 0)


def test_binary_data_is_called_so(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9))
    with pytest.raises(
        DataError,
        match=r"a\.npy, line 1: it is binary data\. What is read is JSON, Parquet and Arrow",
    ):
        source(tmp_path / "a.npy").build(tmp_path / "run", 128, 0)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([TALKS[0]], "holds 1 conversations"),
        ([talk("x" * 200, "y")] * 4, "no answer that is to be learned lies within"),
    ],
)
def test_too_little_is_refused(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        source(write(tmp_path / "a.jsonl", lines)).build(tmp_path / "run", 64, 0)


@pytest.mark.parametrize(
    "template",
    ["", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"],
    ids=["empty", "prompts"],
)
def test_a_template_that_leaves_the_answers_out_is_refused_with_the_line(
    tmp_path: Path, template: str
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    path = write(tmp_path / "a.jsonl", TALKS)
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 1: .*own\.jinja writes nothing for its answers"
    ):
        source(path, template=str(tmp_path / "own.jinja")).build(tmp_path / "run", 128, 0)


def test_a_share_is_held_out() -> None:
    with pytest.raises(ValueError, match=r"data\.val=3"):
        Chat(path="x", val=3)
