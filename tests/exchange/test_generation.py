"""Generation: greedy tokens of the uncached forward pass, batches, seeds, the choice of tokens,
text in pieces.
"""

from pathlib import Path

import pytest
import torch
from tokenizer_kinds import KEEPS, TEXT, tokenizer

from fp4train.checkpoint import WeightSource
from fp4train.data.tokenizers import Bytes
from fp4train.errors import UserError
from fp4train.exchange import (
    NamedRecipe,
    Sampling,
    TextStream,
    TrainedModel,
    generate,
    load_trained,
)
from fp4train.precision import FP32, NVFP4, LayerPolicy

GREEDY = Sampling(tokens=12, temperature=0)
HIGH = NamedRecipe(name="fp32", recipe=FP32(), policy=None)
QUANTISED = NamedRecipe(name="nvfp4", recipe=NVFP4(), policy=LayerPolicy(last=0))


@pytest.fixture(scope="module")
def trained(small_run: Path) -> TrainedModel:
    return load_trained(small_run)


def written(
    trained: TrainedModel,
    prompts: list[bytes],
    sampling: Sampling = GREEDY,
    named: NamedRecipe = HIGH,
) -> list:
    rows = list(
        zip(
            *generate(trained, [*map(list, prompts)], sampling, named=named, ends=[256]),
            strict=True,
        )
    )
    return [[token for token in row if token is not None] for row in rows]


@torch.no_grad()
def test_greedy_tokens_are_those_of_the_whole_forward_pass(trained: TrainedModel) -> None:
    ids = list(b"the quick ")
    for token in written(trained, [b"the quick "])[0]:
        logits = trained.forward(HIGH, torch.tensor([ids]))[0, -1, : trained.vocab_size]
        assert token == int(logits.argmax())
        ids.append(token)


def test_a_batch_writes_what_each_prompt_does_alone(trained: TrainedModel) -> None:
    prompts = [b"the", b"a lazy dog in 4", b"over "]
    assert written(trained, prompts) == [written(trained, [each])[0] for each in prompts]


def test_a_seed_writes_the_same_text_and_another_seed_another(trained: TrainedModel) -> None:
    first, again, other = (
        written(trained, [b"a "], Sampling(tokens=16, seed=s)) for s in (3, 3, 4)
    )
    assert first == again != other


def test_the_first_sequence_draws_the_same_numbers_in_a_batch(trained: TrainedModel) -> None:
    sampling = Sampling(tokens=16, seed=3)
    assert written(trained, [b"a ", b"b "], sampling)[0] == written(trained, [b"a "], sampling)[0]


def test_quantised_generation_is_that_of_quantised_logits(trained: TrainedModel) -> None:
    """The prompt is one call with and without a cache, so its next token is the same in a quantised
    recipe too.
    """
    logits = trained.forward(QUANTISED, torch.tensor([list(b"the quick ")]))[
        0, -1, : trained.vocab_size
    ]
    assert written(trained, [b"the quick "], named=QUANTISED)[0][0] == int(logits.argmax())
    assert not torch.equal(
        logits, trained.forward(HIGH, torch.tensor([list(b"the quick ")]))[0, -1, : len(logits)]
    )


def test_generation_ends_where_the_context_is_full(trained: TrainedModel) -> None:
    assert len(written(trained, [b"x" * 30], Sampling(tokens=100, temperature=0))[0]) == 2


def test_generation_ends_with_a_token_that_ends(trained: TrainedModel) -> None:
    (first,) = written(trained, [b"the "])
    end = first[3]
    found = [row[0] for row in generate(trained, [list(b"the ")], GREEDY, named=HIGH, ends=[end])]
    assert found == first[: first.index(end) + 1]


def test_a_sequence_that_stops_leaves_its_neighbours(trained: TrainedModel) -> None:
    prompts = [list(b"the "), list(b"over ")]
    rows = list(
        zip(
            *generate(trained, prompts, GREEDY, named=HIGH, ends=[], stops=lambda row: row == 0),
            strict=True,
        )
    )
    assert [sum(token is not None for token in row) for row in rows] == [1, 12]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [(b"", "the prompt is empty"), (b"x" * 32, "exceeds the model's context of 32")],
)
def test_prompts_that_cannot_be_run_are_refused(
    trained: TrainedModel, prompt: bytes, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        written(trained, [b"the ", prompt])


def test_logits_that_are_not_finite_are_refused(small_run: Path) -> None:
    broken = load_trained(small_run)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    with pytest.raises(UserError, match="gives logits that are not finite in fp32"):
        written(broken, [b"the "])


def shares(sampling: Sampling, logits: list[float]) -> list[float]:
    draws = torch.Generator().manual_seed(0)
    found = torch.tensor([sampling.draw(torch.tensor(logits), draws) for _ in range(2000)])
    return [round(float((found == token).float().mean()), 1) for token in range(len(logits))]


@pytest.mark.long
def test_tokens_are_chosen_with_their_probabilities() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log().tolist()
    assert shares(Sampling(), logits) == [0.1, 0.6, 0.3]
    assert shares(Sampling(temperature=0), logits) == [0, 1, 0]
    assert shares(Sampling(top_k=2), logits) == [0, 0.7, 0.3]
    assert shares(Sampling(top_p=0.5), logits) == [0, 1, 0]
    assert shares(Sampling(top_p=0.7), logits) == [0, 0.7, 0.3]
    assert shares(Sampling(temperature=0.5), logits) == [0.0, 0.8, 0.2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"seed": -1},
    ],
)
def test_settings_out_of_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_characters_appear_when_they_are_complete() -> None:
    stream = TextStream(Bytes())
    pieces = [stream.add(byte) for byte in "né→!".encode()]
    assert pieces == ["n", "", "é", "", "", "→", "!"] and stream.end() == ""
    assert [stream.add(byte) for byte in "→".encode()[:2]] == ["", ""]
    assert stream.end() == "\ufffd" and stream.text == "né→!\ufffd"


@pytest.mark.parametrize("kind", KEEPS)
def test_prompt_and_text_together_are_the_text(kind: str) -> None:
    """▁ before the first new token is a space, not the beginning of a text."""
    text = TEXT[:1500] + " 漢字 😀 end"
    ids = tokenizer(kind).encode(text)
    for cut in (1, 9, len(ids) - 30):
        prompt = tokenizer(kind).decode(ids[:cut])
        stream = TextStream(tokenizer(kind), ids[:cut])
        shown = "".join(stream.add(token) for token in ids[cut:]) + stream.end()
        assert prompt + shown == text and stream.text == shown


def test_a_folder_of_hugging_face_writes_what_the_run_does(small_run: Path, tmp_path: Path) -> None:
    from fp4train.exchange import export_huggingface

    export_huggingface(small_run, tmp_path / "folder")
    folder = load_trained(tmp_path / "folder")
    run = load_trained(small_run)
    for named in (HIGH, QUANTISED):
        assert written(folder, [b"the quick "], named=named) == written(
            run, [b"the quick "], named=named
        )
    assert (
        folder.title == str(tmp_path / "folder") and folder.own.name == "high precision (bfloat16)"
    )
    with pytest.raises(UserError, match="is a Hugging Face folder and no run: leave out step="):
        load_trained(WeightSource(path=tmp_path / "folder", step=3))
