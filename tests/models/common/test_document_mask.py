"""Attention within documents: packed documents have the logits and gradients of separate forward
passes.
"""

import pytest
import torch
from torch import Tensor

import fp4train as f4
from fp4train.models.common import document_mask
from fp4train.models.llama import Llama, LlamaModel
from fp4train.precision import FP32, autocast

END = 59
LENGTHS = (5, 1, 9, 3)


def model(**changes: object) -> LlamaModel:
    torch.manual_seed(0)
    shape = {"width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 48, **changes}
    converted = f4.convert(Llama(**shape).build(vocab_size=60, seq_len=sum(LENGTHS)))  # type: ignore[arg-type]
    assert isinstance(converted, LlamaModel)
    return converted


def documents() -> list[Tensor]:
    """Sequences [2, length], each of which ends a document."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randint(0, END, (2, length), generator=draw) for length in LENGTHS]
    for each in made:
        each[:, -1] = END
    return made


def test_a_token_attends_to_its_own_document_up_to_itself() -> None:
    mask = document_mask(torch.tensor([[1, END, 2, 3, END, END, 4]]) == END)[0, 0]
    seen = [torch.nonzero(row).flatten().tolist() for row in mask]
    assert seen == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5], [6]]


def test_the_id_that_begins_a_document_belongs_to_it() -> None:
    begin = 58
    tokens = torch.tensor([[1, begin, 2, 3, begin, begin, 4]])
    seen = [
        torch.nonzero(row).flatten().tolist() for row in document_mask(None, tokens == begin)[0, 0]
    ]
    assert seen == [[0], [1], [1, 2], [1, 2, 3], [4], [5], [5, 6]]
    both = torch.tensor([[begin, 2, END, begin, 3, END, 4]])
    assert torch.equal(document_mask(both == END, both == begin), document_mask(both == END))


def test_packed_documents_that_an_id_begins_are_separate_ones() -> None:
    begun = [torch.cat((each[:, -1:], each[:, :-1]), dim=1) for each in documents()]
    apart = model()
    packed = model()
    packed.begins = END
    with autocast(FP32()):
        expected = torch.cat([apart(each) for each in begun], dim=1)
        torch.testing.assert_close(packed(torch.cat(begun, dim=1)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recomputed", [False, True])
def test_packed_documents_are_separate_ones(recomputed: bool) -> None:
    apart = model()
    packed = model(recompute=recomputed)
    packed.documents = END
    with autocast(FP32()):
        expected = torch.cat([apart(each) for each in documents()], dim=1)
        found = packed(torch.cat(documents(), dim=1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for logits in (expected, found):
        logits.square().mean().backward()
    for a, b in zip(apart.parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_ends_that_come_as_complements_end_no_document() -> None:
    """Turns of a conversation that end with the end of a document attend to each other."""
    apart = model()
    packed = model()
    packed.documents = END
    made = documents()
    for document in made:
        document[:, : document.shape[1] // 2] = END
    marked = [document.clone() for document in made]
    for document in marked:
        document[:, :-1] = torch.where(document[:, :-1] == END, ~document[:, :-1], document[:, :-1])
    with autocast(FP32()):
        expected = torch.cat([apart(document) for document in made], dim=1)
        found = packed(torch.cat(marked, dim=1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_without_the_mask_documents_see_each_other() -> None:
    plain = model()
    with autocast(FP32()):
        apart = torch.cat([plain(each) for each in documents()], dim=1)
        assert not torch.allclose(plain(torch.cat(documents(), dim=1)), apart, atol=1e-3)
