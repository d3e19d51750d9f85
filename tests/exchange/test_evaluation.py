"""Loss and bits per byte: the run's own validation loss, bytes by the tokenizer, windows, batches
by length.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import lines
from tokenizer_kinds import TEXT, tokenizer

from fp4train.data import Piece, token_bytes
from fp4train.data.tokenizers import BytePairs, Bytes
from fp4train.errors import UserError
from fp4train.exchange import NamedRecipe, TrainedModel, held_out, load_trained, log_likelihoods
from fp4train.exchange.evaluation import texts, windows
from fp4train.precision import FP32, NVFP4, LayerPolicy

HIGH = NamedRecipe(name="fp32", recipe=FP32(), policy=None)
QUANTISED = NamedRecipe(name="nvfp4", recipe=NVFP4(), policy=LayerPolicy(last=0))


@pytest.fixture(scope="module")
def trained(small_run: Path) -> TrainedModel:
    return load_trained(small_run)


def test_held_out_text_gives_the_validation_loss_of_the_run_to_the_bit(
    trained: TrainedModel, small_run: Path
) -> None:
    logged = [line for line in lines(small_run) if "val/loss" in line][-1]
    last = NamedRecipe(
        name="last", recipe=NVFP4().with_high_precision("fprop"), policy=trained.config.policy
    )
    high, own = held_out(trained, [trained.high_precision, last], trained.config.eval.batches)
    assert (high.values["loss"], own.values["loss"]) == (
        logged["val/loss"],
        logged["val/loss_recipe"],
    )
    assert high.values["bits_per_byte"] == pytest.approx(
        high.values["loss"] / math.log(2), rel=1e-12
    )
    assert high.values["bytes"] == high.values["tokens"] == 4 * 32


def test_a_quantised_forward_pass_has_another_loss(trained: TrainedModel) -> None:
    high, quantised = (
        score.values["loss"]
        for score in held_out(trained, [trained.high_precision, QUANTISED], None)
    )
    assert high != quantised and abs(high - quantised) < 0.1


def test_the_recipe_of_a_run_is_that_of_its_last_quantised_forward_pass(
    trained: TrainedModel,
) -> None:
    """The run ends in a cooldown with the forward pass in BF16."""
    assert trained.step == 6 and trained.own.name == "NVFP4"


@torch.no_grad()
def test_log_likelihoods_are_sums_over_the_logits(trained: TrainedModel) -> None:
    tokens = list(b"the quick brown fox")
    logits = trained.forward(HIGH, torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
    each = [float(logits[place, token]) for place, token in enumerate(tokens[1:])]
    (all_of_them, _), (three, _) = log_likelihoods(
        trained, HIGH, [(tokens, 18), (tokens, 3)], rows=4
    )
    assert all_of_them == pytest.approx(sum(each), abs=1e-4) and three == pytest.approx(
        sum(each[-3:]), abs=1e-4
    )


def test_batches_of_equal_length_answer_as_each_request_alone(trained: TrainedModel) -> None:
    requests = [
        (list(text), 3)
        for text in (b"a lazy dog", b"over a fox", b"the dog", b"in 4", b"or 8 bit", b"lazy")
    ]
    alone = [log_likelihoods(trained, HIGH, [each], rows=1)[0] for each in requests]
    for rows in (2, 16):
        for found, one in zip(log_likelihoods(trained, HIGH, requests, rows), alone, strict=True):
            assert found == (pytest.approx(one[0], abs=1e-5), one[1])


def test_the_most_likely_tokens_are_told(trained: TrainedModel) -> None:
    tokens = list(b"the ")
    best = int(trained.forward(HIGH, torch.tensor([tokens]))[0, -1].argmax())
    found = log_likelihoods(
        trained, HIGH, [([*tokens, best], 1), ([*tokens, (best + 1) % 257], 1), (tokens, 0)], rows=1
    )
    assert [greedy for _, greedy in found] == [True, False, True] and found[2][0] == 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 30])
def test_windows_score_each_token_once_with_all_the_context_there_is(length: int) -> None:
    text = list(range(length))
    scored = [token for tokens, count in windows(text, Bytes(), 8) for token in tokens[-count:]]
    assert scored == text
    assert all(
        len(tokens) <= 9 and count < len(tokens) for tokens, count in windows(text, Bytes(), 8)
    )
    assert next(windows(text, Bytes(), 8))[0][0] == Bytes().end_of_document


def test_windows_are_those_of_the_harness(lm_eval: Any) -> None:
    text = list(range(29))
    utils = lm_eval.utils
    theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(text, 256, 8, 1))
    assert [([*context, *ids], len(ids)) for context, ids in theirs] == list(
        windows(text, Bytes(), 8)
    )


def test_texts_are_scored_file_by_file(trained: TrainedModel, tmp_path: Path) -> None:
    for name, text in (
        ("a.txt", "the quick brown fox jumps over a lazy dog in 4 bits\n"),
        ("b.md", "é"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    both, first, second = (
        next(texts(trained, [HIGH], str(place), 4)).values
        for place in (tmp_path, tmp_path / "a.txt", tmp_path / "b.md")
    )
    assert (first["tokens"], second["tokens"], both["bytes"]) == (52, 2, 54)
    total = first["loss"] * 52 + second["loss"] * 2
    assert both["loss"] * 54 == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(
    ("content", "said"), [("", "is empty"), ("\ufeff", "holds no text"), ("a\0b", "NUL")]
)
def test_files_without_text_are_refused(
    trained: TrainedModel, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        next(texts(trained, [HIGH], str(tmp_path / "a.txt"), 4))


@pytest.mark.parametrize("kind", ["prepend", "first", "byte level"])
def test_a_long_text_is_scored_in_the_ids_of_the_whole(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The pieces of a file have no space before their first words."""
    text = TEXT * 8
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    scored: list[int] = []

    def forward(model: Any, recipe: Any, requests: list[Any], rows: int) -> list[Any]:
        for ids, count in requests:
            scored.extend(ids[-count:])
        return [(-1.0, True)] * len(requests)

    monkeypatch.setattr(TrainedModel, "text_tokenizer", lambda model: tokenizer(kind))
    monkeypatch.setattr("fp4train.exchange.evaluation.log_likelihoods", forward)
    larger = replace(trained, vocab_size=2000)
    score = next(texts(larger, [HIGH], str(tmp_path / "a.txt"), 4))
    assert scored == tokenizer(kind).encode(text)
    assert score.values["tokens"] == len(scored)


