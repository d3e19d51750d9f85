"""Training steps that scripts/benchmark.py measures: the default run and larger ones, in every recipe."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from benchmark_report import Report, in_turn
from omegaconf import DictConfig
from torch import Tensor, nn

from fp4train.config import RECIPES
from fp4train.config.composition import compose
from fp4train.config.schema import to_config
from fp4train.data.source import planned_vocab_size
from fp4train.nn import Experts
from fp4train.precision import BF16, MXFP8, NVFP4, Recipe, Timeline
from fp4train.precision.context import Context, use
from fp4train.precision.plan import Plan
from fp4train.run.build import build, build_plan
from fp4train.run.experts import Routed
from fp4train.run.find import Command, new_origin
from fp4train.run.host import CollectorBetweenSteps
from fp4train.run.run import Run
from fp4train.train import train_step

VOCABULARY = 128_256
"""Of Llama 3 (arXiv:2407.21783, table 3)."""


@contextmanager
def built_run(
    device: torch.device, overrides: list[str]
) -> Iterator[tuple[Run, Callable[[Recipe], None]]]:
    """A run ready to train, in a directory that is removed afterwards, and one step of it as
    `fp4train` makes it.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = ("run.name=benchmark", f"run.dir={folder}", f"device={device.type}")
        cfg = compose([*overrides, *place, "track=jsonl"])
        assert isinstance(cfg, DictConfig)
        run = build(new_origin(Command.of(cfg)))
        plans: dict[Recipe, Plan] = {}
        with CollectorBetweenSteps() as collector:

            def step(recipe: Recipe) -> None:
                if recipe not in plans:
                    timeline = Timeline(recipe=recipe, steps=run.config.train.steps)
                    plans[recipe] = build_plan(
                        run.config, run.layers, timeline, run.course.plan.device
                    )
                if (plan := plans[recipe]) is not run.course.plan:
                    run.course.plan = plan
                    run.apply(plan.stretches[0])
                done = train_step(run, plan.stretches[0].recipe)
                loss, norm = done.read()
                run.step += 1
                run.record.tracker.log(
                    run.step, {"train/loss": loss, "train/grad_norm": norm} | done.values
                )
                collector.after(run.step)

            try:
                yield run, step
            finally:
                run.data.feed.close()
                run.record.tracker.finish()


class ExpertLoop(nn.Module):
    """Experts as torch's own linear layers, called one after another: what a loop of PyTorch alone
    multiplies.
    """

    layer_shard = None

    def __init__(self, group: Experts) -> None:
        super().__init__()
        self.experts = group.experts
        sizes = group.in_features, group.out_features
        self.layers = nn.ModuleList(
            nn.Linear(*sizes, bias=False, device="meta") for _ in group.own_weights
        )
        for layer, weight in zip(self.layers, group.own_weights, strict=True):
            layer.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x_MK: Tensor, counts: Sequence[int]) -> Tensor:
        parts = zip(self.layers, torch.split(x_MK, list(counts)), strict=True)
        return torch.cat([layer(part) for layer, part in parts if len(part)])


