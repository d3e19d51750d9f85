"""What a layer can take of a weight that was gathered, without ranks."""

from types import SimpleNamespace

import torch

from fp4train.nn import Gathered, Linear
from fp4train.nn.executors.whole_layer import ValuesFunction
from fp4train.parallel.gather import WeightGather
from fp4train.parallel.gather_items import GatherItem, SentTensors


def test_a_weight_that_came_rounded_is_whole_without_another_gather() -> None:
    """As a backend that runs whole layers takes it; its group is None, so a collective would
    fail.
    """
    layer = Linear(8, 4)
    record = SimpleNamespace(_orig_size=layer.weight.shape)
    gather = WeightGather(layer, record, None, "bf16")  # type: ignore[arg-type]
    rounded = layer.weight.detach().bfloat16()
    gather._received = {GatherItem(None, dtype=torch.bfloat16): SentTensors((rounded,))}
    whole = Gathered(gather, layer.weight.shape, rounded.device)
    assert torch.equal(whole.view(4, 8).clone(), rounded.float())
    kept = ValuesFunction.apply(whole.requires_grad_(), [], True)  # type: ignore[no-untyped-call]
    assert kept.dtype == torch.bfloat16 and kept.data_ptr() == rounded.data_ptr(), "no copy"
    (gradient,) = torch.autograd.grad(kept, whole, torch.ones_like(kept))
    assert gradient.dtype == torch.float32
