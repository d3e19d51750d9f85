"""FSDP's all-gather of weights as codes and scales, quantised from the shards of the float32
master.

Before the first forward pass of a step the amaxes of all weights are joined in one all-reduce
(`begin`), over the shards and over the tensor-parallel ranks that hold the rest of the weights.
Each rank then quantises its rows with the amax of the whole weight, and FSDP gathers codes and
scales: for forward what fprop multiplies, for backward what dgrad does. The codes of the shards
together are the codes of the whole weight, so training equals that of one rank in every bit. What
is sent of a weight `precision.gather.wire_form` says.

The column-wise form of a weight, blocked along its rows, is quantised from the transposed shard,
and sent transposed back: every part that is sent has the shards along its first dimension.

FSDP2 asks a shard for what it sends (`fsdp_pre_all_gather`) and hands over what arrived
(`fsdp_post_all_gather`). The two methods are set on the plain tensor that is the shard: optimizer,
norm and checkpoints see no tensor subclass.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.backends import Prepared
from fp4train.nn.call import Call
from fp4train.nn.gathered import Gathered
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks
from fp4train.nn.weight_form import WeightForm
from fp4train.parallel.received import MASTER, MemberGather, Payload, Sent, form_of, rounded_from
from fp4train.parallel.world import SHARD, World
from fp4train.precision.context import backward_pass, current
from fp4train.precision.gather import wire_form
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import (
    Own,
    Quantized,
    QuantSpec,
    RunStep,
    amax_extent,
    has_tensor_amax,
    measure_amax,
    quantizer,
)
from fp4train.quantize.sharded import divided_tensors, joined
from fp4train.quantize.source import own

AMAX = "amax"
FUSED = "fused"
"""Keys of the amax of a whole weight, and of the largest of the weights that share a scale with it;
those of each row or column have the part of the weight as key.
"""


class WeightGather:
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
        self.shape: torch.Size = parameter._orig_size
        place = layer.layer_shard
        if place is None or place.amax == "local":
            self.cut = None
        else:
            self.cut = place.cut
        """The features along which ranks that share the amaxes of the weight cut it."""
        self.fused: Mapping[str, WeightGather] = {}
        """The gathers of the layers that a recipe may let share a scale with this one, itself
        included, by name.
        """
        self._shares: QuantSpec | None = None
        """The spec of the weight whose scale others share at `step`."""
        self.step: RunStep | None = None
        self.amaxes: dict[object, Tensor] = {}
        """Amaxes of the whole weight at `step`, by the extent that they cover: see `AMAX`."""
        self.delayed: Tensor | None = None
        self.forward: tuple[Payload, ...] = (MASTER,)
        """Payloads of the next forward pass."""
        self.backward: tuple[Payload, ...] = (MASTER,)
        """Payloads of the backward pass of the last forward pass."""
        self.rounds = mode == "bf16"
        """Whether the values that are sent stand for the master's."""
        self._made: dict[Payload, Sent] = {}
        self._sent_at: RunStep | None = None
        self._received: dict[Payload, Sent] = {}
        self._received_at: RunStep | None = None
        self._layout: list[tuple[int, torch.dtype]] = []
        self._repeats = False

    @property
    def shard(self) -> Tensor:
        """This rank's rows of the float32 master."""
        shard: Tensor = self.parameter._sharded_local_tensor
        return shard

    def drop(self) -> None:
        """Forget what was made of the shard, and what arrived: the shard was written."""
        self.step = None
        self._made.clear()
        self.amaxes.clear()
        self._received = {}

    # -- before a forward pass ---------------------------------------------------------------------

    def begin(self, plan: LayerPlan | None, step: RunStep | None, training: bool) -> None:
        """Choose what the coming gathers send.

        Args:
            plan: the layer's plan; None: nothing is known, and the master is sent.
            step: step of the run; None: unknown, so that nothing may be kept.
            training: whether a backward pass will follow.
        """
        shard = self.shard
        # at first, or where another tensor became the shard
        if not hasattr(shard, "fsdp_pre_all_gather"):
            shard.fsdp_pre_all_gather = self.send  # type: ignore[attr-defined]
            shard.fsdp_post_all_gather = self.receive  # type: ignore[attr-defined]
            self.parameter._init_extensions()
        if step is None or step != self.step:
            self._made.clear()
            self.amaxes.clear()
        self.step = step
        forward, backward = self._parts(plan, step)
        self.forward = forward
        if training:
            if self._repeats:
                self.backward = (*backward, *(part for part in forward if part not in backward))
            else:
                self.backward = backward

    def _parts(
        self, plan: LayerPlan | None, step: RunStep | None
    ) -> tuple[tuple[Payload, ...], tuple[Payload, ...]]:
        """The payloads of forward and of backward."""
        self._shares = None
        if plan is None:
            return (MASTER,), (MASTER,)
        way = wire_form(plan, self.ranks.size, self.mode)
        self.rounds = way.rounds or self.mode == "bf16"
        if not self.rounds and step is not None:
            self._shares = plan.shared_spec
        if step is None and way.coded:
            return (MASTER,), (MASTER,)
        values = (Payload(None, dtype=way.dtype),)
        return (
            values if way.forward is None else (Payload(way.forward),),
            values if way.backward is None else (Payload(way.backward),),
        )

    def missing(self) -> Iterator[tuple[object, int, Tensor]]:
        """The keys of the amaxes that are needed of the whole weight and not yet known; those of
        this rank's shard among zeros, at their place in those of the whole, which is the number.
        """
        needed = {self._key(part): part for part in (*self.forward, *self.backward)}
        if self._shares is not None:
            needed = {key: part for key, part in needed.items() if key != FUSED} | {
                AMAX: Payload(own(self._shares, "in"))
            }
        for key, part in needed.items():
            if part.spec is not None and key is not None and key not in self.amaxes:
                amax = measure_amax(self.shard.T if part.column else self.shard, part.spec)
                start, size = self._slot(part, amax.numel())
                vector = amax.new_zeros(size)
                vector[start : start + amax.numel()] = amax.reshape(-1)
                self.amaxes[key] = amax
                yield key, start, vector

    def _key(self, part: Payload) -> object:
        """The key of the amaxes that a part needs of what other ranks hold; None if it needs
        none.
        """
        spec = part.spec
        if spec is None or self.shard.dim() == 3:  # a rank has whole weights of a group
            return None
        if spec.delayed is not None or amax_extent(spec) == "tensor":
            if self._shares is not None and has_tensor_amax(spec):
                return FUSED
            return AMAX
        if amax_extent(spec) != "row":
            return None
        if part.column or self.cut == "in":
            return part
        return None

    def _slot(self, part: Payload, count: int) -> tuple[int, int]:
        """(start of this rank's `count` amaxes in those of the whole weight, their number)."""
        if part.spec is None or self.cut != "in" or amax_extent(part.spec) != "row":
            return 0, count
        place = self.layer.layer_shard
        assert place is not None and place.tensor is not None
        if part.column:  # of columns that tensor parallelism cuts
            return place.first, count * place.tensor.size
        return self.ranks.rank * count, count * self.ranks.size

    def join_fused(self) -> None:
        """Take the largest amax of the weights that share a scale."""
        if self._shares is None:
            return
        names = self.layer.layer.fused
        if missing := [name for name in names if name not in self.fused]:
            raise ValueError(
                f"recipe.fused_scales: {', '.join(names)} share one scale, and "
                f"{', '.join(missing)} is gathered "
                f"otherwise: its rows do not divide over {self.ranks.size} shards; use "
                "parallel.gather=fp32"
            )
        self.amaxes[FUSED] = torch.stack([self.fused[name].amaxes[AMAX] for name in names]).amax()

    def enter(self, training: bool) -> None:
        """Take the delayed amax of the step; the weight's own enters its history."""
        spec = next(
            (
                part.spec
                for part in (*self.forward, *self.backward)
                if part.spec and part.spec.delayed
            ),
            None,
        )
        context = current()
        if spec is None or context is None:
            return
        executor = self.layer.executor_in(context, self.shard.device)
        call = self.layer.new_call(context, executor, 0, training=training)
        self.delayed, _ = call.weights.delayed_amax(
            self.amaxes[AMAX], quantizer(spec, self.shard.device.type), call
        )

    # -- FSDP's gather -----------------------------------------------------------------------------

    def send(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], dict[Payload, Sent]]:
        """The tensors that this rank sends, and its payloads with their tensors."""
        if backward_pass() == -1:
            payloads = self.forward
        else:
            payloads = self.backward
        sent = {part: self._make(part) for part in map(self._known, payloads)}
        tensors = tuple(tensor for part in sent.values() for tensor in part.tensors)
        layout = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        if layout != self._layout:
            self._layout = layout
            self.parameter.all_gather_outputs = []
        self._sent_at = self.step
        return tensors, sent

    def receive(
        self,
        arrived: tuple[Tensor, ...],
        sent: dict[Payload, Sent],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Take the tensors of all ranks."""
        tensors = iter(arrived)
        self._received = {
            part: payload_sent._replace(tensors=tuple(next(tensors) for _ in payload_sent.tensors))
            for part, payload_sent in sent.items()
        }
        self._received_at = self._sent_at
        if out is not None:
            return None
        return (Gathered(self, self.shape, arrived[0].device), ())

    def _known(self, part: Payload) -> Payload:
        """`part`, or the master if the amax of another step would be needed."""
        key = self._key(part)
        if key is None or key in self.amaxes:
            return part
        return MASTER

    def _make(self, part: Payload) -> Sent:
        if part.spec is None:
            assert part.dtype is not None
            return Sent((self.shard.to(part.dtype),))
        if (sent := self._made.get(part)) is None:
            key = self._key(part)
            amax = None
            if part.spec.delayed is not None:
                amax = self.delayed
            elif key is not None:
                amax = self.amaxes[key]
            if self.shard.dim() == 3:
                sent = self._made[part] = self._make_group(part.spec, column=part.column)
                return sent
            w = self.shard.T if part.column else self.shard
            shard = quantizer(part.spec, w.device.type).codes(w, None, amax)
            if part.spec.has_outer_scale:  # the scales have all that the amax says
                shard = shard._replace(amax=None)
            tensors = divided_tensors(shard, columns=part.column)
            # holds its codes once
            sent = self._made[part] = Sent(tensors, shard._replace(codes=tensors[0]))
        return sent

    def _make_group(self, spec: QuantSpec, *, column: bool) -> Sent:
        """This rank's weights of a group, which are whole: their codes, scales and amaxes, one
        after the other.
        """
        make = quantizer(spec, self.shard.device.type).codes
        members = [make(w_NK.T if column else w_NK, None, None) for w_NK in self.shard]
        if spec.has_outer_scale:
            members = [member._replace(amax=None) for member in members]
        members = [member._replace(factor=None) for member in members]
        columns = [[part for part in member[2:] if part is not None] for member in members]
        tensors = tuple(torch.stack(parts) for parts in zip(*columns, strict=True))
        return Sent(tensors, members[0]._replace(codes=tensors[0][0], scales=tensors[1][0]))

    # -- what the layer takes ----------------------------------------------------------------------

    def form(self, form: WeightForm, call: Call) -> Prepared | None:
        """See `nn.gathered.GatheredSource`."""
        return form_of(self, form, call)

    def rounded(self, codes: Own, call: Call) -> Tensor | None:
        """See `nn.gathered.GatheredSource`."""
        return rounded_from(self.codes(Payload(codes), call))

    def codes(self, part: Payload, call: Call) -> Quantized | None:
        """The whole quantised weight, if it came in this step."""
        sent = self._arrived_codes(part, call)
        if sent is None or sent.shard is None:
            return None
        rows = self.ranks.size * sent.shard.shape[1 if part.column else 0]
        return joined(sent.shard, sent.tensors, rows, columns=part.column)

    def codes_of(self, member: int, part: Payload, call: Call) -> Quantized | None:
        """The codes of one weight of a group, if they came in this step."""
        sent = self._arrived_codes(part, call)
        if sent is None or sent.shard is None:
            return None
        codes, scales, *amax = (tensor[member] for tensor in sent.tensors)
        return sent.shard._replace(codes=codes, scales=scales, amax=amax[0] if amax else None)

    def _arrived_codes(self, part: Payload, call: Call) -> Sent | None:
        sent = self._received.get(part)
        if sent is None or call.position.step != self._received_at or not _is_here(sent):
            return None
        return sent

    def member(self, index: int) -> MemberGather:
        """See `nn.gathered.GatheredSource`."""
        return MemberGather(self, index)

    def fused_amax(self, call: Call) -> Tensor | None:
        """See `nn.gathered.GatheredSource`."""
        if self.step == call.position.step:
            return self.amaxes.get(FUSED)
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
        # Recomputed blocks need in backward what forward needs: from now on it is sent along.
        self._repeats = self._repeats or backward_pass() != -1
        return self.ranks.gather_rows(self.shard.detach())

    def _arrived(self, *dtypes: torch.dtype) -> Tensor | None:
        """The weight's values in the first of `dtypes` in which they were received, and not freed
        since.
        """
        received = (self._received.get(Payload(None, dtype=dtype)) for dtype in dtypes)
        return next(
            (sent.tensors[0] for sent in received if sent is not None and _is_here(sent)), None
        )


def _is_here(sent: Sent) -> bool:
    return bool(sent.tensors[0].untyped_storage().size())


def begin(gathers: Sequence[WeightGather], largest: Callable[[Tensor], Tensor]) -> None:
    """Reduce all amaxes that are not known yet, in one all-reduce, before a forward pass in the
    current context.
    """
    if backward_pass() != -1:  # recomputed: what backward sends was chosen in forward
        return
    context = current()
    training = torch.is_grad_enabled()
    step = None if context is None else context.run_step
    for gather in gathers:
        if context is None:
            plan = None
        else:
            plan = gather.layer.executor_in(context, gather.shard.device).plan
        gather.begin(plan, step, training)
    unknown = [(gather.amaxes, *missing) for gather in gathers for missing in gather.missing()]
    if unknown:
        joined = largest(torch.cat([vector for *_, vector in unknown]))
        parts = torch.split(joined, [vector.numel() for *_, vector in unknown])
        for (amaxes, key, start, _), reduced in zip(unknown, parts, strict=True):
            amax = amaxes[key]
            amaxes[key] = reduced[start : start + amax.numel()].view(amax.shape)
    for gather in gathers:
        gather.join_fused()
        gather.enter(training)


def gather_weights(model: nn.Module, blocks: Iterable[nn.Module], world: World, mode: str) -> None:
    """Let FSDP gather the weights of `model`'s layers as `mode` says, "recipe" or "bf16".

    Args:
        blocks: units of FSDP, before the first forward pass.
        world: its shards share the rows of a weight, its tensor-parallel ranks the layer.
    """
    assert world.data_mesh is not None
    group = world.data_mesh.get_group(SHARD)
    ranks = Ranks(group=group, rank=group.rank(), size=group.size())
    gathers = [
        WeightGather(parameter._module_info.module, parameter, ranks, mode)
        for block in blocks
        for parameter in _parameters(block)
        if isinstance(parameter._module_info.module, PlannedLayer)
        and not parameter._module_info.module.transposed
        and parameter._module_info.param_name == "weight"
        and not parameter._module_info.shared_modules
        and parameter._orig_size[0] % ranks.size == 0
    ]
    by_name = {gather.layer.layer.name: gather for gather in gathers}
    for gather in gathers:
        gather.fused = by_name
        gather.layer.drops.append(gather.drop)
    alone = world.mesh.tensor == 1 or any(
        gather.layer.layer_shard is not None and gather.layer.layer_shard.amax == "local"
        for gather in gathers
    )

    largest = ranks.largest if alone else world.largest
    # Before FSDP's own hook, which gathers.
    model.register_forward_pre_hook(lambda *_: begin(gathers, largest), prepend=True)


def _parameters(block: nn.Module) -> Iterator[Any]:
    """FSDP's records of the parameters of a block that is a unit."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(block, FSDPModule)
    state = block._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        if group is not None:
            yield from group.fsdp_params
