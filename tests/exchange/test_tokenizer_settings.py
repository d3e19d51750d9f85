"""What a folder says of its tokenizer comes back: special tokens, the sides of padding and cutting."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from finished_runs import FinishedRuns

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
