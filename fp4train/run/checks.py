"""Checks of a configuration and its plan before a run begins: errors where it is impossible, and
warnings about valid but probably unintended settings.
"""

import logging
import math
import os
from pathlib import Path
from typing import Any

from torch import nn

from fp4train import checkpoint
from fp4train.config import Config
from fp4train.data.dna import Dna
from fp4train.data.tokenizers import Bytes
from fp4train.data.tokens import Borders
from fp4train.errors import UserError, user_errors
from fp4train.optim.oscillation import why_not
from fp4train.parallel.config import Mesh
from fp4train.parallel.stages import check_microbatches
from fp4train.precision.plan import Plan
from fp4train.run.record import directory as run_directory
from fp4train.text import next_fitting, short, typed, with_unit

_log = logging.getLogger(__name__)

BYTES = 4
"""Bytes per weight: masters are float32."""

LARGE = 10_000_000
"""Parameters from which a run of fewer tokens than parameters is no experiment in small."""
_ALIGNED = 1 << 20
"""Tokens that are whole blocks of any size."""
READS_BYTES = 300_000_000
"""Parameters from which a vocabulary of bytes is probably an oversight."""


def check_memory(model: nn.Module) -> int:
    """The parameters of a model on the meta device.

    Raises:
        UserError: its weights are larger than the main memory of this machine.
    """
    count = sum(int(parameter.numel()) for parameter in model.parameters())
    memory = main_memory()
    if count * BYTES > memory:
        raise UserError(
            f"{type(model).__name__} has {short(count)} parameters, which are drawn in main "
            "memory: "
            f"{with_unit(count * BYTES, 'B')} of float32, and this machine has "
            f"{with_unit(memory, 'B')}. "
            "Choose a smaller model, or "
            "share it between several ranks, each of which draws its part alone (docs/scale.md)"
        )
    return count


def set_masks(model: Any, config: Config, borders: Borders) -> None:
    """Let `model` attend within documents, and leave out targets that do not count, where this is
    asked for.

    Args:
        borders: the ids that divide documents.

    Raises:
        UserError: the model cannot do that, or there is no such id.
    """
    answers = getattr(config.data, "answers_only", False)
    if not config.train.document_mask and not answers:
        return
    if answers:
        what = "data=chat"
    else:
        what = "train.document_mask=true"
    if not hasattr(model, "documents") or not hasattr(model, "masked"):
        raise UserError(
            f"{what}: {type(model).__name__} has no `documents` and `masked` "
            "(fp4train.models.common.decoder)"
        )
    if not borders:
        raise UserError(
            f"{what}: token files without a tokenizer do not say which id ends a document: "
            "give data.end_id=…, or "
            "data.begin_id=… where an id begins each"
        )
    if borders.begin is not None and not hasattr(model, "begins"):
        raise UserError(
            f"data.begin_id: {type(model).__name__} has no `begins` "
            "(fp4train.models.common.decoder)"
        )
    model.documents = borders.end
    model.masked = answers
    if borders.begin is not None:
        model.begins = borders.begin


