"""Runs that begin with a Hugging Face folder: every weight, its model, its tokenizer, its loss; and
what is refused.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import Cli, events, losses
from hf_folders import END, MODELS, byte_tokenizer, change_table, random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4train import checkpoint
from fp4train.data import Loader, Text
from fp4train.models.llama import hf

OWN = ("data=text", "track=jsonl", "train.steps=2", "train.batch_size=4", "train.seq_len=32", "eval.batches=1",
       "schedule.warmup=0", "optim.lr=0.001")  # fmt: skip


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copies a folder, to be broken."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / "broken"))


def begin(cli: Cli, folder: Path, *arguments: str) -> Any:
    given = {each.partition("=")[0] for each in arguments}
    own = [each for each in (*OWN, *cli.paths, "run.name=b") if each.partition("=")[0] not in given]
    return cli.raw(*own, f"init={folder}", *arguments)


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def weights(run: Path, step: int) -> dict[str, Tensor]:
    found = checkpoint.load(run / "checkpoints", step).tensors
    return {name.removeprefix("model/"): found[name] for name in found if name.startswith("model/")}


def transformers_loss(model: Any, text: Path) -> float:
    """The loss of the first step's batch by transformers, in float32."""
    data = Text(path=str(text)).build(Path(), 32, 0)
    x, y = Loader(data.train, batch_size=4, seq_len=32, seed=0).batch(0)
    with torch.no_grad():
        return float(F.cross_entropy(model.float()(input_ids=x).logits.flatten(0, 1), y.flatten()))


@pytest.mark.parametrize("name", MODELS)
def test_the_first_loss_of_a_run_is_that_of_transformers(
    cli: Cli, folders: dict[str, Path], name: str
) -> None:
    assert begin(cli, folders[name], "recipe=fp32").code == 0
    model = random_model(name)
    if name == "qwen2":
        model = model.bfloat16()
    (_, first), *_ = losses("runs/b").items()
    assert first[0] == pytest.approx(transformers_loss(model, cli.text), abs=1e-5)
    assert events("runs/b", "init")[0]["from"] == str(folders[name])


def test_a_run_has_every_weight_of_the_folder_and_trains_in_nvfp4(
    cli: Cli, folders: dict[str, Path]
) -> None:
    """With a rate below the last bit the checkpoint holds the folder's weights, by the names of
    transformers.
    """
    folder = folders["qwen3"]
    assert begin(cli, folder, "optim.lr=1e-30", "train.steps=1").code == 0
    names = hf.FAMILY.names_of(hf.shape_of(json.loads((folder / "config.json").read_text())))
    theirs = stored(folder)
    ours = weights(Path("runs/b"), 1)
    assert {names[name] for name in ours} == set(theirs)
    assert all(torch.equal(tensor, theirs[names[name]]) for name, tensor in ours.items())
    assert begin(cli, folder, "run.name=c", "recipe=nvfp4", "policy=all").code == 0
    assert "E2M1" in Path("runs/c/plan.txt").read_text()


def test_the_saved_run_needs_the_folder_no_more(cli: Cli, copy: Callable[[str], Path]) -> None:
    """Model and tokenizer are in the run: it is resumed, and branched, when the folder is gone."""
    folder = copy("llama-3")
    assert begin(cli, folder).code == 0
    shutil.rmtree(folder)
    assert cli.raw("resume=runs/b", "train.steps=3").code == 0
    assert len(losses("runs/b")) == 3


def test_the_same_command_goes_on_with_the_run(cli: Cli, folders: dict[str, Path]) -> None:
    assert begin(cli, folders["llama"]).code == 0
    assert begin(cli, folders["llama"]).code == 0
    assert len(losses("runs/b")) == 2


def test_the_tokenizer_is_the_folders_unless_another_is_named(
    cli: Cli, folders: dict[str, Path]
) -> None:
    """Its end of a document is what the folder says; the ids are bytes, so both runs have the same
    losses.
    """
    assert begin(cli, folders["llama"], "recipe=fp32").code == 0
    assert json.loads(Path("runs/b/tokenizer_origin.json").read_text())["origin"] == str(
        folders["llama"]
    )
    assert (
        begin(cli, folders["llama"], "recipe=fp32", "run.name=c", "data/tokenizer=bytes").code == 0
    )
    assert not Path("runs/c/tokenizer.json").exists()
    assert losses("runs/b") == losses("runs/c")


def test_the_end_of_a_document_may_be_named_for_the_folders_tokenizer(
    cli: Cli, copy: Callable[[str], Path]
) -> None:
    """Where the folder does not say which token it is, and the token has no usual name."""
    folder = copy("llama")
    (folder / "tokenizer_config.json").unlink()
    assert "Name one with data.tokenizer.end_of_document" in begin(cli, folder).message
    spelled = {"__type": "AddedToken", "content": END, "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": spelled}))
    assert begin(cli, folder, "train.steps=1", "run.name=c").code == 0, "as older folders say it"
    (folder / "tokenizer_config.json").unlink()
    named = ("data/tokenizer=pretrained", f"data.tokenizer.end_of_document='{END}'")
    assert begin(cli, folder, *named).code == 0


