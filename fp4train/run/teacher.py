"""`teacher=RUN|FOLDER`: a model in high precision, whose distribution a run learns instead of the
targets alone.

Quantisation-aware distillation trains a quantised student against the model that it was before
(`models/common/distillation.py`): it moves less far from that model than training on the targets
does. The teacher has weights in the dtype of the run's activations, is whole on every rank, and
gets no gradients.
"""

import inspect
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fp4train.checkpoint.source import WeightSource
from fp4train.config import Config, to_config
from fp4train.config.from_folder import model_of
from fp4train.data.source import RunData, ready_tokenizer
from fp4train.data.tokens import Tokenizer
from fp4train.errors import UserError
from fp4train.models import Architecture
from fp4train.models.common.decoder import Decoder
from fp4train.models.common.distillation import TeacherStates
from fp4train.parallel.config import Mesh
from fp4train.parallel.sequences import share_sequences
from fp4train.parallel.world import World
from fp4train.precision.context import use
from fp4train.run.checks import set_masks
from fp4train.run.initial import open_source
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_paths, own_tokenizer, saved_with


class Teacher:
    """A model that answers with its hidden states; called with tokens [B, T], on the device of the
    run.
    """

    def __init__(self, model: Decoder, config: Config) -> None:
        self.model = model
        self.settings = config.distillation
        self.fingerprint = _fingerprint(model)

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> TeacherStates:
        with use(None):
            h_MD = self.model(tokens_BT)
        return TeacherStates(
            h_MD, self.model.head.weight, self.settings.temperature, self.settings.ce
        )


def _fingerprint(model: nn.Module) -> str:
    """A short sum over names, shapes and up to 1024 values of each weight."""
    total = 0
    for name, weight in model.state_dict().items():
        values = weight.flatten()
        sample = values[:: -(-values.numel() // 1024)].to("cpu", torch.float32).numpy().tobytes()
        total = zlib.crc32(f"{name} {list(weight.shape)}".encode() + sample, total)
    return f"{total:08x}"


def load_teacher(config: Config, data: RunData, student: nn.Module, world: World) -> Teacher | None:
    """The teacher of a run; None: it has none.

    Raises:
        UserError: there is no such model, or it does not fit the student or its tokens.
    """
    if config.teacher is None:
        return None
    model = _fitting(config, _build(config, data, world), student)
    if config.recipe.dtype == "float32":
        dtype = torch.float32
    else:
        dtype = torch.bfloat16
    model = model.to(world.device, dtype).eval().requires_grad_(False)
    set_masks(model, config, data.borders)
    share_sequences(model, world)
    model.hidden = True
    return Teacher(model, config)


def check_teacher_source(config: Config, mesh: Mesh, tokenizer_of: Path | None) -> None:
    """Refuse a teacher before the data of the run is read.

    Args:
        tokenizer_of: the run directory whose tokenizer the run takes over, if it keeps one.

    Raises:
        UserError: there are no such weights, they are those of another tokenizer, or the ranks
            cannot have a teacher.
    """
    named = config.teacher_weights
    if named is None:
        return
    if mesh.tensor * mesh.pipeline > 1:
        raise UserError(
            f"teacher={config.teacher}: the loss needs the whole vocabulary and all blocks on a "
            f"rank, and the run has parallel.tp={mesh.tensor} and parallel.pp={mesh.pipeline}; "
            "use data parallelism (parallel.dp_shard) alone"
        )
    tokenizer = ready_tokenizer(config.data, tokenizer_of)
    with _teacher_errors(named.path):
        open_source(named, _shape(named, tokenizer), verify=False)


def check_teacher(
    config: Config, student: nn.Module, vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Refuse a teacher that a start would refuse, as far as that is seen without its weights.

    Args:
        vocab_size: token ids of the run.
        tokenizer: the run's tokenizer; None: it is not known before a start.

    Raises:
        UserError: see `load_teacher`.
    """
    named = config.teacher_weights
    if named is None:
        return
    with _teacher_errors(named.path):
        shape = _shape(named, tokenizer)
        with torch.device("meta"):
            model = shape.build(vocab_size=vocab_size, seq_len=config.train.seq_len)
        open_source(named, shape, verify=False).check(model)
    _fitting(config, model, student)


def _fitting(config: Config, model: nn.Module, student: nn.Module) -> Decoder:
    """The teacher `model`, if the student can learn from it.

    Raises:
        UserError: one of them is no model for that, or their vocabularies differ.
    """
    what = f"teacher={config.teacher}"
    if "teacher" not in inspect.signature(student.forward).parameters:
        raise UserError(f"{what}: {type(student).__name__} does not take a teacher (Decoder.leave)")
    if not isinstance(model, Decoder) or not isinstance(student, Decoder):
        raise UserError(
            f"{what}: {type(model).__name__} has no hidden states to learn from (Decoder)"
        )
    rows = model.head.weight.shape[0]
    student_rows = student.head.out_features
    if rows != student_rows:
        raise UserError(
            f"{what} has {rows:,} ids and the student {student_rows:,}: both need the same "
            "vocabulary"
        )
    return model


@contextmanager
def _teacher_errors(source: Path) -> Iterator[None]:
    """Errors of the teacher's weights, as those of `teacher`."""
    try:
        yield
    except (UserError, ValueError) as error:
        reason = str(error).removeprefix("init: ").replace(f"init={source}", str(source))
        raise UserError(f"teacher={source}: {reason}") from error


def _build(config: Config, data: RunData, world: World) -> nn.Module:
    """The teacher with its weights."""
    named = config.teacher_weights
    assert named is not None
    with _teacher_errors(named.path):
        shape = _shape(named, data.tokenizer)
        weights = open_source(named, shape, world.ranks)
        with torch.random.fork_rng(devices=[]):  # drawn, and then replaced
            model = shape.build(vocab_size=data.vocab_size, seq_len=config.train.seq_len)
        weights.load(model)
    return model


def _shape(named: WeightSource, tokenizer: Tokenizer | None) -> Architecture:
    """The `model=…` of the teacher.

    Args:
        tokenizer: the run's tokenizer; None: it has none, or is not known.
    """
    source = named.path
    if named.is_folder:
        shape: Architecture = model_of(source)[1]
        return shape
    cfg = saved_with(run_directory.read_trained(source), source, None, {})
    theirs = to_config(cfg)
    if tokenizer is None:
        return theirs.model
    teacher_tokenizer = own_tokenizer(theirs, source, lambda lost: check_paths(cfg, ()))
    if teacher_tokenizer is not None and teacher_tokenizer.identity != tokenizer.identity:
        raise UserError(
            "its tokenizer is another than the run's, so that their tokens are not the same"
        )
    return theirs.model
