"""A run as a folder of Hugging Face: `transformers` loads it, its loss and its token ids are those of the run."""

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import as_before, lines
from forked import forked
from safetensors.torch import load_file
from torch import Tensor

from fp4train import checkpoint, files
from fp4train.checkpoint.model_folder import INDEX, WEIGHTS
from fp4train.config import to_config
from fp4train.data import Loader
from fp4train.data.template import kept_template
from fp4train.exchange.huggingface import export_huggingface
from fp4train.exchange.stored import open_stored
from fp4train.exchange.tokenizer import stored_tokenizer
from fp4train.run.record import directory as run_directory

Train = Callable[..., Path]
Command = Callable[..., str]

ODD = (
    'def f(x):\n\treturn "é漢🙂"  # ok\r\n',
    "  two  spaces\u00a0and a no-break one, ﬁ ligature, e\u0301 composed, \u200d joiner, \ufeff mark",
    "👩‍👩‍👧‍👦 ��� \x00\x01\x1f\x7f \u2028\u2029 ١٢٣ ₿ ß ſ İ i̇",
    "",
    "1234567890 don't we'LL  \n\n\n   x",
)
FILES = {"README.md", "config.json", "generation_config.json", WEIGHTS}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def evaluated(run: Path) -> tuple[Tensor, Tensor]:
    """The tokens and targets of the run's last evaluation."""
    config = to_config(run_directory.read_config(run))
    data = config.data.build(run, config.train.seq_len, config.run.seed)
    size, length = config.train.batch_size, config.train.seq_len
    return Loader(data.val, batch_size=size, seq_len=length, seed=0).batch(0)


def losses(run: Path) -> dict[str, Any]:
    return [line for line in lines(run) if "val/loss" in line][-1]


def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def loss_of(model: Any, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()).item()


SHAPES = {
    "tied": (),
    "untied, own head width": ("model.tied=false", "model.head_dim=24"),
    "biases": ("model.qkv_bias=true", "model.kv_heads=2"),
    "norms of heads, scaled rotations": (
        "model.qk_norm=true",
        "model.rope_base=500000",
        "+model.rope_scaling._target_=fp4train.models.common.layers.RopeScaling",
        *(f"+model.rope_scaling.{each}" for each in ("factor=4", "low_freq_factor=1", "high_freq_factor=4")),
        "+model.rope_scaling.original_length=16",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_gives_the_loss_of_the_runs_evaluation(
    train: Train, command: Command, tmp_path: Path, shape: str
) -> None:
    """In float32 both ways, so that what is compared is the model, and not how each side rounds."""
    run, out = train("recipe=fp32", "train.steps=3", *SHAPES[shape]), tmp_path / "out"
    told = command("export", run, "to=hf", f"out={out}")
    assert f"{out}: step 3, " in told and "weights in float32" in told
    assert set(os.listdir(out)) == FILES | TOKENIZER
    model = theirs(out)
    assert loss_of(model, *evaluated(run)) == pytest.approx(losses(run)["val/loss"], abs=1e-5)
    assert model.config.vocab_size == 320 and model.dtype == torch.float32
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, 256)
    stored = open_stored(run)
    own = {theirs: stored.found.tensors[name] for name, theirs in stored.names.items()}
    back = model.state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in own.items()), "every bit"
    assert set(back) - set(own) <= {"lm_head.weight"}, "that is the embedding's where it is tied"


