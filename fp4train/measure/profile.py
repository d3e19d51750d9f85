"""torch's profiler on some steps of a run (`profile.steps`), into RUN/profile.

A trace is Chrome's JSON, compressed: Perfetto (ui.perfetto.dev) and chrome://tracing show it. Its
spans are named by step, layer, GEMM, formats and backend:

    step 100 NVFP4
    blocks.0.attention.query forward                          the layer; in it its product:
    blocks.0.attention.query fprop E2M1xE2M1 emulate          what is left is quantising
    blocks.0.attention.query backward                         likewise, with
    blocks.0.attention.query dgrad E2M1xE2M1 emulate
    blocks.0.attention.query wgrad E2M1xE2M1 emulate

A layer whose products others run together (torch in high precision, Transformer Engine) has a span
for each pass, which names all of its products. Compiled blocks (train.compile) and replayed steps
(train.cuda_graph) run no code of layers, and have the spans of steps alone.

No bit of a run changes. A recorded step takes longer, and the loop waits while a trace is written.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.profiler import ProfilerActivity, profile, record_function

from fp4train.companion import RunCompanion
from fp4train.nn.engine import Executor
from fp4train.nn.executors.cut import SummedProduct
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.groups import GroupGemms
from fp4train.nn.executors.parts import ChannelParts
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.layer_plan import Gemm

_log = logging.getLogger(__name__)

FOLDER = "profile"
"""RUN/profile: the traces."""
_EVENTS = 100_000
"""Allocations that a memory snapshot has at most."""
_PASSED = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ToCopyBackward0",
)
"""Nodes of autograd between the output of a layer and its products."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What torch's profiler records of a run.

    Args:
        steps: the first and the last step that are recorded, as the metrics number them; one number:
            that step; none: nothing is.
        memory: whether allocations are recorded. A GPU's are written as a snapshot
            (pytorch.org/memory_viz) after the last of these steps, and where its memory runs out.
        ranks: the ranks that record.
    """

    steps: tuple[int, ...] = ()
    memory: bool = False
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.steps and not (len(self.steps) <= 2 and 1 <= self.steps[0] <= self.steps[-1]):
            raise ValueError(
                f"profile.steps={list(self.steps)} must be the first and the last step that are "
                "recorded, from 1: [100,103]"
            )
        if not self.ranks or min(self.ranks) < 0:
            raise ValueError(f"profile.ranks={list(self.ranks)} must be numbers of ranks: [0]")


class Profiler(RunCompanion):
    """Records the steps of `profile.steps` on this rank, if it is one of `profile.ranks`."""

    folders: ClassVar = (FOLDER,)

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        settings: ProfileSettings = run.config.profile
        rank = run.world.place.rank
        self._mine = rank in settings.ranks
        self._range = f"{settings.steps[0]}-{settings.steps[-1]}" if settings.steps else "none"
        self._name = f"steps_{self._range}_rank_{rank}"
        self._settings = settings
        self._running: profile | None = None
        self._snapshots = self._mine and settings.memory and run.device.type == "cuda"

    @classmethod
    def used(cls, config: Any) -> bool:
        """Whether a run of this configuration records anything."""
        return bool(config.profile.steps) or config.profile.memory

    def begin(self, run: Any) -> None:
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def before_step(self, run: Any) -> None:
        first, last = self._settings.steps[:1], self._settings.steps[-1:]
        if not (self._mine and first and first[0] <= run.step + 1 <= last[0]) or self._running:
            return
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities, record_shapes=True, profile_memory=self._settings.memory
        )
        self._running.start()

    @contextmanager
    def around_step(self, run: Any, recipe: Any) -> Iterator[None]:
        """Name the step and its layers in the trace."""
        if self._running is None:
            yield
            return
        layers = () if run.config.train.compile else run.planned_layers
        with record_function(f"step {run.step + 1} {recipe.name}"), spans(layers):
            yield

    def after_step(self, run: Any, step: Any) -> None:
        if self._running is not None and step.index + 1 == self._settings.steps[-1]:
            self._write(run)

    def close(self, run: Any, error: BaseException | None) -> None:
        if self._running is not None:
            self._write(run)
        if self._snapshots:
            if isinstance(error, torch.OutOfMemoryError):
                self._snapshot(run, f"out_of_memory_rank_{run.world.place.rank}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, run: Any) -> None:
        """End the recording and write it; a disk that does not take it ends no run."""
        assert self._running is not None
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        self._running.stop()
        trace = self._running
        self._running = None
        self._kept(run, f"{self._name}.json.gz", lambda path: trace.export_chrome_trace(str(path)))
        if self._snapshots:
            self._snapshot(run, f"{self._name}_memory.pickle")

    def _snapshot(self, run: Any, name: str) -> None:
        dump: Callable[[str], None] = torch.cuda.memory._dump_snapshot
        self._kept(run, name, lambda path: dump(str(path)))

    def _kept(self, run: Any, name: str, write: Callable[[Path], object]) -> None:
        path = run.directory / FOLDER / name
        try:
            run.record.folder.folder(
                FOLDER, create=True
            ).close()  # a folder of the run, and no link
            write(path)
        except (OSError, RuntimeError) as error:
            _log.warning("%s is not written: %s", path, error)
        else:
            _log.info("profile: %s", path)


# -- spans -----------------------------------------------------------------------------------------


@contextmanager
def spans(layers: Iterable[PlannedLayer]) -> Iterator[None]:
    """A context in which a profiler sees the passes of layers, and their products, by name."""
    with ExitStack() as stack:
        for layer in layers:
            executor = layer.applied
            if executor is not None:
                stack.enter_context(_of_passes(layer, executor))
                for gemms in _gemms(executor):
                    stack.enter_context(_of_products(gemms, layer.layer.name))
        yield


def _gemms(executor: Executor) -> list[Gemms]:
    """The executors of single products in an executor; none: others run them together."""
    if isinstance(executor, GroupGemms):
        return _gemms(executor.member)
    if isinstance(executor, ChannelParts):
        parts = () if executor.split is None else executor.split.of_parts
        return [executor.whole, *parts]
    return [executor] if isinstance(executor, Gemms) else []


@contextmanager
def _of_passes(layer: PlannedLayer, executor: Executor) -> Iterator[None]:
    name = layer.layer.name
    plan = executor.plan
    forward_name = f"{name} forward"
    backward_name = f"{name} backward"
    if not _gemms(executor):
        forward_name = _title(name, plan.fprop)
        backward_name = f"{_title(name, plan.dgrad)}, {_title('', plan.wgrad)}"
    begun: list[Any] = []

    def end(*of_hook: object) -> None:
        if begun:
            begun.pop().__exit__(None, None, None)

    def enter(title: str) -> None:
        span: Any = record_function(title)
        begun.append(span.__enter__())

    def end_forward(module: nn.Module, arguments: Any, output: Any) -> None:
        end()
        node = output.grad_fn if isinstance(output, Tensor) else None
        node = _products_node(node)
        if node is not None:
            node.register_prehook(lambda *of_hook: enter(backward_name))
            node.register_hook(end)

    handles = [
        layer.register_forward_pre_hook(lambda *of_hook: enter(forward_name)),
        layer.register_forward_hook(end_forward, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while begun:
            end()


def _products_node(node: Node | None) -> Node | None:
    """The node of a layer's products, from that of its output."""
    while node is not None and node.name() in _PASSED:
        node = node.next_functions[0][0]
    return node