WORDS = "the café, naïve 日本 → 🎉 and\n\tthe other\n" * 3


def test_a_trained_tokenizer_counts_the_bytes_of_its_tokens(tmp_path: Path) -> None:
    tokenizer = BytePairs(vocab_size=300).build(lambda: iter([Piece(WORDS)]), tmp_path)
    table = token_bytes(tokenizer, tokenizer.vocab_size)
    assert table is not None
    for text in (WORDS, "🎉", "new words: ß", "<|endoftext|>"):
        assert table[tokenizer.encode(text)].sum() == len(text.encode())
    assert table[tokenizer.end_of_document] == 0


def test_bytes_count_themselves_and_token_files_count_nothing() -> None:
    table = token_bytes(Bytes(), 257)
    assert (
        table is not None
        and table[Bytes().encode(WORDS)].sum() == len(WORDS.encode())
        and table[256] == 0
    )
    assert token_bytes(None, 300) is None


def test_a_tokenizer_of_a_plugin_is_asked_for_the_text_of_each_token() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return ["é", "a", "bc"].index(text) and [1]

        def decode(self, ids: list[int]) -> str:
            return "".join(("é", "a", "bc", "")[each] for each in ids)

    table = token_bytes(Letters(), 4)  # type: ignore[arg-type]
    assert table is not None and table.tolist() == [2, 1, 2, 0]
