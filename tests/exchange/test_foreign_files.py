"""What a folder holds beside what its export wrote, and what other software makes of its tokenizer,
is said.
"""

import json
import shutil
from pathlib import Path

import pytest
from command_line import Cli
from finished_runs import FinishedRuns
from hf_exports import used

from fp4train.cli import main
from fp4train.exchange import export_huggingface, load_trained, verify

ADDED = {
    "adapter_config.json": "transformers with peft adds an adapter",
    "model-00001-of-00001.safetensors": "weights, which other software may load instead",
    "model.safetensors.index.json": "says which weights are loaded",
    "pytorch_model.bin": "weights, which other software may load instead",
    "modeling_own.py": "code, which some software runs",
    "vocab.json": "a tokenizer, which other software may load instead",
    "chat_template.json": "a chat template, which other software may render with",
    "hf_quant_config.json": "a configuration, which other software may read",
    "notes.txt": "the export wrote no such file",
}


@pytest.fixture(scope="module")
def exported(finished: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of weights, and its run."""
    run = finished("train.steps=2")
    folder = tmp_path_factory.mktemp("exports") / "hf"
    export_huggingface(run, folder)
    return folder, run


def test_every_file_that_the_export_did_not_write_is_named(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, run = exported
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert verify(copy, run).equal
    for name in ADDED:
        (copy / name).write_text("{}")
    (copy / "runs").mkdir()
    others = {line.partition(":")[0]: line for line in verify(copy, run).others}
    assert others.keys() == {*ADDED, "runs"}
    assert all(does in others[name] for name, does in ADDED.items())
    assert "no such folder" in others["runs"]
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(copy), f"against={run}"])
    shown = capsys.readouterr().out
    assert ended.value.code == 1
    assert "equal in every bit" not in shown


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("config.json", "sliding_window", 16),
        ("config.json", "auto_map", {"AutoModelForCausalLM": "somebody--repo.X"}),
        ("tokenizer_config.json", "chat_template", "{{ messages }}"),
        ("generation_config.json", "temperature", 0.1),
        ("special_tokens_map.json", "bos_token", "<s>"),
    ],
)
def test_a_key_that_the_export_did_not_write_is_named(
    exported: tuple[Path, Path], tmp_path: Path, name: str, key: str, value: object
) -> None:
    folder, run = exported
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    table = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(table | {key: value}))
    assert any(line.startswith(f"{name}: {key} is ") for line in verify(copy, run).others)


@pytest.mark.long
def test_a_tokenizer_that_autotokenizer_changes_is_said_at_export_and_not_verified_as_equal(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    """Qwen2's class has a pre-tokenizer of its own; Llama's and Qwen3's folders keep theirs."""
    run = finished(
        "train.steps=2",
        "model.qkv_bias=true",
        "data/tokenizer=bpe",
        "data.tokenizer.vocab_size=300",
    )
    notes = export_huggingface(run, tmp_path / "qwen2").notes
    assert any(
        "makes a Qwen2Tokenizer of the tokenizer" in note and "--tokenizer" in note
        for note in notes
    )
    (difference,) = verify(tmp_path / "qwen2", run).others
    assert "ids where training had" in difference
    cure(tmp_path / "qwen2", tmp_path / "tokenizer")
    tokenizer = load_trained(run).text_tokenizer()
    ids = tokenizer.encode("x  =  12345\n")
    read = used(tmp_path / "qwen2")["tokenizer"]
    assert read("A\u030a")["input_ids"] == tokenizer.encode("A\u030a")
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert loaded("x  =  12345\n")["input_ids"] == list(ids)
    for words in ((), ("model.qk_norm=true",)):
        run = finished(
            "train.steps=2", *words, "data/tokenizer=bpe", "data.tokenizer.vocab_size=300"
        )
        out = tmp_path / f"out{len(words)}"
        assert not any("AutoTokenizer" in note for note in export_huggingface(run, out).notes)
        assert verify(out, run).equal


def cure(folder: Path, place: Path) -> None:
    """The folder of a tokenizer alone, as the export's note has it."""
    place.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(folder / name, place / name)
    (place / "config.json").write_text('{"model_type": "llama"}')


@pytest.mark.long
def test_text_is_scored_after_the_end_of_a_document_also_by_a_run_with_a_mask(
    finished: FinishedRuns, lm_eval: object, tmp_path: Path
) -> None:
    """As lm_eval's own class does on the export, which sees the id that stands before a text."""
    from lm_eval.models.huggingface import HFLM

    from fp4train.exchange import held_out
    from fp4train.exchange.harness import HarnessModel

    run = finished("train.steps=2", "train.document_mask=true", "recipe=fp32", "optim.lr=0.03")
    export_huggingface(run, tmp_path / "hf")
    trained = load_trained(run)
    ours = HarnessModel(trained, trained.high_precision, rows=4)
    theirs = HFLM(
        pretrained=str(tmp_path / "hf"),
        dtype="float32",
        max_length=trained.context,
        batch_size=1,
        device="cpu",
    )
    requests = [
        instance(lm_eval, *pair)
        for pair in (("", " hello"), ("", "fox"), ("the quick", " brown fox"))
    ]
    for our, their in zip(
        ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True
    ):
        assert our[0] == pytest.approx(their[0], abs=1e-3)
    with trained.masked():
        hidden = ours.loglikelihood(requests[:1])[0][0]
    assert abs(hidden - theirs.loglikelihood(requests[:1])[0][0]) > 5e-3
    (score,) = held_out(trained, [trained.high_precision], None)
    assert trained.model.documents is None and score.values["loss"] > 0


def instance(lm_eval: object, context: str, answer: str) -> object:
    from lm_eval.api.instance import Instance

    return Instance(request_type="loglikelihood", doc={}, arguments=(context, answer), idx=0)


@pytest.mark.parametrize("data", ["text", "another tokenizer"])
def test_end_ids_and_settings_of_a_folder_come_back(
    exported: tuple[Path, Path],
    cli: Cli,
    tmp_path: Path,
    data: str,
) -> None:
    folder = Path(shutil.copytree(exported[0], tmp_path / "chat"))
    settings = {
        "eos_token_id": [7, 9],
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": True,
        "pad_token_id": 3,
    }
    (folder / "generation_config.json").write_text(
        json.dumps(settings | {"transformers_version": "5.0"})
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 8]}))
    words = ("data/tokenizer=bytes",) if data == "another tokenizer" else ()
    ended = cli("run.name=a", f"init={folder}", "train.steps=2", *words)
    assert ended.code == 0
    warned = "brings a tokenizer, and the command names one of another kind" in ended.err
    assert warned == bool(words)
    run = Path("runs/a")
    shutil.rmtree(folder)
    export_huggingface(run, tmp_path / "again")
    again = json.loads((tmp_path / "again/generation_config.json").read_text())
    ends = json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"]
    end = load_trained(run).text_tokenizer().end_of_document
    if words:
        assert (again, ends) == ({"eos_token_id": end, "pad_token_id": end}, end)
    else:
        assert again == settings | {"eos_token_id": [7, 9, end]}
        assert ends == [7, 8, end]
    assert verify(tmp_path / "again", run).equal