@contextmanager
def _of_products(gemms: Gemms, name: str) -> Iterator[None]:
    backends = {gemm.name: getattr(gemms, gemm.name) for gemm in gemms.plan.gemms}
    for gemm in gemms.plan.gemms:
        title = _title(name, gemm)
        backend = backends[gemm.name]
        if isinstance(backend, SummedProduct):
            shown: Any = backend.summing_terms_of(_Spanned(backend.of_rank, title))
        else:
            shown = _Spanned(backend, title)
        setattr(gemms, gemm.name, shown)
    try:
        yield
    finally:
        for gemm_name, backend in backends.items():
            setattr(gemms, gemm_name, backend)


def _title(layer: str, gemm: Gemm) -> str:
    """ "blocks.0.up fprop E2M1xE2M1 emulate"; the profiler takes ASCII alone."""
    formats = gemm.elements.replace("·", "x")
    return f"{layer} {gemm.name} {formats} {gemm.backend}".strip()


class _Spanned:
    """A backend whose products are spans."""

    def __init__(self, backend: Any, title: str) -> None:
        self._backend = backend
        self._title = title

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def product(self, *operands: Any, **options: Any) -> Tensor:
        with record_function(self._title):
            product: Tensor = self._backend.product(*operands, **options)
            return product

    def add(self, *operands: Any) -> None:
        with record_function(self._title):
            self._backend.add(*operands)
