"""FSDP's all-gather of weights as codes and scales, quantised from the shards of the float32
master.

Before the first forward pass with constant weights the amaxes of all are joined in one all-reduce
(`begin`), over the shards and over the tensor-parallel ranks that hold the rest of the weights.
Each rank then quantises its rows with the amax of the whole weight, and FSDP gathers codes and
scales: for forward what fprop multiplies, for backward what dgrad does. The codes of the shards
together are the codes of the whole weight, so training equals that of one rank in every bit. What
is sent of a weight `precision.gather.wire_form` says.

FSDP2 asks a shard for what it sends (`fsdp_pre_all_gather`) and hands over what arrived
(`fsdp_post_all_gather`). The two methods are set on the plain tensor that is the shard: optimizer,
norm and checkpoints see no tensor subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from fp4train.nn.call import LayerCall
from fp4train.nn.gathered import Gathered
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks
from fp4train.parallel.gather_amaxes import FUSED, GatherAmaxes
from fp4train.parallel.gather_items import (
    MASTER,
    GatherItem,
    ReceivedWeight,
    SentTensors,
    codes_of_group,
    codes_of_shard,
)
from fp4train.parallel.world import SHARD, World
from fp4train.precision.context import backward_pass, current, state
from fp4train.precision.gather import wire_form
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import Quantized
from fp4train.quantize.sharded import joined

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class WeightGather(ReceivedWeight):
    """The gathers of one weight [N, K] whose rows are cut over `ranks`, or of a group [E, N, K] of
    which each has whole weights, so that they are quantised there as one rank quantises them.

    Under tensor parallelism the weight is this rank's part of the layer's.

    Args:
        layer: the layer that multiplies it.
        parameter: FSDP's record of the weight.
        mode: "recipe" or "bf16".
    """

    def __init__(self, layer: PlannedLayer, parameter: Any, ranks: Ranks, mode: str) -> None:
        self.layer = layer
        self.parameter = parameter
        self.ranks = ranks
        self.mode = mode
        self.members = layer.layer.experts
        self.shape: torch.Size = parameter._orig_size
        self.amaxes = GatherAmaxes(layer, ranks)
        self.forward: tuple[GatherItem, ...] = (MASTER,)
        """Items of the next forward pass."""
        self.backward: tuple[GatherItem, ...] = (MASTER,)
        """Items of the backward pass of the last forward pass."""
        self.rounds = mode == "bf16"
        """Whether the values that are sent stand for the master's."""
        self._made: dict[GatherItem, SentTensors] = {}
        self._sent_in: ConstantWeights | None = None
        self._received: dict[GatherItem, SentTensors] = {}
        self._received_in: ConstantWeights | None = None
        self._layout: list[tuple[int, torch.dtype]] = []
        self._repeats = False

    @property
    def shard(self) -> Tensor:
        """This rank's rows of the float32 master."""
        shard: Tensor = self.parameter._sharded_local_tensor
        return shard

    # -- before a forward pass ---------------------------------------------------------------------

    def begin(
        self, plan: LayerPlan | None, constant: ConstantWeights | None, training: bool
    ) -> None:
        """Choose what the coming gathers send.

        Args:
            plan: the layer's plan; None: nothing is known, and the master is sent.
            constant: that of the context; None: nothing may be kept.
            training: whether a backward pass will follow.
        """
        shard = self.shard
        # at first, or where another tensor became the shard
        if not hasattr(shard, "fsdp_pre_all_gather"):
            shard.fsdp_pre_all_gather = self.send  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = self.receive  # type: ignore[attr-defined]
            self.parameter._init_extensions()
        if self.amaxes.begin(constant):
            self._made.clear()
        forward, backward = self._parts(plan, constant is not None)
        self.forward = forward
        if training:
            if self._repeats:
                self.backward = (*backward, *(item for item in forward if item not in backward))
            else:
                self.backward = backward

    def _parts(
        self, plan: LayerPlan | None, keeps: bool
    ) -> tuple[tuple[GatherItem, ...], tuple[GatherItem, ...]]:
        """The items of forward and of backward."""
        self.amaxes.shared = None
        if plan is None:
            return (MASTER,), (MASTER,)
        way = wire_form(plan, self.ranks.size * plan.layer.sources, self.mode)
        self.rounds = way.rounds or self.mode == "bf16"
        if not self.rounds and keeps:
            self.amaxes.shared = plan.shared_spec
        if way.coded and not keeps:
            return (MASTER,), (MASTER,)
        values = (GatherItem(None, dtype=way.dtype),)
        return (
            values if way.forward is None else (GatherItem(way.forward),),
            values if way.backward is None else (GatherItem(way.backward),),
        )

    # -- FSDP's gather -----------------------------------------------------------------------------

    def send(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], dict[GatherItem, SentTensors]]:
        """The tensors that this rank sends, and its items with their tensors."""
        if backward_pass() == -1:
            items = self.forward
            if state().replay.records:
                # What is recomputed in backward needs there what forward needs. Each rank sends
                # it along, also where no token of its own reaches an expert.
                self.backward += tuple(item for item in items if item not in self.backward)
        else:
            items = self.backward
        sent = {item: self._make(item) for item in map(self._known, items)}
        tensors = tuple(tensor for item in sent.values() for tensor in item.tensors)
        layout = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if layout != self._layout:
            self._layout = layout
            self.parameter.all_gather_outputs = []
        self._sent_in = self.amaxes.constant
        return tensors, sent

    def receive(
        self,
        arrived: tuple[Tensor, ...],
        sent: dict[GatherItem, SentTensors],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Take the tensors of all ranks."""
        tensors = iter(arrived)
        self._received = {
            item: sent_tensors._replace(tensors=tuple(next(tensors) for _ in sent_tensors.tensors))
            for item, sent_tensors in sent.items()
        }
        self._received_in = self._sent_in
        if out is not None:
            return None
        return (Gathered(self, self.shape, arrived[0].device), ())

    def _known(self, item: GatherItem) -> GatherItem:
        """`item`, or the master if an amax would be needed that is not known."""
        key = self.amaxes.key(item, self.shard)
        if key is None or key in self.amaxes.known:
            return item
        return MASTER

    def _make(self, item: GatherItem) -> SentTensors:
        shard = self.shard
        if item.spec is None:
            assert item.dtype is not None
            return SentTensors((shard.to(item.dtype),))
        if item not in self._made:
            if self.members:
                self._made[item] = codes_of_group(shard, item)
            else:
                self._made[item] = codes_of_shard(shard, item, self.amaxes.of(item, shard))
        return self._made[item]

    # -- what the layer takes ----------------------------------------------------------------------

    def codes(self, item: GatherItem, call: LayerCall) -> Quantized | None:
        """The whole quantised weight, if it came in the passes of the call."""
        sent = self.arrived_codes(item, call)
        if sent is None or sent.shard is None:
            return None
        rows = self.ranks.size * sent.shard.shape[int(item.column)]
        return joined(sent.shard, sent.tensors, rows, columns=item.column)

    def arrived_codes(self, item: GatherItem, call: LayerCall) -> SentTensors | None:
        """The tensors of all ranks for an item, if they came in the passes of the call."""
        sent = self._received.get(item)
        if sent is None or call.constant is not self._received_in or not _is_here(sent):
            return None
        return sent

    def member(self, index: int) -> MemberGather:
        """See `nn.gathered.GatheredSource`."""
        return MemberGather(self, index)

    def fused_amax(self, call: LayerCall) -> Tensor | None:
        """See `nn.gathered.GatheredSource`."""
        if self.amaxes.constant is call.constant:
            return self.amaxes.known.get(FUSED)
        return None

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `nn.gathered.GatheredSource`."""
        return self.arrived(dtype).to(dtype)

    def arrived(self, dtype: torch.dtype) -> Tensor:
        """The values as they came, in `dtype` if they came so."""
        values = self._arrived(dtype, torch.bfloat16 if self.rounds else torch.float32)
        return self.master() if values is None else values

    def master(self) -> Tensor:
        """See `nn.gathered.GatheredSource`."""
        values = self._arrived(torch.float32, *((torch.bfloat16,) if self.rounds else ()))
        if values is not None:
            return values.to(torch.float32, copy=True)
        # A part of a block that is recomputed: from now on what forward needs is sent along.
        self._repeats = self._repeats or backward_pass() != -1
        return self.ranks.gather_rows(self.shard.detach())

    def _arrived(self, *dtypes: torch.dtype) -> Tensor | None:
        """The weight's values in the first of `dtypes` in which they were received, and not freed
        since.
        """
        received = (self._received.get(GatherItem(None, dtype=dtype)) for dtype in dtypes)
        return next(
            (sent.tensors[0] for sent in received if sent is not None and _is_here(sent)), None
        )


class MemberGather(ReceivedWeight):
    """One weight [N, K] of a gathered group."""

    members = 0

    def __init__(self, group: WeightGather, index: int) -> None:
        self._group = group
        self._index = index
        self.rounds = group.rounds

    def codes(self, item: GatherItem, call: LayerCall) -> Quantized | None:
        """The quantised weight, if it came in the passes of the call."""
        sent = self._group.arrived_codes(item, call)
        if sent is None or sent.shard is None:
            return None
        codes, scales, *amax = (tensor[self._index] for tensor in sent.tensors)
        return sent.shard._replace(codes=codes, scales=scales, amax=amax[0] if amax else None)

    def fused_amax(self, call: LayerCall) -> Tensor | None:
        """None: experts that share scales are sent as values."""
        return None

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `nn.gathered.GatheredSource`."""
        return self._group.arrived(dtype)[self._index].to(dtype)

    def master(self) -> Tensor:
        """See `nn.gathered.GatheredSource`."""
        return self._group.master()[self._index].clone()

    def member(self, index: int) -> NoReturn:
        """A weight has none."""
        raise TypeError(
            f"weight {self._index} of {self._group.layer.layer.name} is a matrix, without members"
        )


def _is_here(sent: SentTensors) -> bool:
    return bool(sent.tensors[0].untyped_storage().size())


def begin(gathers: Sequence[WeightGather], largest: Callable[[Tensor], Tensor]) -> None:
    """Reduce all amaxes that are not known yet, in one all-reduce, before a forward pass in the
    current context.
    """
    if backward_pass() != -1:  # recomputed: what backward sends was chosen in forward
        return
    context = current()
    training = torch.is_grad_enabled()
    constant = None if context is None else context.constant
    for gather in gathers:
        if context is None:
            plan = None
        else:
            plan = gather.layer.executor_in(context, gather.shard.device).plan
        gather.begin(plan, constant, training)
    unknown = [
        (gather.amaxes.known, *missing)
        for gather in gathers
        for missing in gather.amaxes.missing(gather.shard, (*gather.forward, *gather.backward))
    ]
    if unknown:
        joined = largest(torch.cat([vector for *_, vector in unknown]))
        parts = torch.split(joined, [vector.numel() for *_, vector in unknown])
        for (amaxes, key, start, _), reduced in zip(unknown, parts, strict=True):
            amax = amaxes[key]
            amaxes[key] = reduced[start : start + amax.numel()].view(amax.shape)
    for gather in gathers:
        gather.amaxes.join_fused()
        gather.amaxes.enter(gather.shard, (*gather.forward, *gather.backward), training)


def gather_weights(model: nn.Module, blocks: Iterable[nn.Module], world: World, mode: str) -> None:
    """Let FSDP gather the weights of `model`'s layers as `mode` says, "recipe" or "bf16".

    Args:
        blocks: units of FSDP, before the first forward pass.
        world: its shards share the rows of a weight, its tensor-parallel ranks the layer.
    """
    assert world.data_mesh is not None
    group = world.data_mesh.get_group(SHARD)
    ranks = Ranks(group=group, rank=group.rank(), size=group.size())
    of_experts = ranks
    if world.expert_data is not None:
        group = world.expert_data.get_group(SHARD)
        of_experts = Ranks(group=group, rank=group.rank(), size=group.size())
    gathers = [
        WeightGather(layer, parameter, holders, mode)
        for block in blocks
        for parameter in _parameters(block)
        if isinstance(layer := parameter._module_info.module, PlannedLayer)
        and not layer.transposed
        and parameter._module_info.param_name == "weight"
        and not parameter._module_info.shared_modules
        and (holders := of_experts if layer.layer.experts else ranks).size > 1
        and parameter._orig_size[0] % holders.size == 0
    ]
    by_name = {gather.layer.layer.name: gather.amaxes for gather in gathers}
    for gather in gathers:
        gather.amaxes.fused = by_name
    largest = ranks.largest if world.mesh.tensor == 1 else world.largest
    # Before FSDP's own hook, which gathers.
    model.register_forward_pre_hook(lambda *_: begin(gathers, largest), prepend=True)


def _parameters(block: nn.Module) -> Iterator[Any]:
    """FSDP's records of the parameters of a block that is a unit."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(block, FSDPModule)
    for group in parameter_groups(block):
        yield from group.fsdp_params


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """FSDP's groups of the parameters of a unit: of each mesh that they lie on one."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
