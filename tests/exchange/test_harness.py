"""lm_eval on a trained model: its own Hugging Face class gives the same answers; tasks from local
files.
"""

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fp4train.data.template import ChatTemplate
from fp4train.errors import UserError
from fp4train.exchange import NamedRecipe, TrainedModel, load_trained
from fp4train.exchange.dialogue import Dialogue
from fp4train.models.families import family_of
from fp4train.precision import FP32, NVFP4, LayerPolicy

HIGH = NamedRecipe(name="fp32", recipe=FP32(), policy=None)
QUANTISED = NamedRecipe(name="nvfp4", recipe=NVFP4(), policy=LayerPolicy(last=0))
LONG = "the quick brown fox jumps over a lazy dog in 4 bits or 8 bits, and then the fox sleeps"


@pytest.fixture(scope="module")
def trained(small_run: Path) -> TrainedModel:
    return load_trained(small_run)


@pytest.fixture(scope="module")
def ours(trained: TrainedModel, lm_eval: ModuleType) -> Any:
    from fp4train.exchange.harness import HarnessModel

    return HarnessModel(trained, HIGH, rows=4)


@pytest.fixture(scope="module")
def theirs(trained: TrainedModel, lm_eval: ModuleType) -> Any:
    """`HFLM` on a model of transformers with the same weights in float32, and byte tokens."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    family = family_of(trained.config.model)
    shape = trained.config.model
    config = LlamaConfig(
        **family.config_of(shape, vocab_size=trained.model.vocab_size, seq_len=trained.context)
    )
    names = family.names_of(shape)
    state = trained.model.state_dict()
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict(
        {names[name]: state[name] for name in names if name in state}, strict=False
    )
    spelt = sorted(ByteLevel.alphabet(), key=lambda c: _byte(c))
    vocabulary = {character: number for number, character in enumerate(spelt)} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    return HFLM(
        pretrained=model, tokenizer=fast, max_length=trained.context, batch_size=1, device="cpu"
    )


def _byte(character: str) -> int:
    from tokenizers import decoders

    found = [
        b for b in range(256) if decoders.ByteLevel().decode([character]).encode() == bytes([b])
    ]
    return found[0] if found else 256


def asked(kind: str, *arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


PAIRS = [
    ("the quick", " brown"),
    ("", "fox"),
    ("a ", "lazy dog"),
    (LONG, " and a dog"),
    ("in 4", " bits"),
    ("in 4", " 8"),
]


def test_log_likelihoods_are_those_of_the_harness_on_transformers(ours: Any, theirs: Any) -> None:
    requests = [asked("loglikelihood", *pair) for pair in PAIRS]
    mine = ours.loglikelihood(requests, disable_tqdm=True)
    other = theirs.loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    torch.testing.assert_close(
        *(torch.tensor([total for total, _ in each]) for each in (mine, other)), rtol=0, atol=1e-4
    )


def test_rolling_log_likelihoods_are_those_of_the_harness_on_transformers(
    ours: Any, theirs: Any
) -> None:
    requests = [asked("loglikelihood_rolling", text) for text in (LONG, "fox", LONG * 2)]
    mine, other = (
        model.loglikelihood_rolling(requests, disable_tqdm=True) for model in (ours, theirs)
    )
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=0, atol=2e-4)


def test_generated_texts_are_those_of_the_harness_on_transformers(ours: Any, theirs: Any) -> None:
    settings = {"until": ["\n", "zz"], "max_gen_toks": 10, "do_sample": False}
    requests = [asked("generate_until", text, settings) for text in ("the quick", LONG, "a")]
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


def test_generation_ends_before_the_word_that_stops_it(ours: Any) -> None:
    (whole,) = ours.generate_until(
        [asked("generate_until", "the ", {"until": [], "max_gen_toks": 10})]
    )
    word = whole[4:6]
    (found,) = ours.generate_until(
        [asked("generate_until", "the ", {"until": [word], "max_gen_toks": 10})]
    )
    assert found == whole[: whole.index(word)]


def test_requests_that_do_not_fit_are_refused(ours: Any) -> None:
    with pytest.raises(UserError, match=r"has 33 tokens, more than the model's context of 32"):
        ours.loglikelihood([asked("loglikelihood", "a", "x" * 33)], disable_tqdm=True)
    with pytest.raises(
        UserError, match=r"generates up to 256 tokens, which leave no room for a prompt"
    ):
        ours.generate_until([asked("generate_until", "a", {"until": ["\n"]})])


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_eval: ModuleType) -> list[str]:
    """Two tasks whose documents lie beside them: what a text costs, and which answer follows a
    question.
    """
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_tasks(tmp_path)
    return [str(tmp_path / name) for name in ("rolling.yaml", "choice.yaml")]


def write_tasks(folder: Path) -> None:
    documents = {
        "rolling": [{"text": LONG}, {"text": "a lazy dog"}],
        "choice": [
            {"q": f"the {each}", "a": [" fox", " 7é"], "gold": 0}
            for each in ("quick", "brown", "lazy")
        ],
    }
    says = {
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: "
        "'{{text}}'\n"
        "metric_list:\n  - metric: bits_per_byte\n",
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: "
        "'{{a}}'\ndoc_to_target: gold\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n",
    }
    for name, each in documents.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(document) + "\n" for document in each)
        )
        data = (
            "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
            f"{folder}/{name}.jsonl\ntest_split: test\n"
        )
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{says[name]}")


@pytest.mark.filterwarnings("ignore")  # of datasets and multiprocess, as they read a file
def test_tasks_from_local_files_in_two_recipes(trained: TrainedModel, local: list[str]) -> None:
    from fp4train.exchange import log_likelihoods
    from fp4train.exchange.evaluation import windows
    from fp4train.exchange.harness import tasks

    found = {(s.task, s.recipe): s.values for s in tasks(trained, [HIGH, QUANTISED], local, rows=4)}
    assert set(found) == {
        (task, named.name) for task in ("rolling", "choice") for named in (HIGH, QUANTISED)
    }
    texts = (LONG, "a lazy dog")
    parts = [
        each
        for t in texts
        for each in windows(list(t.encode()), trained.text_tokenizer(), trained.context)
    ]
    bits = (
        -sum(total for total, _ in log_likelihoods(trained, HIGH, parts, 4))
        / torch.tensor(2.0).log().item()
    )
    size = sum(len(text.encode()) for text in texts)
    assert found["rolling", "fp32"]["bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)
    assert found["rolling", "nvfp4"]["bits_per_byte"] != found["rolling", "fp32"]["bits_per_byte"]
    assert found["choice", "fp32"]["acc"] == 1.0 and found["choice", "fp32"]["documents"] == 3


@pytest.mark.filterwarnings("ignore")
def test_questions_are_asked_in_the_template_of_the_run(
    small_run: Path, theirs: Any, local: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp4train.exchange.harness import HarnessModel, tasks

    source = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}~{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    tuned = shutil.copytree(small_run, tmp_path / "tuned")
    ChatTemplate(source=source).save(tuned)
    trained = load_trained(tuned)
    model = HarnessModel(trained, HIGH, 4, Dialogue.of(trained))
    monkeypatch.setattr(theirs.tokenizer, "chat_template", source)
    history = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It"}]
    for more in (True, False):
        text = model.apply_chat_template(history, add_generation_prompt=more)
        assert text == theirs.apply_chat_template(history, add_generation_prompt=more)
    asked: list[str] = []
    encode = Dialogue.encode
    monkeypatch.setattr(
        Dialogue, "encode", lambda chat, text: asked.append(text) or encode(chat, text)
    )
    (score,) = tasks(trained, [HIGH], local[1:], rows=4, limit=1, chat=True)
    assert score.task == "choice (chat)"
    assert asked[0].startswith("u") and "~a" in asked[0]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_tasks_that_are_not_there_are_refused(
    trained: TrainedModel, local: list[str], tmp_path: Path
) -> None:
    from fp4train.exchange.harness import tasks

    with pytest.raises(
        UserError, match=r"task=hellaswagg: lm_eval has no such task; did you mean 'hellaswag'\?"
    ):
        next(tasks(trained, [HIGH], ["hellaswagg"], rows=4))
    with pytest.raises(UserError, match=r"gone\.yaml does not exist"):
        next(tasks(trained, [HIGH], [str(tmp_path / "gone.yaml")], rows=4))
    with pytest.raises(UserError, match=r"^task=s3://b/a\.yaml: s3:// is no path here"):
        next(tasks(trained, [HIGH], ["s3://b/a.yaml"], rows=4))
    (tmp_path / "choice.jsonl").unlink()
    with pytest.raises(UserError, match=r"task=.*choice\.yaml: "):
        next(tasks(trained, [HIGH], local[1:], rows=4))
    (tmp_path / "broken.yaml").write_text("task: [\n")
    with pytest.raises(UserError, match=r"task=.*broken\.yaml: ParserError: "):
        next(tasks(trained, [HIGH], [str(tmp_path / "broken.yaml")], rows=4))
