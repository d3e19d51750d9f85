"""Tensor and sequence parallelism: a converted model is cut over the ranks of one mesh dimension.

Each parameter becomes a DTensor of that mesh, cut or whole as its `ParameterSpec` says, so that
FSDP2 shards it further and a checkpoint knows its place. A weight of several segments is cut in
each of them: its DTensor holds the rows rank by rank (`shards.RowOrder`). The layers compute on
local shards; `nn.executors.cut` has the collectives.

Order: `convert`, `cut_tensors`, compile, `fully_shard`, optimizer. All ranks must hold equal
parameters before.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fp4train import parameters
from fp4train.models.common import HoldsParts, TensorCut, TensorParallel, TokenRanks
from fp4train.nn.layer_shard import Cut, LayerShard
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.ranks import Ranks, local
from fp4train.shards import RowOrder

_COUNTED = {None: "rows", "out": "out_features", "in": "in_features", "experts": "experts"}
"""Units that a cut divides, by the features along which it runs."""


def cut_tensors(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence: bool = True,
    rounds_sums: bool = False,
) -> nn.Module:
    """Cut `model` over the ranks of `mesh`, in place, and return it.

    Args:
        model: a converted model that says how its parameters are cut (`fp4train_parameters`).
        mesh: mesh with one dimension, `world.mesh["tp"]`.
        sequence: whether the tokens of the residual stream and norms are cut too.
        rounds_sums: whether layers send partial sums in BF16, with `sequence` alone.

    Raises:
        TypeError: the model does not say how it is cut.
        ValueError: a size is not divisible by the number of ranks; the message says which and what
            to choose.
    """
    ranks = Ranks.of(mesh)
    parallel = cast(TensorParallel, model)
    cut = tensor_cut_of(model, ranks.size)
    check_division(model, cut, ranks.size)
    local_of: dict[nn.Parameter, nn.Parameter] = {}
    orders: dict[str, RowOrder] = {}
    for divided in _divided(model, cut):
        segments = cut.segments.get(divided.name, ())
        order = RowOrder(segments, ranks.size) if segments else None
        if order is not None:
            orders |= dict.fromkeys(divided.parameters, order)
        _distribute(
            divided.module,
            mesh,
            divided.axis,
            local_of,
            order=order,
            only=divided.parameter,
        )
        if divided.along is not None:
            layer = cast(PlannedLayer, divided.module)
            part = layer.weight.shape[divided.axis] // ranks.size
            runs = () if order is None else order.runs(ranks.rank * part, part)
            layer.shard(
                LayerShard(
                    tensor=ranks,
                    cut=divided.along,
                    sequence=sequence,
                    rounds_sums=rounds_sums,
                    first=ranks.rank * part,
                    runs=runs,
                )
            )
    for name, attribute, _ in cut.counts:
        module = model.get_submodule(name)
        setattr(module, attribute, getattr(module, attribute) // ranks.size)
    for module in model.modules():
        _distribute(module, mesh, None, local_of)
        if isinstance(module, HoldsParts):
            module.held = local
    parallel.tensor = TokenRanks(ranks=ranks, sequence=sequence)
    parallel.row_orders = orders
    # other heads on each rank, as other tokens are with `sequence`
    for names, distinct in ((cut.tokens, sequence), (cut.features, False), (cut.heads, True)):
        for name in names:
            model.get_submodule(name).tensor = TokenRanks(ranks=ranks, sequence=distinct)  # type: ignore[assignment]
    return model


def tensor_cut_of(model: nn.Module, size: int) -> TensorCut:
    """How `model` says that it is cut over `size` ranks.

    Raises:
        TypeError: it does not, or not for its experts.
    """
    specs = parameters.declared(model).values()
    if all(spec.cut is parameters.Split.WHOLE for spec in specs):
        raise TypeError(
            f"parallel.tp={size}: {type(model).__name__} does not say how tensor parallelism "
            "cuts it. Give it a method "
            "fp4train_parameters that does (models/llama is an example), or use parallel.tp=1"
        )
    cut = TensorCut.of(specs)
    for name, module in model.named_modules():
        if isinstance(module, PlannedLayer) and bool(module.layer.experts) != (name in cut.experts):
            has = "has" if module.layer.experts else "has no"
            raise TypeError(
                f"parallel.tp={size}: {name} {has} experts, and fp4train_parameters of "
                f"{type(model).__name__} says "
                "otherwise: it must cut each group of experts along Split.EXPERTS, and nothing else"
            )
    return cut


def check_division(model: nn.Module, cut: TensorCut, size: int) -> None:
    """Check that `size` ranks divide all that `cut` divides.

    Raises:
        TypeError: a layer is not converted.
        ValueError: they do not; the message says what does.
    """
    counts = [
        (key, getattr(model.get_submodule(name), attribute)) for name, attribute, key in cut.counts
    ]
    common = math.gcd(*(count for _, count in counts))
    for key, count in counts:
        if count % size:
            allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ValueError(
                f"{key}={count} cannot be divided over parallel.tp={size} ranks; parallel.tp "
                f"allowed: {allowed}"
            )
    for divided in _divided(model, cut):
        name = divided.name
        module = divided.module
        if divided.along is not None and not isinstance(module, PlannedLayer):
            raise TypeError(
                f"{name} is a {type(module).__name__}: convert the model before it is cut"
            )
        count = module.get_parameter(divided.parameter or "weight").shape[divided.axis]
        _check_rows(name, count, cut.segments.get(name, ()), _COUNTED[divided.along], size)


def _check_rows(name: str, count: int, segments: tuple[int, ...], what: str, size: int) -> None:
    if segments and sum(segments) != count:
        raise ValueError(
            f"{name}: segments of {', '.join(map(str, segments))} rows do not make its "
            f"{count} {what}"
        )
    for place, segment in enumerate(segments or (count,), 1):
        if segment % size:
            if segments:
                of = f"segment {place} of {len(segments)} has {segment} {what}, which"
            else:
                of = f"{segment} {what}"
            raise ValueError(
                f"{name}: {of} cannot be divided over parallel.tp={size} ranks; choose a "
                f"multiple of {size}, or another parallel.tp"
            )


class _Divided(NamedTuple):
    """A module whose parameters are divided over the ranks, or one parameter of it.

    Args:
        module: the module that has them.
        name: name in the model of the module, or of the parameter.
        axis: dimension of the cut.
        along: the features along which a layer is cut; None: the module is no such layer.
        parameter: name in the module of the one parameter that is divided; None: all are.
    """

    module: nn.Module
    name: str
    axis: int
    along: Cut | None = None
    parameter: str | None = None

    @property
    def parameters(self) -> list[str]:
        """Names in the model of the divided parameters."""
        if self.parameter is not None:
            return [self.name]
        return [f"{self.name}.{name}" for name, _ in self.module.named_parameters(recurse=False)]


def _divided(model: nn.Module, cut: TensorCut) -> Iterator[_Divided]:
    slices: tuple[tuple[tuple[str, ...], int, Cut | None], ...]
    slices = (
        (cut.out, 0, "out"),
        (cut.in_, 1, "in"),
        (cut.experts, 0, "experts"),
        (cut.vocabulary, 0, None),
    )
    for names, axis, along in slices:
        for name in names:
            yield _Divided(model.get_submodule(name), name, axis, along)
    for name in cut.rows:
        path, _, attribute = name.rpartition(".")
        yield _Divided(model.get_submodule(path), name, 0, parameter=attribute)


def cut_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module's parameters DTensors, of which each rank of `mesh` has some rows."""
    _distribute(module, mesh, 0, {})