def check_cut(config: Config, mesh: Mesh) -> None:
    """Raises UserError where a batch cannot be cut into equal microbatches on equal ranks, enough
    for a pipeline, or where something needs whole what the ranks share.
    """
    batch = config.train.batch_size
    ranks = mesh.data
    rows = config.train.microbatch
    step = ranks * (rows or 1)
    if batch % step:
        if rows is None:
            per_rank = ""
        else:
            per_rank = f" × train.microbatch={rows}"
        below = batch // step * step
        near = " or ".join(str(size) for size in (below, below + step) if size)
        fits = [str(n) for n in range(1, 2 * ranks) if batch % (n * (rows or 1)) == 0]
        raise UserError(
            f"train.batch_size={batch} is not divisible by {ranks} data ranks{per_rank}: every "
            f"rank must have the same number of sequences and microbatches. Data ranks that "
            f"divide it: {', '.join(fits[-4:])}; or use train.batch_size={near}"
        )
    sequences = config.train.rows(ranks)
    tokens = sequences * config.train.seq_len // mesh.context
    if config.parallel.sp and tokens % mesh.tensor:
        raise UserError(
            f"the {tokens} tokens of a microbatch cannot be shared "
            "by parallel.tp="
            f"{mesh.tensor} ranks: choose another train.microbatch or train.seq_len, or "
            "parallel.sp=false"
        )
    if (
        config.train.document_mask or getattr(config.data, "answers_only", False)
    ) and mesh.pipeline > 1:
        raise UserError(
            "train.document_mask and data=chat: later stages of a pipeline see no tokens, so "
            "they know no documents: "
            f"parallel.pp={mesh.pipeline} is not possible with it"
        )
    if config.eval.errors_every and mesh.tensor > 1:
        raise UserError(
            f"eval.errors_every={config.eval.errors_every} measures whole operands, and "
            f"parallel.tp={mesh.tensor} "
            "leaves none on any rank: eval.errors_every=0, or measure a checkpoint on one "
            "rank (fp4train sensitivity)"
        )
    if config.oscillation.every and mesh.weight_ranks * mesh.tensor * mesh.pipeline > 1:
        raise UserError(
            f"oscillation.every={config.oscillation.every}: weights are watched whole, and "
            "this run cuts them over "
            "ranks; use parallel.dp_replicate with parallel.dp_shard=1 and parallel.cp=1, or leave "
            "it out"
        )
    if (
        reason := getattr(config.optim, "needs_whole", None)
    ) and mesh.weight_ranks * mesh.tensor > 1:
        raise UserError(reason)
    if config.parallel.pp > 1:
        with user_errors(ValueError):
            check_microbatches(batch // ranks // sequences, config.parallel)


def check_chunks(plan: Plan, seq_len: int, ranks: int) -> None:
    """Check that chunks of a sequence are whole blocks of all that is quantised along tokens.

    Raises:
        ValueError: they are not; it says which numbers of ranks are near.
    """
    operands = {
        operand
        for stretch in plan.stretches
        for layer in stretch.layers.values()
        for operand in layer.sources.values()
        if operand.has("tokens")
    }

    def why_not(ranks: int) -> str | None:
        size = seq_len // ranks
        if seq_len % ranks:
            return "are not divisible by it"
        # of what no size would mend, each chunk has its own, as a microbatch has
        reasons = (
            operand.why_not_cut("tokens", size)
            for operand in operands
            if operand.why_not_cut("tokens", _ALIGNED) is None
        )
        return next((f"are not: {reason}" for reason in reasons if reason is not None), None)

    if ranks == 1 or (reason := why_not(ranks)) is None:
        return
    near = next_fitting(ranks, seq_len, lambda n: n == 1 or why_not(n) is None)
    raise ValueError(
        f"parallel.cp={ranks}: sequences of train.seq_len={seq_len} tokens must be chunks of whole "
        f"blocks, and {reason}; use parallel.cp={near}"
    )


def check_oscillation(config: Config, plan: Plan) -> None:
    """Raises UserError where `oscillation.every` would do nothing."""
    settings = config.oscillation
    if not settings.every:
        return
    specs = [
        part.fprop.operands.second for stretch in plan.stretches for part in stretch.layers.values()
    ]
    reasons = {why_not(spec) for spec in specs if spec is not None}
    if reasons and None not in reasons:  # a run in high precision may have it: it is one of a sweep
        why = "; ".join(sorted(filter(None, reasons)))
        raise UserError(
            f"oscillation.every={settings.every} would reset nothing: {why}; leave it out"
        )


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of step `step` (steps count from 0).

    Raises:
        UserError: a schedule of a plugin gives no factor.
    """
    factor = config.schedule.factor(step, config.train.steps)
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise UserError(
            f"{type(config.schedule).__name__} gives {factor!r} at step {step}: the peak rate is "
            "multiplied by it, so it must be a number from 0 on"
        )
    return config.optim.lr * factor


def rate_jump(earlier: Config, later: Config, step: int) -> str | None:
    """Jump of the learning rate where a run whose cooldown had begun goes on at `step`, in words;
    None: it falls on.
    """
    cooldown = earlier.schedule.cooldown_start(earlier.train.steps)
    if cooldown is None or step <= cooldown:
        return None
    old = learning_rate(earlier, step - 1)
    new = learning_rate(later, step)
    if new <= 1.05 * old:
        return None
    return (
        f"the learning rate goes up from {old:.3g} (step {step - 1}, in the cooldown that "
        f"began at step {cooldown}) to "
        f"{new:.3g} (step {step})"
    )


def before_cooldown(run: Path, config: Config) -> str:
    """The kept checkpoint of a run from before its cooldown, and how to go on from it."""
    cooldown = config.schedule.cooldown_start(config.train.steps)
    if cooldown is None:
        return ""
    kept = [step for step in checkpoint.steps(run / run_directory.CHECKPOINTS) if step <= cooldown]
    if not kept:
        return (
            "no checkpoint from before the cooldown is kept (checkpoint.every, "
            "checkpoint.keep_before_cooldown)"
        )
    return f"from before the cooldown: resume={typed(run)} resume_step={kept[-1]} train.steps=… run.name=…"


def beyond_its_end(config: Config, run: Path, step: int) -> str:
    """What a run has done beyond the steps that `config` asks for, and ways to go on with it."""
    asked = config.train.steps
    text = (
        f"{run} has done {step} steps, and train.steps={asked} is below that: nothing is trained. "
        f"resume={typed(run)} train.steps=… goes on with a number above {step}"
    )
    saved = checkpoint.steps(run / run_directory.CHECKPOINTS)
    earlier = [kept for kept in saved if kept < asked]
    if not earlier:
        return text
    return (
        f"{text}, resume={typed(run)} resume_step={earlier[-1]} train.steps={asked} run.name=… trains "
        "them as another run"
    )


def scale_warnings(config: Config, model: nn.Module) -> list[str]:
    """The warnings of a model that is large for its tokens, or for a vocabulary of bytes."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = config.train.steps * config.train.step_tokens
    presets = "; fp4train help experiment lists whole runs"
    warnings = []
    if parameters > LARGE and tokens < parameters and config.init is None:
        warnings.append(
            f"{short(parameters)} parameters learn {short(tokens)} tokens, "
            f"{tokens / parameters:.2g} for each, and "
            f"about 20 are usual (train.steps, train.batch_size, train.seq_len){presets}"
        )
    reads_bytes = isinstance(getattr(config.data, "tokenizer", None), Bytes) and not isinstance(
        config.data, Dna
    )
    if parameters > READS_BYTES and reads_bytes:
        warnings.append(
            f"a model of {short(parameters)} parameters reads bytes: data/tokenizer=gpt_neox, "
            "bpe or pretrained gives "
            f"it words{presets}"
        )
    return warnings


def plan_warnings(plan: Plan) -> list[str]:
    """The warnings of a run that does less than its recipes say."""
    return [*filter(None, (nothing_quantised(plan), never_chosen(plan)))]


def nothing_quantised(plan: Plan) -> str | None:
    """The warning of a run one of whose recipes quantises while its plan does not; None: all is
    well.
    """
    recipes = list(
        dict.fromkeys(stretch.recipe.name for stretch in plan.stretches if stretch.recipe.quantised)
    )
    if not recipes or plan.quantised:
        return None
    return (
        f"nothing is quantised: no layer follows the recipe {recipes[0]}, all of them are "
        "kept in high precision "
        "(policy.first, policy.last, policy.keep; the plan gives the reason of each layer)"
    )


def never_chosen(plan: Plan) -> str | None:
    """The warning of a run that ends before the outlier channels of a recipe are chosen; None: all
    is well.
    """
    having = [stretch for stretch in plan.stretches if stretch.split is not None]
    if not having or any(part.outliers for stretch in having for part in stretch.layers.values()):
        return None
    outliers = having[-1].recipe.outliers
    last = having[-1].stop
    assert outliers is not None
    return (
        f"outlier channels are never chosen: {outliers.steps} steps are recorded from step "
        f"{outliers.start} on, and "
        f"{having[-1].recipe.name} ends after step {last - 1}; all channels are multiplied "
        "together (outliers.start, "
        "outliers.steps)"
    )


def divided_blocks(plan: Plan) -> str | None:
    """The warning of a run whose tensor-parallel ranks quantise less than one rank would; None: all
    is well.
    """
    layers = {name: part for stretch in plan.stretches for name, part in stretch.layers.items()}
    cut = [(name, gemm) for name, part in layers.items() for gemm in part.gemms if gemm.divided]
    if not cut:
        return None
    name, gemm = cut[0]
    return (
        f"parallel.tp keeps GEMMs of {len({name for name, _ in cut})} of {len(layers)} layers "
        "in high precision that "
        f"one rank quantises, and the loss is not that of one rank ({name} {gemm.name}: "
        f"{gemm.why}); the plan names "
        "them: take fewer tensor-parallel ranks, or a wider model"
    )


def warn_of_few_steps(config: Config) -> None:
    """Say what schedule and phases cannot do in so few steps."""
    steps = config.train.steps
    for text in config.schedule.problems(steps):
        _log.warning("%s", text)
    cooldown = config.schedule.cooldown_start(steps)
    for name, phase in config.phases.items():
        start = phase.step(steps, cooldown)
        if start is None:
            _log.warning(
                "phase %s never starts: %s has no cooldown; phases.%s.start=0.8 names a share of "
                "the steps, phases=none says that none is meant",
                name,
                type(config.schedule).__name__,
                name,
            )
        elif start >= steps:
            _log.warning(
                "phase %s never starts: its first step would be %d of a run of %d",
                name,
                start,
                steps,
            )


def main_memory() -> int:
    """Bytes of this machine's main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
