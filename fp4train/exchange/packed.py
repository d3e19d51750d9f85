"""The weights of a run as codes and scales: what each layer becomes by the plan of a stretch,
tensor by tensor.

The codes are those of `quantize(w, spec)` with the spec that the stretch's plan has for fprop's
weight, and w the stored float32 weight. They are made some rows at a time: the codes of some rows,
with the amax of the whole weight, are these rows of the codes. What stays in high precision, such
as routers, is listed as such in the folder.

Serving software multiplies some layers as one (`ParameterSpec.fused`) and takes one global scale
for them. So they share one here. A run with `recipe.fused_scales` has trained them so; of another
one they are quantised again, with the largest amax of the group.

Of a mixture's experts each matrix is packed under its own name. An expert trains its gate and up as
one weight with one amax, so they share its scale in every run, and their codes are rows of its
codes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from fp4train.backends import HIGH_PRECISION, Operands
from fp4train.checkpoint.tensors import StreamedTensor
from fp4train.errors import UserError, user_errors
from fp4train.exchange.formats import COMPRESSED_TENSORS, MODELOPT, Format, format_of
from fp4train.exchange.stored import EMBEDDING, PIECE_BYTES, StoredModel
from fp4train.formats.scale import E4M3_SCALE
from fp4train.hardware import Device
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import Layer, find_layers
from fp4train.precision.plan import Plan, PlannedStretch, make_plan
from fp4train.quantize import Quantized, QuantSpec, has_tensor_amax, measure_amax, quantize
from fp4train.quantize.scaling import element_range, global_scales
from fp4train.run.build import build_model
from fp4train.run.record.journal import read_journal, stretches
from fp4train.run.timeline import build_timeline
from fp4train.text import counted

_ROWS = 128
"""Pieces are a multiple of so many rows, which are whole blocks of every format."""
_OF_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FP8 = torch.float8_e4m3fn

Pieces = Callable[[], Iterator[Tensor]]


@dataclass(frozen=True, kw_only=True)
class PackedLayer:
    """A matrix that is stored as codes: the weight of a layer, or a matrix of one of its experts.

    Args:
        stored: name of the part of the checkpoint that it is.
        module: its name in the folder.
        expert: index of its expert; None: the layer has one weight.
        spec: spec by which fprop quantises the weight.
        amax: amax that the scale of the whole weight is made of, float32 0-d; None: there is none.
        shares: True: it is of a larger weight than its own.
    """

    layer: Layer
    stored: str
    module: str
    expert: int | None = None
    spec: QuantSpec
    format: Format
    amax: Tensor | None = None
    shares: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedModel:
    """Plan of an export as codes: for every weight of a run, the format of its codes, or that it
    keeps its dtype.

    Args:
        stretch: stretch whose plan it is.
        layers: matrices that are packed, by the name of their part of the checkpoint.
        kept: names of all other modules with a matrix, whose weights stay in high precision: in the
            folder, and in software that renames them as it loads (`_renamed`).
        trained_fused: True: the stretch trained fused layers with one scale.
    """

    model: StoredModel
    layout: str
    stretch: PlannedStretch
    format: Format
    layers: Mapping[str, PackedLayer] = field(repr=False)
    kept: list[str] = field(repr=False)
    trained_fused: bool

    @property
    def requantised(self) -> list[PackedLayer]:
        """The layers whose codes are others than training had."""
        if self.trained_fused:
            return []
        return [matrix for matrix in self.layers.values() if matrix.shares]

    @property
    def divided(self) -> list[tuple[str, ...]]:
        """Names of layers that serving software multiplies as one, by group, where some are packed
        and others not: fused ones, and the products of one layer of experts.
        """
        names = {matrix.layer.name for matrix in self.layers.values()}
        experts = [name for name, plan in self.stretch.layers.items() if plan.layer.experts]

        def group(layer: Layer) -> tuple[str, ...]:
            inside = f"{layer.name.rpartition('.')[0]}."
            if layer.experts:
                return tuple(n for n in experts if n.startswith(inside))
            return layer.fused

        groups = {group(matrix.layer) for matrix in self.layers.values()}
        return sorted(layers for layers in groups if not names.issuperset(layers))

    @property
    def unserved(self) -> list[str]:
        """What fprop of a packed layer does to x in training, and no serving software does, in
        words.
        """
        words = dict[str, None]()
        for matrix in self.layers.values():
            plan = self.stretch.layers[matrix.layer.name]
            x = plan.fprop.operands.first
            if x is None:
                continue
            if "x" in plan.recipe.centred:
                words["fprop quantises x without its mean over tokens"] = None
            if plan.recipe.residual is not None and "x" in plan.recipe.residual.tensors:
                words["fprop multiplies the error of the codes of x, too"] = None
            if x.four_over_six is not None:
                words["fprop scales each block of x to 6 or to 4"] = None
            if x.global_scale == "row":
                words["fprop scales each token of x by its own largest value"] = None
        return list(words)

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of codes and scales for each quantised weight."""
        sizes = [
            (math.prod(self.model.shape(matrix.stored)), matrix) for matrix in self.layers.values()
        ]
        stored = sum(tensor.size for _, matrix in sizes for tensor in self.tensors_of(matrix, 1.0))
        return stored / sum(count for count, _ in sizes)

    def streamed(self, x_amax: Mapping[str, float], dtype: torch.dtype) -> Iterator[StreamedTensor]:
        """All tensors of the folder.

        Args:
            x_amax: largest |x| of each packed layer, by the layer's name; needed where the
                format stores it.
            dtype: dtype of the weights in high precision.
        """
        for name in self.model.parts:
            packed = self.layers.get(name)
            if packed is None:
                yield self.model.streamed(name, dtype)
            else:
                yield from self.tensors_of(packed, x_amax.get(packed.layer.name))

    def tensors_of(self, packed: PackedLayer, x_amax: float | None) -> Iterator[StreamedTensor]:
        """Codes and scales of one layer; without `x_amax` not those of its activations."""
        n, k = self.model.shape(packed.stored)
        spec = packed.spec
        form = packed.format
        compressed = self.layout == COMPRESSED_TENSORS
        four = spec.format.bits == 4
        pieces = partial(self._pieces, packed, partial(_codes, k))
        if not four:
            yield self._tensor(packed, "weight", (n, k), FP8, pieces)
        else:
            name = "weight_packed" if compressed else "weight"
            yield self._tensor(packed, name, (n, k // 2), torch.uint8, pieces)
        pieces = partial(self._pieces, packed, _scales)
        if form.weight == "FP8":
            scale = quantize(torch.zeros(1, 1), spec, amax=packed.amax).scales
            yield self._value(packed, "weight_scale", scale)
        elif form.block_scaled:
            dtype = FP8 if form.weight == "NVFP4" else torch.uint8
            yield self._tensor(packed, "weight_scale", (n, k // form.group), dtype, pieces)
        else:
            shape: tuple[int, ...] = (n, 1)
            if spec.block[0] not in (1, None):
                shape = (-(-n // 128), -(-k // 128))
            elif not compressed:
                shape = (n,)
                pieces = partial(self._pieces, packed, _scale_per_row)
            yield self._tensor(packed, "weight_scale", shape, torch.float32, pieces)
        if form.weight == "NVFP4":
            name = "weight_global_scale" if compressed else "weight_scale_2"
            yield self._value(packed, name, self._global(packed))
        if form.static and x_amax is not None:
            largest = element_range(spec) * (448.0 if four else 1.0)
            value = torch.tensor(x_amax, dtype=torch.float32)
            if compressed and four:
                yield self._value(packed, "input_global_scale", largest / value)
            else:
                yield self._value(packed, "input_scale", value / largest)

    @staticmethod
    def _tensor(
        packed: PackedLayer, name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Pieces
    ) -> StreamedTensor:
        return StreamedTensor(
            name=f"{packed.module}.{name}", shape=shape, dtype=dtype, pieces=pieces
        )

    def _value(self, packed: PackedLayer, name: str, value: Tensor) -> StreamedTensor:
        """A tensor that holds one number in float32."""
        shape = (1,) if self.layout == COMPRESSED_TENSORS else ()
        return self._tensor(
            packed, name, shape, torch.float32, lambda: iter([value.reshape(shape)])
        )

    def _pieces(self, packed: PackedLayer, part: Callable[[Quantized], Tensor]) -> Iterator[Tensor]:
        for w_RK in rows_of(self.model, packed.stored):
            yield part(quantize(w_RK, packed.spec, amax=packed.amax))

    def _global(self, packed: PackedLayer) -> Tensor:
        """The scale over block scales: 2688/amax, which divides; or amax/2688, which multiplies."""
        assert packed.amax is not None
        encode, decode = global_scales(packed.amax, packed.spec)
        if self.layout == COMPRESSED_TENSORS:
            return encode
        if float(packed.amax) > 0:
            return packed.amax / (packed.spec.global_bound * element_range(packed.spec))
        return decode


def _codes(columns: int, q: Quantized) -> Tensor:
    if q.spec.format.packed:
        return q.codes.contiguous()
    return q.codes[:, :columns].contiguous().view(FP8)


def _scales(q: Quantized) -> Tensor:
    """Block scales with a row for each row of codes; those of 128×128 blocks as they are."""
    if q.spec.scale_format.dtype.itemsize > 1:
        return q.scales
    rows = q.spec.block[0] or 1
    scales = q.scales.repeat_interleave(rows, 0)[: q.shape[0]].contiguous()
    if q.spec.scale_format == E4M3_SCALE:
        return scales.view(FP8)
    return scales


def _scale_per_row(q: Quantized) -> Tensor:
    """The scales of rows [R], without the axis of their blocks."""
    return q.scales.squeeze(1)


def rows_of(model: StoredModel, stored: str) -> Iterator[Tensor]:
    """A stored matrix, some rows at a time."""
    rows, columns = model.shape(stored)
    step = max(1, PIECE_BYTES // (columns * model.dtype(stored).itemsize) // _ROWS) * _ROWS
    for start in range(0, rows, step):
        yield model.rows(stored, start, min(step, rows - start))


# -- what is packed --------------------------------------------------------------------------------


def pack(model: StoredModel, layout: str, at: int | None) -> PackedModel:
    """Plan of the export of `model` into a folder of `layout`; nothing is written yet.

    Args:
        at: a step of the stretch whose codes are packed; None: of the last one in which fprop
            quantised weights.

    Raises:
        UserError: there is no such stretch, or no format for its layers; a weight is not finite, or
            its blocks are not full.
    """
    stretch = _stretch(model, at)
    ran = _recorded(model, stretch)
    packed: dict[str, PackedLayer] = {}
    kept: list[str] = []
    for name, plan in stretch.layers.items():
        where = f"{name} in {stretch.title}"
        if plan.why_no_codes is not None and plan.fprop.operands.second is not None:
            raise UserError(f"to={layout}: {where}: {plan.why_no_codes}")
        operands = _recorded_operands(model, plan, stretch, ran.get(name))
        experts = plan.layer.experts > 0
        with user_errors(ValueError, before=f"to={layout}: {where}: "):
            form = format_of(operands.second, operands.first, layout, experts=experts)
        parts = model.parts_of(model.path(f"{name}.weight"))
        if form is None or operands.second is None:
            if not parts:
                kept.append("lm_head")
            continue
        rows = [model.shape(part)[0] for part in parts]
        if why := _why_not(plan.layer, operands.second, form, rows):
            raise UserError(
                f"to={layout}: {name} has {why}: a run that keeps it in high precision "
                "(policy.keep) can be exported "
                "so, and to=hf always"
            )
        for part in parts:
            packed[part] = PackedLayer(
                layer=plan.layer,
                stored=part,
                module=model.module_of(part),
                expert=model.parts[part].expert if experts else None,
                spec=operands.second,
                format=form,
            )
    kept += [
        model.module_of(part)
        for part in model.parts
        if len(model.shape(part)) == 2 and part not in packed and part != model.path(EMBEDDING)
    ]
    kept += [*map(_renamed, kept), *(_kept_experts(kept, packed) if layout == MODELOPT else ())]
    return PackedModel(
        model=model,
        layout=layout,
        stretch=stretch,
        format=_one_format(packed, f"to={layout}: a folder has one format, and {stretch.title}"),
        layers=_with_amaxes(model, packed),
        kept=sorted(set(kept)),
        trained_fused=stretch.recipe.fused_scales,
    )


def _recorded_operands(
    model: StoredModel, plan: LayerPlan, stretch: PlannedStretch, elements: str | None
) -> Operands:
    """The operands of fprop as the run multiplied them.

    Args:
        elements: names of their formats by the run's journal; None: it has none.
    """
    fprop = plan.fprop
    if elements is None or elements == fprop.elements:
        return fprop.operands
    if fprop.operands.second is None or elements != HIGH_PRECISION.elements(fprop.dtype):
        raise UserError(
            f"{model.run}: {plan.layer.name} ran fprop in {elements} in {stretch.title}, by the "
            f"run's journal, and this version plans {fprop.elements}: export with the version that "
            "trained it"
        )
    return HIGH_PRECISION  # tensor parallelism cut through its blocks


def _one_format(packed: Mapping[str, PackedLayer], before: str) -> Format:
    """The format of all packed matrices.

    Args:
        before: how the error begins where they have several.
    """
    formats = {matrix.format.name: matrix.format for matrix in packed.values()}
    if len(formats) == 1:
        return next(iter(formats.values()))
    counts = Counter(matrix.format.name for matrix in packed.values())
    listed = ", ".join(f"{counted(count, 'layer')} in {name}" for name, count in counts.items())
    raise UserError(
        f"{before} quantises {listed}: take a policy whose kept layers are in high precision"
    )


def _why_not(layer: Layer, spec: QuantSpec, form: Format, rows: list[int]) -> str | None:
    """Part of a layer's matrices, with so many rows each, that does not fit `form`, in words;
    None: all fit.
    """
    group = max(form.group, form.x_group)
    if layer.in_features % group:
        return (
            f"{layer.in_features} in features, which the groups of {group} that share a "
            f"scale in {form.name} "
            "must fill"
        )
    block = spec.block[0] or 1
    if (
        layer.name in layer.fused[:-1]
        and spec.scale_format.dtype.itemsize > 1
        and layer.out_features % block
    ):
        return (
            f"{layer.out_features} rows, which blocks of {block} rows must fill: vLLM and "
            "SGLang multiply "
            f"{', '.join(layer.fused)} as one, and refuse the folder"
        )
    if layer.experts and len(rows) > layer.experts and rows[0] % block:
        return (
            f"experts whose gate and up have {rows[0]} rows each, and blocks of {block} rows, "
            "some of which hold both"
        )
    return None


def _kept_experts(kept: Iterable[str], packed: Mapping[str, PackedLayer]) -> Iterator[str]:
    """The modules `….experts` none of whose matrices is packed: SGLang and TensorRT-LLM decide by
    these names, as ModelOpt's own list has them, and would look for the codes of each matrix
    otherwise.
    """

    def above(modules: Iterable[str]) -> set[str]:
        split = (module.rpartition(".experts.") for module in modules)
        return {f"{owner}.experts" for owner, dot, _ in split if dot}

    for module in above(kept) - above(matrix.module for matrix in packed.values()):
        yield module
        yield _renamed(module)


def _renamed(module: str) -> str:
    """The name of a module in other software: it calls the part of a model below its head `model`,
    and vLLM looks for the experts of Mixtral by the names that other models give them.
    """
    head, dot, inner = module.partition(".")
    name = f"model.{inner}" if dot else head
    above, dot, last = name.rpartition(".")
    if ".experts." in name:
        return f"{above}.{_OF_EXPERTS.get(last, last)}"
    return name


def planned(model: StoredModel) -> Plan:
    """The plan of a run, of a model without weights."""
    config = model.config
    layers = find_layers(build_model(config, model.vocab_size, torch.device("meta"))).values()
    timeline = build_timeline(config, model.run)
    with user_errors(ValueError, before=f"{model.run}: "):
        return make_plan(
            layers,
            timeline,
            config.policy,
            tokens=config.train.step_tokens,
            device=Device.of("cpu"),
        )


def _stretch(model: StoredModel, at: int | None) -> PlannedStretch:
    plan = planned(model)
    done = max(model.saved.step, 1)
    ran = [
        replace(stretch, stop=min(stretch.stop, done))
        for stretch in plan.stretches
        if stretch.start < done
    ]
    quantised = [
        stretch
        for stretch in ran
        if any(p.fprop.operands.second is not None for p in stretch.layers.values())
    ]
    listed = "; ".join(stretch.title for stretch in quantised)
    if not quantised:
        raise UserError(
            f"{model.run} quantised no weight of fprop in its {counted(done, 'step')} "
            f"({ran[-1].recipe.name}): there are no codes "
            "that training used. to=hf writes the weights themselves"
        )
    if at is None:
        return quantised[-1]
    chosen = next((stretch for stretch in quantised if stretch.start <= at < stretch.stop), None)
    if chosen is None:
        raise UserError(
            f"stretch={at}: fprop quantised weights in: {listed}; name a step of one of them"
        )
    return chosen


def _recorded(model: StoredModel, stretch: PlannedStretch) -> dict[str, str]:
    """Layer → elements of fprop, as the run's journal has them for `stretch`; empty for runs
    without one.
    """
    recorded = [
        entry
        for entry in stretches(read_journal(model.run))
        if entry.start <= stretch.start < entry.stop
    ]
    rows = recorded[0].rows if recorded else ()
    return {layer: elements for layer, gemm, _, elements, *_ in rows if gemm == "fprop"}


def _with_amaxes(model: StoredModel, packed: Mapping[str, PackedLayer]) -> dict[str, PackedLayer]:
    """The layers with the amaxes of their weights, the largest of each group."""
    own_amaxes: dict[tuple[str, int | None], Tensor] = {}
    for stored, matrix in packed.items():
        amax = torch.stack(
            [measure_amax(w_RK, matrix.spec).amax() for w_RK in rows_of(model, stored)]
        ).amax()
        if not bool(amax.isfinite()):
            raise UserError(f"{model.saved.path}: the weight of {matrix.layer.name} is not finite")
        if has_tensor_amax(matrix.spec):
            key = matrix.layer.name, matrix.expert
            own_amaxes[key] = torch.maximum(own_amaxes.get(key, amax), amax)
    complete = {}
    for stored, matrix in packed.items():
        names = matrix.layer.fused or (matrix.layer.name,)
        group = [
            own_amaxes[name, matrix.expert] for name in names if (name, matrix.expert) in own_amaxes
        ]
        if group:
            amax = torch.stack(group).amax()
            own_amax = own_amaxes[matrix.layer.name, matrix.expert]
            matrix = replace(matrix, amax=amax, shares=not torch.equal(amax, own_amax))
        complete[stored] = matrix
    return complete
