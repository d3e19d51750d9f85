"""Tensors without memory of their own are refused, with what to pass instead; subclasses with
memory work.
"""

import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from fp4train.quantize import PairQuantizer, QuantSpec, quantize, quantize_dequantize, quantizer

NVFP4 = QuantSpec()
CALLS: dict[str, Callable[[Tensor], object]] = {
    "quantize": lambda x: quantize(x, NVFP4),
    "quantize_dequantize": lambda x: quantize_dequantize(x, NVFP4),
    "the reference": lambda x: quantize(x, NVFP4, kernel="reference"),
    "codes": lambda x: quantizer(NVFP4, "cpu").codes(x),
    "values": lambda x: quantizer(NVFP4, "cpu").values(x),
    "both": lambda x: PairQuantizer(
        quantizer(NVFP4, "cpu"), quantizer(NVFP4, "cpu"), row_codes=False, column_codes=True
    )(x),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(call: Callable[[Tensor], object], x: Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call(x)


@each_call
@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_is_refused_and_its_shard_named(call: Callable[[Tensor], object]) -> None:
    x = distribute_tensor(torch.randn(32, 32), init_device_mesh("cpu", (1,)), [Replicate()])
    refused(call, x, "x is a DTensor, which holds a local shard only: pass x.to_local()")
    call(x.to_local())


@each_call
def test_a_fake_tensor_is_refused_and_the_layer_named(call: Callable[[Tensor], object]) -> None:
    with FakeTensorMode():
        x = torch.empty(32, 32)
    refused(call, x, "x is a FakeTensor, which has a shape and no values")


@each_call
@pytest.mark.parametrize("make", [lambda x: x, torch.nn.Parameter], ids=["Tensor", "Parameter"])
def test_a_meta_tensor_is_refused(
    make: Callable[[Tensor], Tensor], call: Callable[[Tensor], object]
) -> None:
    refused(
        call,
        make(torch.empty(32, 32, device="meta")),
        "x is on the meta device, where tensors have no values",
    )


@each_call
def test_other_wrappers_are_refused(call: Callable[[Tensor], object]) -> None:
    x = TwoTensor(torch.randn(32, 32), torch.randn(32, 32))
    refused(call, x, "x is a TwoTensor, a tensor subclass without memory of its own")


def test_a_wrapper_under_a_fake_mode_does_not_reach_memory() -> None:
    """A real x whose outputs would be fake: an error, not a write to address 0."""
    x = torch.randn(32, 32)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises((UserWarning, ValueError, TypeError)),
    ):
        quantizer(NVFP4, "cpu").values(x)


class Named(Tensor):
    """A subclass with its own memory."""


@pytest.mark.parametrize(
    "kind", [torch.nn.Parameter, lambda x: x.as_subclass(Named)], ids=["Parameter", "subclass"]
)
def test_parameters_and_subclasses_with_memory_give_plain_tensors(
    kind: Callable[[Tensor], Tensor],
) -> None:
    x = torch.randn(32, 32)
    for kernel in ("auto", "reference"):
        q = quantize(kind(x), NVFP4, kernel=kernel)
        expected = quantize(x, NVFP4, kernel="reference")
        assert type(q.codes) is Tensor and not q.codes.requires_grad
        assert torch.equal(q.codes, expected.codes)
        strided = quantize_dequantize(kind(x)[:, ::2], NVFP4, kernel=kernel).values
        assert type(strided) is Tensor and not strided.requires_grad


def test_a_view_that_negates_lazily_is_read_with_its_sign() -> None:
    x = torch.complex(torch.zeros(16, 32), torch.randn(16, 32)).conj().imag
    assert x.is_neg()
    assert torch.equal(quantize(x, NVFP4).codes, quantize(x.clone().resolve_neg(), NVFP4).codes)
