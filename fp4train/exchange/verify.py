"""`fp4train verify FOLDER against=RUN`: whether an export has the numbers of the run, tensor by
tensor.

What the folder should hold is made again from the run's checkpoint, by the plan of the stretch that
the folder names, and compared in every bit: codes, block scales, global scales, what is in high
precision; names, shapes, dtypes; configuration and tokenizer. The scales of activations are no
numbers of training. They must be finite, above 0, and one for layers that are fused.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4train.checkpoint.layout import STATE_LIMIT
from fp4train.checkpoint.model_folder import (
    CONFIG,
    has_file,
    is_model_folder,
    open_weights,
    read_config,
    read_table,
)
from fp4train.checkpoint.reading import StoredTensors
from fp4train.checkpoint.source import WeightSource
from fp4train.checkpoint.tensors import StreamedTensor
from fp4train.errors import UserError, user_errors
from fp4train.exchange.folder import write_json
from fp4train.exchange.foreign import SETTINGS, UNREAD, foreign_files
from fp4train.exchange.formats import LAYOUTS, MODELOPT, configuration, modelopt_configuration
from fp4train.exchange.huggingface import CARD, DTYPES, RECORD, SPELLED, write_tables
from fp4train.exchange.loaded import loaded_differently
from fp4train.exchange.packed import PackedLayer, PackedModel, pack
from fp4train.exchange.stored import StoredModel, open_stored
from fp4train.exchange.tokenizer import TOKENIZER, stored_tokenizer
from fp4train.files import Folder
from fp4train.text import first_few, near_miss, shortened

_NAMED = 3
"""So many tensors of each kind of difference are named."""
_SHOWN = 160
"""Characters of a value in a difference: lists of experts have thousands of names."""
_QUANTISED = ("quantization_config", "quantization")
"""Keys of tables that say how weights are quantised, in `config.json` and in
`hf_quant_config.json`.
"""


@dataclass(frozen=True, kw_only=True)
class VerifiedLayer:
    """Comparison of one layer, or of another module with weights, between run and folder.

    Args:
        name: name in the run.
        module: name in the folder.
        form: "NVFP4", "bfloat16".
        parts: tensors that were compared, by the last part of their names.
        differences: a sentence each; none: all are equal.
    """

    name: str
    module: str
    form: str
    parts: tuple[str, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The comparison of a folder with a run; `others`: differences that are of no layer."""

    folder: Path
    source: WeightSource
    layout: str
    stretch: str | None
    layers: list[VerifiedLayer] = field(repr=False)
    others: list[str]

    @property
    def title(self) -> str:
        """The origin of the weights."""
        return self.source.title

    @property
    def equal(self) -> bool:
        return not self.others and not any(layer.differences for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """The verification as plain values."""
        origin = {
            "folder": str(self.folder),
            "run": str(self.source.path),
            "step": self.source.step,
            "to": self.layout,
        }
        layers = [
            {**vars(layer), "parts": [*layer.parts], "differences": [*layer.differences]}
            for layer in self.layers
        ]
        return {
            **origin,
            "stretch": self.stretch,
            "equal": self.equal,
            "differences": self.others,
            "layers": layers,
        }


def verify(folder: Path, source: WeightSource | Path, *, stretch: int | None = None) -> Verified:
    """Compare a folder that `fp4train export` wrote with a run.

    Args:
        source: weights of the run; of a path those that the folder names, or the newest.
        stretch: a step of the stretch of the codes; None: as the folder says, or as the export
            chooses.

    Raises:
        UserError: the folder is no model, or damaged so that its tensors cannot be read; or the run
            cannot be exported.
    """
    if not is_model_folder(folder):
        run = WeightSource.of(source).path
        if is_model_folder(run):
            raise UserError(
                f"{folder} is no exported folder, and {run} is one, which stands first: fp4train "
                f"verify {run} against={folder}"
            )
        if folder.is_dir():
            why = f"it has no {CONFIG}"
        elif folder.exists():
            why = "it is a file"
        else:
            why = "there is no such folder"
        raise UserError(
            f"{folder} is no exported folder: {why}. Name the folder that fp4train "
            f"export {run} wrote: fp4train verify FOLDER against={run}"
        )
    config = read_config(folder)
    layout = layout_of(folder, config)
    source = WeightSource.of(source)
    if has_file(folder, RECORD):
        record = read_table(folder, RECORD)
        kind = record.get("weights")
        if source == WeightSource(path=source.path) and isinstance(kind, str):
            source = replace(source, kind=kind)
        source = replace(source, step=_named_or(record.get("step"), source.step))
        steps = record.get("stretch")
        if isinstance(steps, list) and steps:
            stretch = _named_or(steps[0], stretch)
    tensors = open_weights(folder)
    model = open_stored(source)
    dtypes = {name: dtype for dtype, name in SPELLED.items()}
    dtype = dtypes.get(str(config.get("dtype")))
    if dtype is None:
        raise UserError(
            f"{folder}: dtype={config.get('dtype')!r} in config.json is none of {', '.join(DTYPES)}"
        )
    packed = None
    if layout != "hf":
        before = f"{folder} has codes that an export of this run does not write: "
        with user_errors(UserError, before=before):
            packed = pack(model, layout, stretch)
    comparison = _Comparison(
        folder=folder, tensors=tensors, model=model, packed=packed, dtype=dtype
    )
    tables = list(comparison.tables())
    if not tables:  # else the tokenizer may be another one
        tables += loaded_differently(folder, stored_tokenizer(model.config, model.run))
    return Verified(
        folder=folder,
        source=model.source,
        layout=layout,
        stretch=None if packed is None else packed.stretch.title,
        layers=list(comparison.layers()),
        others=[*comparison.names(), *tables],
    )


def layout_of(folder: Path, config: Mapping[str, Any]) -> str:
    """ "hf", or the layout of a folder of codes.

    Raises:
        UserError: it is quantised in another way.
    """
    quantised = config.get("quantization_config")
    if quantised is None:
        return "hf"
    if isinstance(quantised, dict):
        method = quantised.get("quant_method")
    else:
        method = quantised
    if method not in LAYOUTS:
        raise UserError(
            f"{folder}: quant_method={method!r} is none that fp4train writes ({', '.join(LAYOUTS)})"
            f"{near_miss(str(method), LAYOUTS)}"
        )
    return str(method)


def _named_or(recorded: object, named: int | None) -> int | None:
    """The step that is named, or else the recorded one, where it is a step."""
    if named is not None:
        return named
    if type(recorded) is int and recorded >= 0:
        return recorded
    return None


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """A folder beside what the export of `model` in `dtype` would hold, with the codes of `packed`;
    None: it has none.
    """

    folder: Path
    tensors: StoredTensors
    model: StoredModel
    packed: PackedModel | None
    dtype: torch.dtype

    def expected(self, stored: str, x_amax: float | None = None) -> Iterator[StreamedTensor]:
        """Tensors that a stored weight has in the folder; without `x_amax` not the scale of its
        activations.
        """
        if self.packed is not None and stored in self.packed.layers:
            yield from self.packed.tensors_of(self.packed.layers[stored], x_amax)
        else:
            yield self.model.streamed(stored, self.dtype)

    def layers(self) -> Iterator[VerifiedLayer]:
        packed = {} if self.packed is None else self.packed.layers
        beside = _beside(packed)
        for stored in self.model.parts:
            layer = packed.get(stored)
            expected = list(self.expected(stored))
            differences = [
                difference
                for tensor in expected
                for difference in _differences(self.tensors, tensor)
            ]
            parts = [tensor.name.rpartition(".")[2] for tensor in expected]
            if layer is not None and layer.format.static:
                *_, scale = self.expected(stored, 1.0)
                part = scale.name.rpartition(".")[2]
                parts.append(part)
                differences += self._of_activations(layer.module, beside[stored], part)
            yield VerifiedLayer(
                name=stored.partition("/")[2].removesuffix(".weight"),
                module=expected[0].name.rpartition(".")[0],
                form=SPELLED[expected[0].dtype] if layer is None else layer.format.name,
                parts=tuple(parts),
                differences=tuple(differences),
            )

    def _of_activations(self, module: str, beside: str, part: str) -> Iterator[str]:
        """What is wrong with the scale `part` of a module's activations, which is that of the
        module `beside` it, too.
        """
        name = f"{module}.{part}"
        other = f"{beside}.{part}"
        if name not in self.tensors:
            yield f"{part} is missing"
            return
        value = self.tensors[name]
        if value.numel() != 1 or not bool(((value > 0) & value.isfinite()).all()):
            yield f"{part} is {value.tolist()}: it must be a finite number above 0"
        elif other in self.tensors and not torch.equal(self.tensors[other], value):
            yield f"{part} differs from that of {beside}, which is multiplied with it"

    def names(self) -> Iterator[str]:
        """Tensors of the folder that the run has not."""
        expected = {
            tensor.name for stored in self.model.parts for tensor in self.expected(stored, 1.0)
        }
        strange = sorted(name for name in self.tensors if name not in expected)
        if strange:
            yield f"the run has no {first_few(strange, _NAMED)}"

    def tables(self) -> Iterator[str]:
        """Differences of configuration, tokenizer and files from those that an export writes."""
        packed = self.packed
        config: dict[str, Any] = {"dtype": SPELLED[self.dtype]}
        if packed is not None:
            config["quantization_config"] = configuration(packed.format, packed.layout, packed.kept)
        with (
            tempfile.TemporaryDirectory() as place,
            Folder.open(Path(place)) as export,
            Folder.open(self.folder) as theirs,
        ):
            write_tables(export, self.model, config)
            if packed is not None and packed.layout == MODELOPT:
                table = modelopt_configuration(packed.format, packed.kept)
                write_json(export, "hf_quant_config.json", {_QUANTISED[1]: table[_QUANTISED[1]]})
            written = export.names()
            yield from foreign_files(self.folder, {*written, *self.tensors.files, CARD, RECORD})
            for name in sorted(written):
                if not has_file(self.folder, name):
                    yield f"{name} is missing"
                elif name.endswith(".json"):
                    table = read_table(self.folder, name)
                    yield from _of_table(name, table, read_table(Path(place), name))
                elif theirs.read(name, STATE_LIMIT) != export.read(name, STATE_LIMIT):
                    yield f"{name} is not that of the run"


def _differences(tensors: StoredTensors, expected: StreamedTensor) -> Iterator[str]:
    """Differences of one tensor from the expected one: presence, shape, dtype, or the first unequal
    row.
    """
    part = expected.name.rpartition(".")[2]
    if expected.name not in tensors:
        yield f"{part} is missing"
        return
    shape = tensors.shape(expected.name)
    dtype = tensors.dtype(expected.name)
    if (shape, dtype) != (expected.shape, expected.dtype):
        yield f"{part} is {dtype} {list(shape)} instead of {expected.described}"
        return
    if not shape or shape == (1,):
        (value,) = expected.pieces()
        yield from _of_one(part, tensors[expected.name].reshape(()), value.reshape(()))
        return
    count = 0
    first_row = -1
    row = 0
    for piece in expected.pieces():
        rows = piece.shape[0]
        box = tensors.read(expected.name, (row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        unequal = _bits(box) != _bits(piece)
        if first_row < 0 and bool(unequal.any()):
            first_row = row + int(unequal.reshape(rows, -1).any(1).int().argmax())
        count = count + int(unequal.sum())
        row = row + rows
    if count:
        values = box.numel() // rows * row
        yield f"{count:,} of {values:,} values of {part} differ, from row {first_row} on"


def _of_one(part: str, value: Tensor, expected: Tensor) -> Iterator[str]:
    if torch.equal(_bits(value.reshape(1)), _bits(expected.reshape(1))):
        return
    inverse = expected.float().reciprocal()
    how = ""
    if torch.isclose(value.float(), inverse, rtol=1e-6, atol=0.0):
        how = ", which is its reciprocal: one layout divides by it, the other multiplies"
    elif value.dtype == torch.float32:
        ulps = abs(int(value.view(torch.int32)) - int(expected.view(torch.int32)))
        how = f", {ulps} ulp apart" if ulps < 1000 else ""
    yield f"{part} is {float(value):.9g} instead of {float(expected):.9g}{how}"


def _bits(tensor: Tensor) -> Tensor:
    """Elements as integers: NaNs and signs of zeros count."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.dtype.itemsize])


def _beside(layers: Mapping[str, PackedLayer]) -> dict[str, str]:
    """Packed matrix → the module of the next one of those that share a scale of activations: of
    fused layers, or of a layer's experts; its own where there is no other.
    """
    groups: dict[tuple[str, ...], list[PackedLayer]] = {}
    for matrix in layers.values():
        groups.setdefault(matrix.layer.fused or (matrix.layer.name,), []).append(matrix)
    return {
        matrix.stored: group[n - 1].module
        for group in groups.values()
        for n, matrix in enumerate(group)
    }


def _of_table(name: str, theirs: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    have = _flat(theirs)
    expected_values = _flat(expected)
    for key, value in expected_values.items():
        if have.get(key) != value:
            if name == TOKENIZER:
                yield f"{name}: {key} is not that of the run"
                continue
            actual = shortened(repr(have.get(key)), _SHOWN)
            yield f"{name}: {key} is {actual} instead of {shortened(repr(value), _SHOWN)}"
    more = {
        key: value
        for key, value in have.items()
        if key not in expected_values and value is not None
    }
    for key in sorted(key for key in more if key.startswith(_QUANTISED)):
        yield f"{name}: {key} is {more.pop(key)!r}, and the export has none"
    if name in SETTINGS:
        for key, value in more.items():
            if key not in UNREAD:
                yield f"{name}: {key} is {shortened(repr(value), _SHOWN)}, and the export has none"


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table by their keys; what says how weights are quantised key by key."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if key in _QUANTISED and isinstance(value, dict):
            flat |= {f"{key}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            flat[key] = value
    return flat