def test_a_named_tokenizer_of_more_ids_than_the_model_is_refused(
    cli: Cli, folders: dict[str, Path]
) -> None:
    Path("more.json").write_text(byte_tokenizer(more=64))
    named = (
        "data/tokenizer=pretrained",
        "data.tokenizer.name=more.json",
        "data.tokenizer.end_of_document='<|0|>'",
    )
    ended = begin(cli, folders["llama"], *named)
    assert ended.code == 1
    assert "the tokenizer has 321 ids, and model.vocab_size=320 rows are fewer" in ended.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model=llama_30m",), "brings its model: leave out model=…"),
        (
            ("model.width=128",),
            "model.width=128 contradicts init=.*, whose config.json makes it 64",
        ),
        (("model.widht=64",), "unknown key 'model.widht'; did you mean 'model.width'"),
        (("model.experts.top=1",), "unknown key 'model.experts.top'"),
        (("train.stepz=1",), "unknown key 'train.stepz'; did you mean 'train.steps'"),
        (
            ("model.max_positions=16",),
            "train.seq_len=32 exceeds model.max_positions=16, the longest sequence that",
        ),
        (("init_step=3",), "init_step=3 is the step of a checkpoint, and init=.* is no run"),
    ],
)
def test_a_command_that_contradicts_the_folder_is_refused(
    cli: Cli, folders: dict[str, Path], arguments: tuple[str, ...], message: str
) -> None:

    ended = begin(cli, folders["llama"], *arguments)
    assert ended.code == 1
    assert re.search(message, ended.message), ended.message
    assert not Path("runs/b/config.yaml").exists()


# -- folders that are refused ----------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def table(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_table(folder / name, **changes)