def test_the_default_recipe_is_exported_with_its_float32_weights(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    command("export", small_run, "to=hf", f"out={tmp_path / 'out'}")
    x, y = evaluated(small_run)
    config, found = to_config(run_directory.read_config(small_run)), checkpoint.load(small_run / "checkpoints")
    ours = config.model.build(vocab_size=257, seq_len=32)
    ours.load_state_dict({n.removeprefix("model/"): found.tensors[n] for n in found.tensors if n.startswith("model/")})
    with torch.no_grad():
        expected = ours(x, y).item()
    loss = loss_of(theirs(tmp_path / "out"), x, y)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert loss == pytest.approx(losses(small_run)["val/loss"], abs=2e-2), "which was computed in BF16"


def test_bf16_is_the_nearest_of_each_weight_and_shards_have_an_index(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "deep/er/out"
    command("export", small_run, "to=hf", f"out={whole}")
    told = command("export", small_run, "to=hf", f"out={out}", "dtype=bf16", "shard=20kB", "step=6")
    assert "0.1 MB of weights in bf16" in told
    index = json.loads((out / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected = load_file(whole / WEIGHTS)
    held = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert set(held) == set(expected) and all(torch.equal(held[n], t.bfloat16()) for n, t in expected.items())
    assert theirs(out).dtype == torch.bfloat16
    assert "rounded to nearest, ties to even, from the float32 weights" in (out / "README.md").read_text()


TOKENIZERS = {
    "bytes": (),
    "bpe": ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300"),
    "pretrained": ("data/tokenizer=pretrained", "data.tokenizer.name={file}"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_transformers_gives_the_token_ids_of_the_run(
    train: Train, command: Command, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    import transformers

    file = tmp_path_factory.getbasetemp() / "with_additions.json"
    file.write_text(with_additions(train(*TOKENIZERS["bpe"], "train.steps=2") / "tokenizer.json"))
    run = train(*(word.format(file=file) for word in TOKENIZERS[kind]), "train.steps=2")
    told = command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    ours = stored_tokenizer(to_config(run_directory.read_config(run)), run)
    assert ours is not None
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ODD:
        ids = hf(text)["input_ids"]
        assert ids == ours.encode(text) and hf.decode(ids) == ours.decode(ids), text
    assert hf.eos_token_id == ours.end_of_document and hf.model_max_length == 32
    assert kind != "bytes" or hf("é")["input_ids"] == list("é".encode())
    adds = "tokenizer.json adds `<|endoftext|>` to a text. Training did not, so that rule is left out here."
    assert (adds in told) == (kind == "pretrained") == (adds in (tmp_path / "out/README.md").read_text())


def test_conversations_are_the_text_that_the_run_was_trained_on(train: Train, command: Command, tmp_path: Path) -> None:
    import transformers

    messages = [{"role": "user", "content": "2+2 é?"}, {"role": "assistant", "content": "4"}]
    chat, template = tmp_path / "chat.jsonl", tmp_path / "own.jinja"
    chat.write_text(f"{json.dumps({'messages': messages})}\n" * 200)
    template.write_text("{% for m in messages %}\n  [{{ m.role }}]{{ m['content'] }}\n{% endfor %}\n")
    for number, words in enumerate(((), (f"data.template={template}",))):
        run, out = (
            train("data=chat", f"data.path={chat}", "train.steps=1", "train.seq_len=128", *words),
            tmp_path / str(number),
        )
        command("export", run, "to=hf", f"out={out}")
        ours, hf = kept_template(run), transformers.AutoTokenizer.from_pretrained(out)
        assert ours is not None and hf.apply_chat_template(messages, tokenize=False) == ours.render(messages)
        assert hf.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == ours.render(
            messages[:1], prompt=True
        )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_origin.json"])
def test_a_run_that_has_lost_its_tokenizer_is_refused(
    train: Train, command: Command, tmp_path: Path, name: str
) -> None:
    """Nothing is read where the configuration says that the tokenizer came from."""
    run = Path(shutil.copytree(train(*TOKENIZERS["bpe"], "train.steps=2"), tmp_path / "b"))
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
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    return json.dumps(table)


def test_a_run_on_token_ids_has_no_tokenizer_and_says_so(train: Train, command: Command, tmp_path: Path) -> None:
    ids = tmp_path / "ids.bin"
    ids.write_bytes(bytes(range(200)) * 60)
    run = train("data=tokens", f"data.path={ids}", "data.dtype=uint8", "data.vocab_size=256", "train.steps=1")
    told = command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    assert "trained on token ids: the folder has no tokenizer" in told
    assert set(os.listdir(tmp_path / "out")) == FILES and theirs(tmp_path / "out").config.eos_token_id is None


def test_the_model_card_says_how_the_model_was_trained(
    train: Train, small_run: Path, command: Command, tmp_path: Path
) -> None:
    command("export", small_run, "to=hf", f"out={tmp_path / 'out'}")
    card = (tmp_path / "out/README.md").read_text()
    last = losses(small_run)
    numbers = " | ".join(f"{last[key]:.4f}" for key in ("val/loss", "val/loss_recipe", "train/loss"))
    assert f"| 6 | NVFP4 with fprop in BF16 | {numbers} |" in card
    first, second = [line for line in card.splitlines() if line.startswith("| 0–") or line.startswith("| 5–")]
    assert "NVFP4" in first and "E2M1·E2M1" in first and "fprop" in second and "cooldown" in second
    assert "blocks.0.attention.wq" in card and "policy.last=0.15" in card
    assert "fp4train 0." in card and "torch 2." in card and "The last 63 of 320 rows of the vocabulary" in card
    assert not any(word in card for word in (str(small_run.parent), "data.path")), "no path of this machine"
    import yaml

    head = yaml.safe_load(card.split("---\n")[1])
    assert head["library_name"] == "transformers" and "nvfp4" in head["tags"]


def test_a_run_that_ends_in_high_precision_has_the_losses_of_its_last_quantised_forward_pass(
    train: Train, tmp_path: Path
) -> None:
    export_huggingface(train("eval.every=2"), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    before, after = re.findall(r"^\| (\d) \| (NVFP4.*?) \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE)
    assert before[:2] == ("4", "NVFP4") and before[2] != before[3]
    assert after[:2] == ("6", "NVFP4 with fprop in BF16") and after[2] == after[3]


def test_results_of_tasks_are_in_the_card(small_run: Path, command: Command, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    command("eval", run, "recipe=bf16,nvfp4")
    command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    card = (tmp_path / "out/README.md").read_text()
    held_out = [line for line in card.splitlines() if line.startswith("| held-out text |")]
    assert len(held_out) == 2 and all("loss " in line for line in held_out)
    assert "bf16" in held_out[0].lower() and "nvfp4" in held_out[1].lower()


def test_a_run_without_evaluations_or_records_says_so_in_its_card(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    (run / "metrics.jsonl").unlink()
    (run / "history.jsonl").unlink()
    export_huggingface(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "The run has no evaluation up to step 6." in card and card.count("has no record of what ran") == 2


def test_a_name_of_a_run_is_text_in_its_card(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "a <b>|`c"))
    export_huggingface(run, tmp_path / "out")
    assert "\n# a \\<b\\>\\|\\`c\n" in (tmp_path / "out/README.md").read_text()


def test_neither_transformers_nor_a_model_is_needed(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_huggingface(small_run, tmp_path / "with")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_: pytest.fail("a model was built"))
    export_huggingface(small_run, tmp_path / "without")
    assert same_files(tmp_path / "with", tmp_path / "without")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_moments_are_neither_read_nor_missed(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    export_huggingface(run, tmp_path / "first")
    (run / "checkpoints/step_00000006/tensors.safetensors").unlink()
    export_huggingface(run, tmp_path / "second")
    assert same_files(tmp_path / "first", tmp_path / "second")
    shutil.copytree(small_run / "checkpoints", run / "checkpoints", dirs_exist_ok=True)
    as_before(run / "checkpoints/step_00000006")
    export_huggingface(run, tmp_path / "third")
    assert same_files(tmp_path / "first", tmp_path / "third"), "of a checkpoint with one file of all tensors"


def same_files(one: Path, other: Path) -> bool:
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and all((one / n).read_bytes() == (other / n).read_bytes() for n in names)


def missing(path: Path) -> None:
    path.unlink()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "said"), [(missing, "is missing"), (flipped, "is damaged (checksum differs)")])
def test_damaged_weights_are_refused_and_other_steps_are_named(
    train: Train, command: Command, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    run = Path(shutil.copytree(train("train.steps=4", "checkpoint.every=2"), tmp_path / "b"))
    damage(run / "checkpoints/step_00000004/weights.safetensors")
    for words in ((), ("step=4",)):
        told = command("export", run, "to=hf", f"out={tmp_path / 'out'}", *words, code=1)
        assert f"weights.safetensors {said}" in told and "Others in the folder: 2" in told
    assert os.listdir(tmp_path) == ["b"]
    assert "step 2, " in command("export", run, "to=hf", f"out={tmp_path / 'out'}", "step=2")


def test_weights_that_are_not_the_models_are_named(small_run: Path, command: Command, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    found = checkpoint.load(run / "checkpoints")
    tensors = {name: tensor for name, tensor in found.tensors.items() if name != "model/norm.weight"}
    checkpoint.save(run / "checkpoints", 6, tensors, found.state, keep=1)
    said = command("export", run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "step_00000006 lacks norm.weight" in said and os.listdir(tmp_path) == ["b"]


# -- bad input ---------------------------------------------------------------------------------------------------------

WRONG = {
    "no run": (("nowhere", "to=hf", "out=o"), "nowhere is not a run directory"),
    "two runs": (("{run}", "{run}", "to=hf", "out=o"), "export needs one run directory"),
    "no target": (("{run}", "out=o"), "to= is missing: allowed are hf"),
    "another target": (("{run}", "to=hff", "out=o"), "compressed-tensors, modelopt; did you mean 'hf'?"),
    "no out": (("{run}", "to=hf"), "export needs the name of a new folder, out=FOLDER"),
    "the folder itself": (("{run}", "to=hf", "out=."), "export needs the name of a new folder, out=FOLDER"),
    "a word like an option": (("{run}", "to=hf", "outt=o"), "unknown key 'outt'; did you mean 'out'?"),
    "a dtype": (("{run}", "to=hf", "out=o", "dtype=fp8"), "dtype=fp8: allowed are float32, bf16"),
    "a step": (("{run}", "to=hf", "out=o", "step=five"), "step='five' must be the step of a checkpoint"),
    "a step without checkpoint": (("{run}", "to=hf", "out=o", "step=5"), "has no checkpoint of step 5; it has 6"),
    "a size": (("{run}", "to=hf", "out=o", "shard=5"), "shard='5' must be a size: 500MB, 5GB"),
    "a flag": (("{run}", "to=hf", "out=o", "--force"), "export knows no flag --force"),
    "an existing folder": (("{run}", "to=hf", "out={run}"), "is there already, and nothing is written over"),
    "a plugin that is not there": (("{run}", "to=hf", "out=o", "plugins=[nowhere]"), "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_in_one_line(
    small_run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = WRONG[case]
    told = command("export", *(word.format(run=small_run) for word in words), code=1)
    assert said in told and told.count("fp4train: ") == 1
    assert os.listdir(tmp_path) == []


def test_a_model_without_a_form_in_transformers_is_refused(
    small_run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4train.models.hf.FAMILIES", ())
    said = command("export", small_run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "Llama has no form in transformers" in said and os.listdir(tmp_path) == []


def test_a_shape_that_transformers_lacks_is_refused(train: Train, command: Command, tmp_path: Path) -> None:
    run = train("train.steps=1", "model.qk_norm=true", "model.qkv_bias=true")
    said = command("export", run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "has no form in transformers" in said and os.listdir(tmp_path) == []


def test_a_full_disk_ends_the_export_with_nothing_there(
    small_run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: files.Buffer) -> None:
        os.write(descriptor, bytes(data)[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fp4train.exchange.folder.write_all", full)
        said = command("export", small_run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "out is not written: [Errno 28] No space left on device. There is no folder of that name" in said
    assert os.listdir(tmp_path) == []


def test_a_kill_in_the_middle_leaves_nothing_that_looks_whole(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    def killed() -> None:
        def tell(done: int, total: int | None, what: str) -> None:
            if done == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        export_huggingface(small_run, tmp_path / "out", tell=tell)

    assert forked(killed) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.")
    command("export", small_run, "to=hf", f"out={tmp_path / 'out'}")
    assert os.listdir(tmp_path) == ["out"]
