"""`fp4train sample` as people run it: its text and JSON, seeds, recipes, and what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Cli, Outcome, reseal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fp4train.cli import main
from fp4train.data.template import ChatTemplate
from fp4train.data.tokenizers import JsonTokenizer
from fp4train.exchange.dialogue import Dialogue
from fp4train.exchange.trained import load_trained

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{{ '~' if m['role'] == 'user' else 'END' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def sample(small_run: Path, capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str, run: Path = small_run) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["sample", str(run), *arguments])
        shown = capsys.readouterr()
        return Outcome(ended.value.code, shown.out, shown.err)

    return run


def test_it_writes_the_prompt_and_goes_on(sample) -> None:
    found = sample("prompt=the quick", "tokens=9", "seed=1")
    assert found.code == 0 and found.out.startswith("the quick") and found.out.endswith("\n")
    assert len(found.out.removeprefix("the quick")) > 1
    assert "at step 6 in NVFP4: " in found.err


def test_json_has_the_text_that_is_written(sample, small_run: Path) -> None:
    shown = sample("prompt=def f(", "tokens=9", "temperature=0")
    data = json.loads(sample("prompt=def f(", "tokens=9", "temperature=0", "--json").out)
    assert shown.out == f"{data['prompt']}{data['text']}\n"
    assert data["run"] == str(small_run) and data["step"] == 6 and len(data["ids"]) == 9


def test_nothing_is_written_into_the_run(sample, small_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in small_run.rglob("*")}
    assert sample("prompt=the", "tokens=2").code == 0
    assert {path: path.stat().st_mtime_ns for path in small_run.rglob("*")} == before


def test_a_question_is_asked_by_the_runs_template_and_its_answer_ends_where_that_ends_it(
    sample, small_run: Path, tmp_path: Path
) -> None:
    words = ("tokens=20", "seed=1")
    text = json.loads(sample("prompt=u:the~a:", *words, "--json").out)["text"]
    end = next(letter for letter in text[1:] if letter.isalpha())
    tuned = shutil.copytree(small_run, tmp_path / "tuned")
    ChatTemplate(source=TEMPLATE.replace("END", end)).save(tuned)
    answer = json.loads(sample("chat=the", *words, "--json", run=tuned).out)
    assert (answer["prompt"], answer["ended"]) == ("u:the~a:", True)
    assert answer["text"] == text.partition(end)[0]
    assert sample("chat=the", *words, run=tuned).out == answer["text"] + "\n"


def test_special_tokens_are_those_of_a_template_and_characters_of_a_prompt(
    sample, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama-3"], tmp_path / "folder")
    special = "<|end-of-text|>"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("END", special))
    chat = Dialogue.of(load_trained(folder))
    assert chat.encode(f"a{special}") == [97, 256] and 256 in chat.ends and not chat.spelt_end
    told = f"prompt= is text: {special} is read as its characters"
    assert told in sample(f"prompt=a{special}", "tokens=1", run=folder).err
    assert "is read as" not in sample("prompt=a", "tokens=1", run=folder).err
    told = f"chat= spells {special}, which is read as that token"
    assert told in sample(f"chat=a{special}", "tokens=1", run=folder).err


def test_an_answer_behind_which_nothing_stands_ends_where_the_next_question_begins() -> None:
    file = Tokenizer(WordLevel({"</s>": 0, "<user>": 1, "a": 2}, unk_token="a"))
    file.add_special_tokens(["</s>", "<user>"])
    tokenizer = JsonTokenizer(file.to_str(), end_of_document="</s>", what="a file")
    marked, spelt = (
        Dialogue(ChatTemplate(source=f"{{% for m in messages %}}{form}{{% endfor %}}"), tokenizer)
        for form in ("<{{ m.role }}>\n{{ m.content }}", "{{ m.role }}: {{ m.content }}\n")
    )
    assert (marked.ends, marked.spelt_end) == ([0, 1], "")
    assert (spelt.ends, spelt.spelt_end) == ([0], "user:")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("recipe=bf16", "bf16"), ("recipe=mxfp8", "mxfp8"), ("policy=all", "NVFP4")],
)
def test_any_recipe_and_policy_writes(sample, recipe: str, name: str) -> None:
    assert json.loads(sample("prompt=the", "tokens=2", recipe, "--json").out)["recipe"] == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "sample needs prompt=… or chat=…, one of them"),
        (["prompt=a", "chat=a"], "sample needs prompt=… or chat=…, one of them"),
        (["chat=a"], "has no chat template: it can only go on with a text"),
        (["prompt="], "the prompt is empty"),
        (["chat=h\udce9"], "what is asked is no UTF-8 text: "),
        (
            ["prompt=" + "x" * 40],
            "the prompt has 40 tokens, and with one more it exceeds the model's context of 32",
        ),
        (
            ["prompt=a", "recipe=nvfp5"],
            "recipe=nvfp5: there is no such recipe; did you mean 'nvfp4'?",
        ),
        (["prompt=a", "recipe=bf16,mxfp8"], "sample writes in one recipe, not in bf16, mxfp8"),
        (["prompt=a", "recpie=bf16"], "unknown key 'recpie'; did you mean 'recipe'?"),
        (["prompt=a", "step=5"], "has no checkpoint of step 5"),
        (["prompt=a", "tokens=0"], "tokens=0 must be at least 1"),
        (["prompt=a", "top_p=0"], "top_p=0.0 must be above 0 and at most 1"),
        (["prompt=a", "--jsn"], "sample knows no flag --jsn"),
    ],
)
def test_what_cannot_be_done_is_refused(sample, arguments: list[str], said: str) -> None:
    found = sample(*arguments)
    assert found.code == 1 and said in found.message


def test_a_run_that_is_not_there_is_named(sample, small_run: Path) -> None:
    assert (
        f"{small_run.parent} holds {small_run.name}"
        in sample("prompt=a", run=small_run.with_name("gone")).message
    )


def test_weights_that_are_not_finite_are_refused(sample, small_run: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(small_run, tmp_path / "broken"))
    reseal(
        broken / "checkpoints" / "step_00000006",
        lambda held: held["model/norm.weight"].__setitem__(0, torch.nan),
        lambda state: None,
    )
    assert "norm.weight is not finite" in sample("prompt=a", run=broken).message


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("bpe", marks=pytest.mark.long)])
def test_a_branch_on_token_files_writes_with_the_tokenizer_of_its_run(
    cli: Cli, tokenizer: str
) -> None:
    words = (f"data/tokenizer={tokenizer}", "data.tokenizer.vocab_size=300")
    cli.trained("run.name=a", "train.steps=1", *(words if tokenizer == "bpe" else ()))
    size = load_trained(Path("runs/a")).vocab_size
    (np.arange(4000) % size).astype(np.uint16).tofile("ids.bin")
    ids = ("data=tokens", "data.path=ids.bin", f"data.vocab_size={size}")
    assert cli("resume=runs/a", "run.name=b", "train.steps=2", *ids).code == 0
    written = cli.raw("sample", "runs/b", "prompt=the quick", "tokens=3")
    assert written.code == 0 and written.out.startswith("the quick")
    assert cli.raw("export", "runs/b", "to=hf", "out=model").code == 0
    assert cli("run.name=c", "train.steps=1", *ids).code == 0
    said = cli.raw("sample", "runs/c", "prompt=a").message
    assert said == "runs/c was trained on token files without a tokenizer: text cannot be encoded"