def text(name: str, written: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(written)


def weight(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a folder with one file."""

    def act(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return act


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])


def lost_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def link(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return act


def shard(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Changes the index."""

    def act(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return act


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "break_", "message"),
    [
        ("llama", without("config.json"), "not a run directory .*a Hugging Face folder would "
                                          "have a config.json"),
        ("llama", without("model.safetensors"), "has no weights: neither model.safetensors "
                                                "nor model.saf"),
        ("llama", pickled, "weights in pytorch_model.bin, a pickle, which can run code and "
                           "is not opened. Convert it"),
        ("llama", without("tokenizer.json"), "or data/tokenizer=bytes where its ids are "
                                             "those of bytes"),
        ("llama", text("tokenizer.json", "no"), "is no tokenizer file"),
        ("llama", table("tokenizer.json", normalizer={"type": "Lowercase"}), "does not give text .* becomes 'def add"),
        ("llama", text("config.json", "{"), "config.json is no JSON"),
        ("llama", table("config.json", model_type="gemma3"), "model_type='gemma3' is not "
                                                             "supported; supported are"),
        ("llama", table("config.json", num_hidden_layers=3), "lacks "
                                                             "model.layers.2.input_layernorm.weight "
                                                             "and 8 more"),
        ("llama", table("config.json", num_hidden_layers=1), "not describe: "
                                                             "model.layers.1.input_layernorm.weight"),
        ("llama", table("config.json", model_type="qwen3", architectures=None), "lacks .*self_attn.k_norm"),
        ("llama", cut, "model.safetensors is no whole safetensors file: .* lies outside of "
                       "the file"),
        ("llama", link("model.safetensors"), "it is a link, not a file, .* copy the files: cp -rL"),
        ("llama", weight(lambda w: w.update({UP: w[UP].to(torch.int8)})), f"{UP} is of torch.int8; weights are"),
        ("llama", weight(lambda w: w.update({UP: w[UP][:-1].clone()})), f"{UP} is 95×64 and should be 96×64"),
        ("llama", weight(lambda w: w.update({"lm_head.weight": torch.tensor(1.0)})), "lm_head.weight and mod"),
        ("llama-3", lost_shard, r"model-00002-of-0000\d.safetensors is missing: 1 of \d files "
                                r"that the index names"),
        ("llama-3", shard(lambda m: m.update({UP: "../x.safetensors"})), "no safetensors file of this folder"),
        ("llama-3", shard(lambda m: m.update({"more": m[UP]})), "more lies in model-0.*, "
                                                                "which does not hold it"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused_and_nothing_is_left(
    cli: Cli, copy: Callable[[str], Path], name: str, break_: Callable[[Path], None], message: str
) -> None:

    folder = copy(name)
    break_(folder)
    ended = begin(cli, folder)
    assert ended.code == 1
    assert re.search(message, ended.message), ended.message
    assert not Path("runs/b/config.yaml").exists() and not Path("runs/b/checkpoints").exists()
    planned = cli.raw("plan", "data=text", cli.paths[0], "train.seq_len=32", f"init={folder}")
    assert planned.code == 1 and planned.message == ended.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[UP].fill_(float("nan")), f"{UP} is not finite"),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(320, 64)}),
            "lm_head.weight and model.embed_tokens.weight",
        ),
    ],
)
def test_values_of_weights_are_looked_at_by_a_start_alone(
    cli: Cli,
    copy: Callable[[str], Path],
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    """A plan compares what headers say, so that it takes no longer for a large model."""
    folder = copy("llama")
    weight(change)(folder)
    assert message in begin(cli, folder).message
    assert not Path("runs/b/config.yaml").exists()
    assert cli.raw("plan", "data=text", cli.paths[0], f"init={folder}").code == 0


def test_a_plan_verifies_no_checkpoint(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=1").code == 0
    (stored,) = Path("runs/a/checkpoints").glob("*/weights.safetensors")
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(data)
    assert cli("run.name=b", "init=runs/a").code == 1
    assert cli("plan", "init=runs/a").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("model.width=64",),
            r"^model.width=64 contradicts init=runs/a, whose config.yaml makes it 32: leave it out$",
        ),
        (
            ("model.layers=3", "model.hidden=96"),
            r"model.layers=3, model.hidden=96 contradict .* has model.layers=2, model.hidden=64",
        ),
        (
            ("model=llama_tiny",),
            r"model=llama_tiny contradicts init=runs/a: model\..* brings its model: leave out model=…$",
        ),
        (
            ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300", "model.vocab_multiple=8"),
            r"model.vocab_multiple=8 contradicts .* makes it 64: leave it out$",
        ),
    ],
)
def test_a_plan_says_what_a_start_says_of_a_run_that_does_not_fit(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    cli.trained("run.name=a", "train.steps=1")
    started = cli("run.name=b", "init=runs/a", *arguments)
    planned = cli("plan", "init=runs/a", *arguments)
    assert (started.code, planned.code) == (1, 1)
    assert re.search(message, started.message), started.message
    assert planned.message == started.message


def test_another_model_than_the_runs_is_refused_before_any_data_are_read(cli: Cli) -> None:
    """So is one point of a sweep, before another point trains."""
    cli.trained("run.name=a", "train.steps=1")
    aside = ("data.cache_dir=cache", "init=runs/a", "train.steps=1")
    refused = cli("run.name=b", "model.layers=3", *aside)
    assert refused.code == 1 and "model.layers=3 contradicts init=runs/a" in refused.message
    swept = cli("-m", "run.name=s", "model.layers=2,3", *aside)
    assert swept.code == 1 and "the sweep is not started: model.layers=3" in swept.message
    assert not Path("cache").exists() and {path.name for path in Path("runs").iterdir()} == {"a"}
    assert cli("run.name=b", "model.rope_base=20000", "model.vocab_multiple=320", *aside).code == 0


def test_another_tokenizer_than_the_runs_is_refused_with_the_words_to_leave_out(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    bpe = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=400")
    said = cli("plan", "init=runs/a", *bpe).message
    assert "embed.weight is 320×32 there and 448×32 here" in said
    assert (
        "A run brings its model and its tokenizer: leave out model=… and data/tokenizer=…" in said
    )


def test_another_tokenizer_whose_ids_fit_is_a_warning(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    warning = "init=runs/a brings a tokenizer, and the command names one of another kind"
    bpe = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300")
    assert warning in cli("plan", "init=runs/a", *bpe).err
    assert warning not in cli("plan", "init=runs/a", "data/tokenizer=bytes").err
    assert warning not in cli("plan", "init=runs/a").err


def test_a_plan_counts_the_ids_of_the_tokenizer_that_a_run_has(cli: Cli) -> None:
    """A tokenizer that was trained on a short text has fewer ids than it may have; so have the
    weights.
    """
    bpe = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=40000", "data.tokenizer.sample=3000")
    assert cli("run.name=a", "train.steps=1", *bpe).code == 0
    planned = cli("plan", "init=runs/a", *bpe)
    assert planned.code == 0, planned.message
    assert cli("plan", *bpe).out != planned.out


def test_a_copy_of_a_tied_head_and_computed_frequencies_may_be_stored(
    cli: Cli, copy: Callable[[str], Path]
) -> None:
    folder = copy("llama")
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    weight(lambda w: w.update(more | {"lm_head.weight": w["model.embed_tokens.weight"].clone()}))(
        folder
    )
    assert begin(cli, folder, "train.steps=1").code == 0


def test_a_name_of_the_hub_is_no_folder(cli: Cli) -> None:
    ended = begin(cli, Path("meta-llama/Llama-3.2-1B"))
    assert ended.code == 1
    assert "hf download meta-llama/Llama-3.2-1B --local-dir FOLDER" in ended.message