def with_torchs_experts(model: nn.Module) -> nn.Module:
    """`model`, whose groups of experts become loops of `nn.Linear`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts):
                setattr(parent, name, ExpertLoop(child))
    return model


def bare_loop(run: Run, device: torch.device) -> Callable[[], None]:
    """A step of a PyTorch loop that goes on with the weights and biases of `run`, by a new
    optimizer, on its next batches; experts are balanced as in the run, by their losses and by their
    biases after each step.
    """
    config = run.config
    start = run.step
    model = config.model.build(
        vocab_size=planned_vocab_size(config.data), seq_len=config.train.seq_len
    )
    model.load_state_dict(run.model.state_dict())
    model = with_torchs_experts(model).to(device)
    optimizer = config.optim.build(model)
    for group, settled in zip(optimizer.param_groups, run.optimizer.param_groups, strict=True):
        group["lr"] = settled["lr"]
    batches = [run.data.training.batch(start + i) for i in range(8)]
    steps = 0
    none_failed = torch.zeros((), dtype=torch.bool, device=device)

    def step() -> None:
        nonlocal steps
        inputs, targets = (t.to(device) for t in batches[steps % len(batches)])
        # The context says that activations are BF16; the layers are torch's own, cast by torch's
        # autocast.
        with (
            use(Context(recipe=BF16(), auxiliary=1.0)),
            torch.autocast(device.type, dtype=torch.bfloat16),
        ):
            loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(model, Routed):
            routers = model.fp4train_routers()
            routers.even_out(routers.seen(device)[:, : routers.experts], none_failed)
        loss.item()
        steps += 1

    return step


def bench_step(
    report: Report,
    device: torch.device,
    overrides: list[str],
    name: str,
    target: float,
    bare_target: float | None = 1.02,
    *,
    quantised_target: float | None = None,
    settling: tuple[int, int] = (0, 0),
) -> None:
    """A training step as `fp4train` makes it, in BF16, NVFP4 and MXFP8, and the same model in a
    bare PyTorch loop.

    Args:
        target, bare_target: largest ratio of an NVFP4 step to a BF16 step, and of that to one of
            the bare loop.
        quantised_target: largest ratio of an NVFP4 step to one of the bare loop; None: no row.
        settling: BF16 steps of the run, after which the bare loop begins with its weights, and then
            steps of that one, before any is measured. Experts need them: a step's time depends on
            how evenly tokens are routed to them, and the first steps of a new optimizer upset that.
    """
    bf16 = BF16()
    nvfp4 = NVFP4()
    mxfp8 = MXFP8()
    with built_run(device, overrides) as (run, step):
        for _ in range(settling[0]):
            step(bf16)
        bare = bare_loop(run, device)
        for _ in range(settling[1]):
            bare()
        functions: dict[str, Callable[[], object]] = {
            "bf16": lambda: step(bf16),
            "nvfp4": lambda: step(nvfp4),
            "mxfp8": lambda: step(mxfp8),
            "bare": bare,
        }
        times = in_turn(functions, device, seconds=3 * report.seconds)
    report.add(f"{name}: a BF16 step", times["bf16"], unit="s")
    report.add(f"{name}: an NVFP4 step over a BF16 step", times["nvfp4"] / times["bf16"], target)
    report.add(f"{name}: an MXFP8 step over a BF16 step", times["mxfp8"] / times["bf16"])
    over = "over the same model in a bare PyTorch loop"
    report.add(f"{name}: a BF16 step {over}", times["bf16"] / times["bare"], bare_target)
    if quantised_target is not None:
        report.add(
            f"{name}: an NVFP4 step {over}", times["nvfp4"] / times["bare"], quantised_target
        )


def bench_recipes(report: Report, device: torch.device, overrides: list[str], name: str) -> None:
    """A training step in each file of `recipes/`, over one in NVFP4."""
    recipes: dict[str, Recipe] = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        cfg = compose([f"recipe={path.stem}"])
        assert isinstance(cfg, DictConfig)
        recipes[path.stem] = to_config(cfg).recipe
    with built_run(device, overrides) as (_, step):
        functions = {file: partial(step, recipe) for file, recipe in recipes.items()}
        times = in_turn(functions, device, seconds=report.seconds)
    for file, seconds in times.items():
        target = None if file in ("nvfp4", "bf16", "fp16", "fp32") else 1.6
        report.add(
            f"{name}: a step in recipe={file} over one in nvfp4", seconds / times["nvfp4"], target
        )


@contextmanager
def real_vocabulary(*, seq_len: int, ids: int = VOCABULARY) -> Iterator[list[str]]:
    """Keys of a configuration: random ids of a vocabulary of `ids`, enough for a batch; the head of
    a model is a quarter of its step then, and next to nothing with the 257 ids of bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.bin"
        tokens = torch.randint(
            ids, (64 * (seq_len + 1),), generator=torch.Generator().manual_seed(0)
        )
        path.write_bytes(tokens.int().numpy().tobytes())
        yield [
            "data=tokens",
            f"data.path={path}",
            f"data.vocab_size={ids}",
            "data.dtype=int32",
            "data.val=0.2",
        ]


def bench_checkpoint(
    report: Report, device: torch.device, overrides: list[str], name: str, between: int = 12
) -> None:
    """What a checkpoint costs the training loop, which goes on while a thread writes it, and the
    time of one that the loop waits for. `between`: steps between two checkpoints.
    """
    small = ["train.batch_size=1", "train.seq_len=64", f"checkpoint.every={between}"]
    holds: list[float] = []
    takes: list[float] = []
    with built_run(device, [*overrides, *small, "checkpoint.keep=1"]) as (run, step):

        def train(steps: int) -> None:
            for _ in range(steps):
                step(BF16())
                run.mid_update = False
                run.saver.prove(run.step - 1)

        for _ in range(3):
            train(between)
            began = time.perf_counter()
            run.saver.begin(proven=True)
            holds.append(time.perf_counter() - began)
            train(between)
            run.saver.wait()
            began = time.perf_counter()
            run.saver.begin(proven=True)
            run.saver.wait()
            takes.append(time.perf_counter() - began)
        if not all(outcome.written for outcome in run.saver.outcomes()):
            raise RuntimeError("a checkpoint could not be written")
        run.saver.close()
    report.add(f"{name}: a checkpoint holds the loop up for", holds, unit="s")
    report.add(f"{name}: … where the loop waits for it", takes, unit="s")
