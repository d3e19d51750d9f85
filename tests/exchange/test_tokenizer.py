"""Tokenizers and chat templates of exported runs: `transformers` gives the token ids of the run."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from finished_runs import FinishedRuns
from hf_exports import FILES, Command, theirs, used

from fp4train.config import to_config
from fp4train.data import Piece, begin_of_document, kept_template, token_chunks
from fp4train.exchange import stored_tokenizer
from fp4train.run.record import directory as run_directory

ODD = (
    'def f(x):\n\treturn "é漢🙂"  # ok\r\n',
    "  two  spaces\u00a0and a no-break one, ﬁ ligature, e\u0301 composed, \u200d joiner, "
    "\ufeff mark",
    "👩‍👩‍👧‍👦 ��� \x00\x01\x1f\x7f \u2028\u2029 ١٢٣ ₿ ß ſ İ i̇",
    "",
    "1234567890 don't we'LL  \n\n\n   x",
)
TOKENIZERS = {
    "bytes": (),
    "bpe": ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300"),
    "pretrained": ("data/tokenizer=pretrained", "data.tokenizer.name={file}"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_transformers_gives_the_token_ids_of_the_run(
    finished: FinishedRuns,
    command: Command,
    tmp_path: Path,
    kind: str,
) -> None:
    import transformers

    file = tmp_path / "with_additions.json"
    file.write_text(
        with_additions(finished(*TOKENIZERS["bpe"], "train.steps=2") / "tokenizer.json")
    )
    run = finished(*(word.format(file=file) for word in TOKENIZERS[kind]), "train.steps=2")
    told = command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    ours = stored_tokenizer(to_config(run_directory.read_config(run)), run)
    assert ours is not None
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ODD:
        ids = hf(text)["input_ids"]
        assert ids == ours.encode(text) and hf.decode(ids) == ours.decode(ids), text
    assert hf.eos_token_id == ours.end_of_document and hf.model_max_length == 32
    assert kind != "bytes" or hf("é")["input_ids"] == list("é".encode())
    adds = (
        "tokenizer.json adds `<|endoftext|>` to a text. Training did not, so that rule is left "
        "out here."
    )
    assert (
        (adds in told)
        == (kind == "pretrained")
        == (adds in (tmp_path / "out/README.md").read_text())
    )


@pytest.mark.long
def test_a_token_that_begins_documents_is_trained_exported_and_scored_alike(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    import transformers

    made = tokenizers.Tokenizer.from_file(
        str(finished(*TOKENIZERS["bpe"], "train.steps=2") / "tokenizer.json")
    )
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "file.json"))
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    named = ("data/tokenizer=pretrained", f"data.tokenizer.name={tmp_path / 'file.json'}")
    run = finished(*named, "data.tokenizer.begin_of_document='<s>'", "train.steps=2")
    ours = stored_tokenizer(to_config(run_directory.read_config(run)), run)
    assert ours is not None and begin_of_document(ours) == made.token_to_id("<s>")
    ids = np.concatenate(
        list(token_chunks([Piece("one"), Piece("tw", ends_document=False), Piece("o")], ours))
    )
    assert ours.decode(ids.tolist()) == "onetwo"
    begins = ids == begin_of_document(ours)
    ends = ids == ours.end_of_document
    assert begins.sum() == ends.sum() == 2 and begins[0] and (begins[1:] == ends[:-1]).all()

    command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert hf("x = 1")["input_ids"] == [begin_of_document(ours), *ours.encode("x = 1")]
    assert hf.bos_token == "<s>" and theirs(
        tmp_path / "out"
    ).config.bos_token_id == begin_of_document(ours)
    text = f"text={tmp_path / 'text.txt'}"
    scores = [
        command("eval", place, text, "recipe=bf16", "--json") for place in (run, tmp_path / "out")
    ]
    losses = [json.loads(score)["scores"][0]["values"]["loss"] for score in scores]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.long
def test_conversations_are_the_text_that_the_run_was_trained_on(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    import transformers

    messages = [{"role": "user", "content": "2+2 é?"}, {"role": "assistant", "content": "4"}]
    chat = tmp_path / "chat.jsonl"
    template = tmp_path / "own.jinja"
    chat.write_text(f"{json.dumps({'messages': messages})}\n" * 200)
    template.write_text(
        "{% for m in messages %}\n  [{{ m.role }}]{{ m['content'] }}\n{% endfor %}\n"
    )
    for number, words in enumerate(((), (f"data.template={template}",))):
        run = finished(
            "data=chat", f"data.path={chat}", "train.steps=1", "train.seq_len=128", *words
        )
        out = tmp_path / str(number)
        command("export", run, "to=hf", f"out={out}")
        ours = kept_template(run)
        hf = transformers.AutoTokenizer.from_pretrained(out)
        assert ours is not None and hf.apply_chat_template(messages, tokenize=False) == ours.render(
            messages
        )
        assert hf.apply_chat_template(
            messages[:1], tokenize=False, add_generation_prompt=True
        ) == ours.render(messages[:1], prompt=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_origin.json"])
def test_a_run_that_has_lost_its_tokenizer_is_refused(
    finished: FinishedRuns, command: Command, tmp_path: Path, name: str
) -> None:
    """Nothing is read where the configuration says that the tokenizer came from."""
    run = Path(shutil.copytree(finished(*TOKENIZERS["bpe"], "train.steps=2"), tmp_path / "b"))
    (run / name).unlink()
    said = command("export", run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert f"has lost its {name}: put it back" in said and os.listdir(tmp_path) == ["b"]


def with_additions(file: Path) -> str:
    """A tokenizer that begins each text with a special token, as many do."""
    table = json.loads(file.read_text())
    token = {"id": "<|endoftext|>", "type_id": 0}
    table["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": token}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    return json.dumps(table)


def test_a_run_on_token_ids_has_no_tokenizer_and_says_so(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.bin"
    ids.write_bytes(bytes(range(200)) * 60)
    run = finished(
        "data=tokens",
        f"data.path={ids}",
        "data.dtype=uint8",
        "data.vocab_size=256",
        "train.steps=1",
    )
    told = command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    assert "trained on token ids: the folder has no tokenizer" in told
    assert (
        set(os.listdir(tmp_path / "out")) == FILES
        and theirs(tmp_path / "out").config.eos_token_id is None
    )
    assert used(tmp_path / "out").keys() == {"model", "AutoModelForCausalLM"}
