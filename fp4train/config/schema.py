"""The configuration of a run: YAML in, typed and checked objects out.

`configs/train.yaml` lists all keys. Groups (model, data, recipe, …) name their dataclass by
`_target_`, see `binding`. `to_config` turns the composed YAML into one `Config`; the code after it
works with typed objects only.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fp4train.audits.settings import AuditSettings
from fp4train.backends import CHOICES
from fp4train.checkpoint.source import WeightSource
from fp4train.companion import Companion
from fp4train.config.binding import bind
from fp4train.config.plugins import walk
from fp4train.data import Source
from fp4train.errors import UserError, check_local, user_errors
from fp4train.hardware import find_gpu
from fp4train.keys import CHANGES_COURSE, CHANGES_DIGITS, CHANGES_NOTHING, CHANGES_START
from fp4train.measure.profile import ProfileSettings
from fp4train.models import Architecture
from fp4train.optim import Optimizer
from fp4train.optim.oscillation import OscillationReset
from fp4train.optim.schedule import Schedule
from fp4train.parallel.config import Parallel
from fp4train.paths import DestinationText, PathText
from fp4train.precision import LayerPolicy, Phase, Recipe
from fp4train.text import check_choice, check_least, counted, first_line
from fp4train.track.config import Tracking

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

MOST_STEPS = 2**29 - 1
"""The random bits of stochastic rounding are keyed by the step, in 29 bits
(`fp4train.quantize.random`).
"""
MOST_THREADS = 1024
"""Threads of a rank: more than a machine has cores are a slip of the hand, and cost memory before
they are refused.
"""
MOST_TOKENS = 2**40
"""Tokens per step; more are a slip of the hand. Positions in the data stay below 2**63."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Name, directory and seed of a run; `overwrite` starts over in a directory that already holds
    a run.
    """

    name: Annotated[str, CHANGES_NOTHING]
    dir: Annotated[Path, CHANGES_NOTHING]
    seed: int = 0
    overwrite: Annotated[bool, CHANGES_NOTHING] = False

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError("run.name must not be empty: it names the run directory")
        parts = Path(self.name).parts
        if not parts or ".." in parts or Path(self.name).is_absolute():
            raise ValueError(
                f"run.name={self.name!r} must name a folder among the runs: without '..', not "
                "'.', no '/' at its start; for another place give run.dir=…"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"run.seed={self.seed} must lie between 0 and 2**63 - 1")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Length and batch of a run.

    Args:
        steps: optimizer steps.
        tokens: tokens of the whole run, as 1B, 500M or 1e9, from which `steps` follow before a run
            begins (`affordable_steps`); None where they are given.
        batch_size: sequences per step.
        microbatch: sequences per forward pass of a rank; None: all of its share of the batch. The
            gradient is that of the whole batch.
        seq_len: tokens per sequence.
        compile: whether torch.compile fuses the operations between the GEMMs of each block.
            Compiling takes a minute or more on a CPU. It saved 7 % of a BF16 step and 4 % of an
            NVFP4 step of llama_30m (2 cores, 2048 tokens). Fused operations round less often, and
            layers in high precision round dw of each microbatch to their dtype, so losses differ in
            the last digits from those of a run without it. Layers that share an input (queries,
            keys and values) quantise it once per layer.
        step_timeout: seconds after which a step that does not end ends the run, with the stacks of
            all threads on standard error; evaluations, checkpoints and the compiler's work count as
            part of their step. 0: never.
        deterministic: whether GPUs repeat a run to the bit, for a bit-exact resume there
            (`run/bits.py`); CPUs always do. Attention may be slower.
        cuda_graph: whether a step of each stretch of the plan is recorded as a CUDA graph and
            replayed (`run/step_graph.py`). Small models no longer wait for the host. Refused where
            a step depends on the host: on a CPU, on several ranks, with train.compile, FP16's loss
            scale, or TE's delayed scaling.
        threads: threads that CPUs compute with, of each rank; their number changes the order of
            sums, and so the last digits (`run/bits.py`). None: as many as torch takes by itself, a
            thread per core.
        kernels: kernels of norms, gates, rotations and the loss of the head: "torch"; "liger", its
            kernels for GPUs, an error where they do not run; "auto", liger's where they run
            (`models/common/liger.py`), and on a CPU C kernels of norms, gates and rotations, with
            which losses differ in no digit (`models/common/on_cpu.py`). Except with "torch",
            products on a GPU add up dw over microbatches, which "torch" leaves to autograd
            (`Executor.adds`), and AdamW's kernel clips, for which "torch" has a pass of its own
            (`run/step.py`). Losses differ in the last digits there. With train.compile the compiler
            has the blocks, and liger's what lies outside of them.
        keep_values: whether emulated layers keep what wgrad multiplies of x as values in BF16 for
            backward, and not as codes (4.5 bits per element in NVFP4, 8.25 in MXFP8), which each
            layer decodes. The operands are the same; `plan gpu=…` says the memory. Layers that
            ranks cut, and experts, keep codes.
        document_mask: whether tokens attend within their own document alone, where several are
            packed into a sequence (arXiv:2407.21783, section 3.2). Positions count from the start
            of the sequence; only distances matter.
        on_divergence: action when the loss is far above its past, besides a warning: "warn" goes
            on, "stop" ends the run, "rewind" goes back to the last good checkpoint and past the
            batches since (`run/supervise/divergence.py`).
        rewinds: number of times that a run goes back; the next divergence ends it.
        ema: decay per step of an exponential moving average of the weights, between 0 and 1
            (`run/state/weights.py`): evaluated beside them, saved, and named RUN:ema. None: none is
            kept.
    """

    steps: Annotated[int, CHANGES_COURSE]
    batch_size: int
    microbatch: Annotated[int | None, CHANGES_DIGITS]
    seq_len: int
    compile: Annotated[bool, CHANGES_DIGITS] = False
    step_timeout: Annotated[float, CHANGES_NOTHING] = 0.0
    deterministic: Annotated[bool, CHANGES_DIGITS] = False
    cuda_graph: bool = False
    threads: Annotated[int | None, CHANGES_DIGITS] = None
    kernels: Annotated[str, CHANGES_DIGITS] = "auto"
    keep_values: Annotated[bool, CHANGES_DIGITS] = False
    document_mask: bool = False
    on_divergence: Annotated[str, CHANGES_NOTHING] = "warn"
    rewinds: Annotated[int, CHANGES_NOTHING] = 5
    ema: float | None = None
    tokens: str | int | None = None

    def __post_init__(self) -> None:
        check_choice("train.kernels", self.kernels, ("auto", "torch", "liger"))
        check_choice("train.on_divergence", self.on_divergence, ("warn", "stop", "rewind"))
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"train.ema={self.ema} must lie between 0 and 1, or be null for none")
        check_least(self, "train.", "rewinds", least=0, must="a number of times, or 0 for none")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ValueError(
                f"train.threads={self.threads} must lie between 1 and {MOST_THREADS}, or be null"
            )
        if not 0 <= self.step_timeout <= 1e9:
            raise ValueError(
                f"train.step_timeout={self.step_timeout} must be a number of seconds, or 0 "
                "for no limit"
            )
        check_least(self, "train.", "steps", "batch_size", "seq_len")
        if self.steps > MOST_STEPS:
            raise ValueError(f"train.steps={self.steps} must be at most {MOST_STEPS}")
        if self.step_tokens > MOST_TOKENS:
            factors = f"train.batch_size={self.batch_size} × train.seq_len={self.seq_len}"
            raise ValueError(
                f"{factors} is {self.step_tokens:.3g} tokens per step, and at most {MOST_TOKENS:.3g} "
                "are possible"
            )
        if self.steps * self.batch_size >= 2**63:
            raise ValueError(
                f"train.steps={self.steps} × train.batch_size={self.batch_size} must be below 2**63"
            )
        if self.microbatch is not None and (
            self.microbatch < 1 or self.batch_size % self.microbatch
        ):
            raise ValueError(
                f"train.microbatch={self.microbatch} does not divide "
                f"train.batch_size={self.batch_size}"
            )

    def affordable_steps(self) -> int:
        """The steps that `tokens` are enough for.

        Raises:
            UserError: it is no number of tokens, or less than a step takes.
        """
        budget = str(self.tokens)
        factor = _UNITS.get(budget[-1:].upper())
        number = budget if factor is None else budget[:-1]
        with suppress(ArithmeticError, ValueError):
            tokens = int(Decimal(number) * (factor or 1))
            steps, left = divmod(tokens, self.step_tokens)
            if steps > 0:
                text = "train.tokens=%s: %s of %s tokens, %s left over"
                enough = counted(steps, "step")
                _log.info(text, budget, enough, f"{self.step_tokens:,}", f"{left:,}")
                return steps
        raise UserError(
            f"train.tokens={self.tokens} must be a number of tokens, as 1B, 500M or 1e9, and a step "
            f"has {self.step_tokens:,}"
        )

    @property
    def whole_weights(self) -> str | None:
        """The option for which blocks take float32 weights, whatever `parallel.gather` says; None:
        none does.
        """
        return "train.compile" if self.compile else None

    def rows(self, ranks: int) -> int:
        """Sequences of a forward pass of each of so many data ranks."""
        return self.microbatch or self.batch_size // ranks

    @property
    def microbatches(self) -> int:
        """Forward passes per step on one rank."""
        return self.batch_size // self.rows(1)

    @property
    def step_tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluate every `every` steps (0: at the end only) on at most `batches` batches of held-out
    sequences, each once; measure the quantisation errors of every layer and operand every
    `errors_every` steps (0: never).

    Args:
        command: shell command that runs beside training when a checkpoint is whole (`run/judge.py`);
            {run} and {step} in it are those of the checkpoint.
        tasks: tasks of lm_eval that are evaluated on each checkpoint beside training.
    """

    every: int
    batches: int
    errors_every: int = 0
    command: DestinationText | None = None
    tasks: tuple[DestinationText, ...] = ()

    def __post_init__(self) -> None:
        check_least(
            self, "eval.", "every", least=0, must="a number of steps, or 0 for the end only"
        )
        check_least(
            self, "eval.", "errors_every", least=0, must="a number of steps, or 0 for never"
        )
        check_least(self, "eval.", "batches")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Save every `every` steps (0: at the end only) and keep the newest `keep`.

    A checkpoint is written while the next steps run, from a copy of weights and moments in main
    memory.

    Args:
        also: a folder on a store that gets a copy of the run, `also`/NAME of the run's directory.
        keep_before_cooldown: beside the newest, keep the last checkpoint from before the schedule's
            cooldown, from which a finished run is extended; it costs the disk one checkpoint more.
        milestones: beside the newest, keep so many older ones at growing distance: with keep=2 and
            every=100 one that is 200 to 800 steps old, one of 800 to 3,200 steps, … They cost the
            disk a checkpoint each.
    """

    every: int
    keep: int
    also: DestinationText | None = None
    keep_before_cooldown: bool = True
    milestones: int = 0

    def __post_init__(self) -> None:
        check_least(
            self, "checkpoint.", "every", least=0, must="a number of steps, or 0 for the end only"
        )
        check_least(self, "checkpoint.", "keep")
        if self.also is not None:
            if "://" not in self.also or self.also.startswith("file:"):
                raise ValueError(
                    f"checkpoint.also={self.also} must be a folder on a store, s3://BUCKET/FOLDER; "
                    "to another disk copy the run, whole at any moment: rsync -a runs/a OTHER"
                )
            check_local(self.also, "checkpoint.also", stores=True)
        if not 0 <= self.milestones <= 32:
            raise ValueError(
                f"checkpoint.milestones={self.milestones} must be a number of checkpoints, at "
                "most 32"
            )


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """How a run learns from its teacher.

    Args:
        temperature: divisor of the logits of both; higher ones show more of the unlikely tokens.
        ce: weight of the cross-entropy of the targets, beside the loss against the teacher.
    """

    temperature: float = 1.0
    ce: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 1e3:
            raise ValueError(
                f"distillation.temperature={self.temperature} must be above 0 and at most 1000"
            )
        if not 0 <= self.ce <= 1e6:
            raise ValueError(f"distillation.ce={self.ce} must be a weight, or 0 for none")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run is made from.

    Args:
        backend: executes the GEMMs; one of `BACKENDS`.
        device: "auto", "cpu", "cuda" or "cuda:N".
        gpu: the GPU that `fp4train plan` estimates times for; None estimates none.
        resume: the run directory to go on from.
        plugins: packages that the command line named; kept with the run for information.
        resume_step: the kept checkpoint of `resume` to go on from; None: the newest.
        init: the weights that a new run begins with (`checkpoint/source.py`): of a run, RUN or
            RUN@STEP:KIND, or of a Hugging Face folder; data, schedule and step are its own, and of
            a folder it has model and tokenizer (`config/from_folder.py`).
        init_step: the kept checkpoint of `init`; None: the newest.
        teacher: the weights of the model whose distribution the run learns, named as those of
            `init`.
        teacher_step: the kept checkpoint of `teacher`; None: the newest.
        hooks: classes of users that hear of each step (`fp4train.companion`).
        (The other fields hold one object for each section of `configs/train.yaml`.)
    """

    run: RunSettings
    train: TrainSettings
    eval: Annotated[EvalSettings, CHANGES_NOTHING]
    checkpoint: Annotated[CheckpointSettings, CHANGES_NOTHING]
    model: Architecture
    data: Source
    optim: Annotated[Optimizer, CHANGES_COURSE]
    schedule: Annotated[Schedule, CHANGES_COURSE]
    recipe: Annotated[Recipe, CHANGES_COURSE]
    policy: Annotated[LayerPolicy, CHANGES_COURSE]
    phases: Annotated[Mapping[str, Phase], CHANGES_COURSE]
    track: Annotated[Tracking, CHANGES_NOTHING]
    backend: Annotated[str, CHANGES_DIGITS]
    device: Annotated[str, CHANGES_DIGITS]
    gpu: Annotated[str | None, CHANGES_NOTHING]
    resume: Annotated[PathText | None, CHANGES_NOTHING]
    plugins: Annotated[tuple[str, ...], CHANGES_NOTHING] = ()
    resume_step: Annotated[int | None, CHANGES_NOTHING] = None
    init: Annotated[PathText | None, CHANGES_START] = None
    init_step: Annotated[int | None, CHANGES_START] = None
    teacher: Annotated[PathText | None, CHANGES_DIGITS] = None
    teacher_step: Annotated[int | None, CHANGES_DIGITS] = None
    distillation: DistillationSettings = field(default_factory=DistillationSettings)
    parallel: Annotated[Parallel, CHANGES_DIGITS] = field(default_factory=Parallel)
    oscillation: OscillationReset = field(default_factory=OscillationReset)
    audit: Annotated[AuditSettings, CHANGES_NOTHING] = field(default_factory=AuditSettings)
    profile: Annotated[ProfileSettings, CHANGES_NOTHING] = field(default_factory=ProfileSettings)
    hooks: Annotated[tuple[Companion, ...], CHANGES_NOTHING] = ()

    @property
    def resumed(self) -> WeightSource | None:
        """The checkpoint that a run goes on from; None: it names none."""
        if self.resume is None:
            return None
        return WeightSource(path=Path(self.resume), step=self.resume_step)

    @property
    def init_weights(self) -> WeightSource | None:
        """The weights that a new run begins with; None: it draws its own."""
        if self.init is None:
            return None
        return WeightSource.parse(self.init, self.init_step)

    @property
    def teacher_weights(self) -> WeightSource | None:
        """The weights of the teacher; None: there is none."""
        if self.teacher is None:
            return None
        return WeightSource.parse(self.teacher, self.teacher_step)

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, CHOICES)
        if self.gpu is not None:
            find_gpu(self.gpu)
        for name, run in (("resume", self.resume), ("init", self.init), ("teacher", self.teacher)):
            step = getattr(self, f"{name}_step")
            if step is not None and (run is None or step < 0):
                raise ValueError(
                    f"{name}_step={step} is the step of a checkpoint of {name}=RUN: give both"
                )
        for name in ("init_weights", "teacher_weights"):
            getattr(self, name)  # refused where the text and the option name a step each


def to_config(cfg: DictConfig) -> Config:
    """The typed configuration of a composed one.

    Raises:
        UserError: a key, a value or a `_target_` that does not fit; the message says which, and
            what is allowed.
    """
    config = bind(plain(cfg), Config, "")
    assert isinstance(config, Config)
    return config


def plain(cfg: DictConfig, *, resolve: bool = True) -> dict[str, Any]:
    """A composed configuration as plain values, its interpolations resolved.

    Raises:
        UserError: an interpolation leads nowhere.
    """
    with user_errors(OmegaConfBaseException, before="configuration: ", message=first_line):
        container = OmegaConf.to_container(cfg, resolve=resolve)
    assert isinstance(container, dict)
    return {key: value for key, value in container.items() if isinstance(key, str)}


def keys(node: Mapping[str, Any]) -> Iterator[str]:
    """The dotted keys of all values in a plain configuration; a list is one value."""
    return (where for where, *_ in walk(node) if "[" not in where)


def take_over(target: DictConfig, source: DictConfig, key: str) -> bool:
    """Let `target` have what `source` has under a full key; where that has no such key, let it have
    none either.

    Returns:
        Whether one of them had the key.
    """
    if not _has(source, key):
        return take_out(target, key)
    value = OmegaConf.select(source, key)
    OmegaConf.update(target, key, value, merge=False, force_add=True)
    return True


def take_out(cfg: DictConfig, key: str) -> bool:
    """Take a full key out of a configuration, if it is there; returns whether it was."""
    if not _has(cfg, key):
        return False
    section, _, name = key.rpartition(".")
    with open_dict(cfg):
        del (OmegaConf.select(cfg, section) if section else cfg)[name]
    return True


def _has(cfg: DictConfig, key: str) -> bool:
    """Whether a configuration has a full key, null or not."""
    section, _, name = key.rpartition(".")
    values = OmegaConf.select(cfg, section) if section else cfg
    return OmegaConf.is_dict(values) and name in values


def is_entry(key: str) -> bool:
    """Whether a full key names an entry of a section that has any number of them: a phase."""
    section, _, name = key.partition(".")
    kind = get_type_hints(Config).get(section)
    return bool(name) and "." not in name and get_origin(kind) is Mapping
