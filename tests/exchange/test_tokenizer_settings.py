"""What a folder says of its tokenizer comes back: special tokens, the sides of padding and cutting."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from command_line import Cli
from finished_runs import FinishedRuns

from fp4train.data import CHATML, ChatTemplate
from fp4train.exchange.huggingface import export_huggingface
from fp4train.exchange.verify import verify


def table(folder: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / name).read_text())
    return read


@pytest.fixture
def handed_on(finished: FinishedRuns, cli: Cli, tmp_path: Path) -> Any:
    """Trains on from a folder with these settings, which then goes, and exports the run; returns
    the new folder.
    """

    def hand_on(**settings: object) -> Path:
        folder = tmp_path / "begun"
        export_huggingface(finished("train.steps=2"), folder)
        for name in ("special_tokens_map.json", "generation_config.json"):
            (folder / name).unlink()
        kept = {key: value for key, value in table(folder).items() if key != "pad_token"}
        (folder / "tokenizer_config.json").write_text(json.dumps(kept | settings))
        assert cli("run.name=a", f"init={folder}", "train.steps=1").code == 0
        shutil.rmtree(folder)
        export_huggingface(Path("runs/a"), tmp_path / "again")
        assert verify(tmp_path / "again", Path("runs/a")).equal
        return tmp_path / "again"

    return hand_on


def test_special_tokens_and_sides_of_a_folder_come_back(handed_on: Any) -> None:
    letter = {"content": "a", "lstrip": False}
    folder = handed_on(pad_token=letter, bos_token="b", padding_side="left", truncation_side="left")
    settings = table(folder)
    assert [settings[name] for name in ("pad_token", "bos_token")] == ["a", "b"]
    assert settings["padding_side"] == settings["truncation_side"] == "left"
    assert table(folder, "special_tokens_map.json")["pad_token"] == "a"
    pad = table(folder, "generation_config.json")["pad_token_id"]
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padded = tokenizer(["xyz", "x"], padding=True)["input_ids"]
    assert padded[1][:2] == [pad, pad] == [tokenizer.pad_token_id] * 2
    assert len(tokenizer) <= table(folder, "config.json")["vocab_size"]


def test_texts_are_padded_by_the_end_of_a_document_where_no_token_is_named(handed_on: Any) -> None:
    """A name without a row in the vocabulary names none: transformers would add the row."""
    folder = handed_on(pad_token="<pad>", mask_token=None, unk_token=7)
    settings = table(folder)
    assert settings["pad_token"] == settings["eos_token"]
    assert not {"mask_token", "unk_token", "padding_side"} & settings.keys()
    (end,) = [table(folder, "generation_config.json")["eos_token_id"]]
    assert table(folder, "generation_config.json")["pad_token_id"] == end


def test_text_of_a_run_on_conversations_ends_where_its_answers_do(
    finished: FinishedRuns, cli: Cli, tmp_path: Path
) -> None:
    """`generate` would go on behind them with the next question, and so would servers."""
    folder = tmp_path / "begun"
    notes = export_huggingface(finished("train.steps=2"), folder).notes
    assert not any("Answers end" in note for note in notes)
    end = table(folder, "generation_config.json")["eos_token_id"]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert cli("run.name=a", f"init={folder}", "train.steps=1").code == 0
    for source, ends in (
        (CHATML, [end, tokenizer.token_to_id("<|im_end|>")]),
        ("{{ messages[2].content }}", end),  # refuses a question with its answer
    ):
        ChatTemplate(source=source).save(Path("runs/a"))
        again = tmp_path / f"again{len(source)}"
        export_huggingface(Path("runs/a"), again)
        assert verify(again, Path("runs/a")).equal
        for name in ("generation_config.json", "config.json"):
            assert table(again, name)["eos_token_id"] == ends


def test_what_a_chat_template_is_told_elsewhere_and_an_end_that_is_no_token_are_noted(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished("train.steps=2"), run)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    ChatTemplate(source=source).save(run)
    notes = export_huggingface(run, tmp_path / "a").notes
    assert "trained with eos_token left empty; here it is `<|end|>`" in " ".join(notes)
    assert "Answers end with the text 'user:', which is no token" in " ".join(notes)