def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    axis: int | None,
    local_of: dict[nn.Parameter, nn.Parameter],
    *,
    order: RowOrder | None = None,
    only: str | None = None,
) -> None:
    """Make the module's parameters DTensors: cut along `axis` (a bias with the rows), or whole on
    every rank.

    Args:
        order: order in which the rows are cut; None: one after another.
        only: the name of the parameter; None: all of them.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor) or only not in (None, name):
            continue
        if parameter not in local_of:
            local = parameter.detach()
            placement: Replicate | Shard = Replicate()
            if axis is not None and parameter.dim() > axis:
                part = parameter.shape[axis] // mesh.size()
                first_row = mesh.get_local_rank() * part
                runs = (
                    ((first_row, part),) if order is None or axis else order.runs(first_row, part)
                )
                # A copy: a view would keep the memory of the whole parameter.
                local = torch.cat([local.narrow(axis, start, count) for start, count in runs], axis)
                placement = Shard(axis)
            distributed = DTensor.from_local(local, mesh, [placement], run_check=False)
            local_of[parameter] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        module.register_parameter(name, local_of[parameter])


def replicas(parameter: Tensor) -> int:
    """Number of tensor-parallel ranks that hold the same part of a parameter or gradient.

    In a sum over those ranks, the squares of a gradient count by 1 / replicas.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    axis = (mesh.mesh_dim_names or ()).index("tp")
    if isinstance(parameter.placements[axis], Replicate):
        return mesh.size(axis)
    return 1
