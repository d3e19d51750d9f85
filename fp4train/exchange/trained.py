"""A trained model, out of a run directory, for use without the rest of its run: no optimizer, no
data, nothing written; or out of a Hugging Face folder, with the folder's tokenizer.

The recipe of a run's model is, unless another is named, that of the last steps whose forward pass
was quantised: a run may end with a cooldown in high precision, and what it was trained for is the
recipe before.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fp4train import checkpoint
from fp4train.checkpoint.source import WeightSource
from fp4train.config import Config, plain, to_config
from fp4train.config.composition import compose
from fp4train.config.from_folder import with_folder
from fp4train.config.overrides import quoted
from fp4train.data.source import planned_vocab_size
from fp4train.data.token_file import Tokens
from fp4train.data.tokens import Tokenizer, borders_of
from fp4train.errors import UserError, user_errors
from fp4train.precision import GEMMS, LayerPolicy, Recipe
from fp4train.precision.context import Context, use
from fp4train.precision.phases import Timeline
from fp4train.precision.settings import ConstantWeights
from fp4train.quantize import Position, RunStep
from fp4train.run.build import build_model
from fp4train.run.checks import set_masks
from fp4train.run.host import choose_device
from fp4train.run.initial import open_source
from fp4train.run.record import directory as run_directory
from fp4train.run.record.trust import check_belongs, check_paths, own_tokenizer, saved_with
from fp4train.run.state.base import saved_part
from fp4train.run.state.weights import check_weights
from fp4train.run.states import how_to_have
from fp4train.run.timeline import build_timeline

CONTEXT = 32768
"""Most tokens of a sequence of a folder's model: tables of positions are made for all of them."""


@dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """A recipe and the layers that follow it; `name` is what the user calls it."""

    name: str
    recipe: Recipe
    policy: LayerPolicy | None


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The weights of a run at one of its checkpoints.

    Args:
        weights: source of the weights, with their step; of a folder there is no step.
        model: model in evaluation mode.
        tokenizer: tokenizer of its text; None for token files that came without one.
        vocab_size: number of ids that the tokenizer has; the model's head may have more, which stand for
            nothing.
        trained_in: recipe of the last steps whose forward pass was quantised; None: there are
            none.
        cfg: configuration of the run as it was saved, with the paths that the command line gives.
    """

    weights: WeightSource
    config: Config
    model: nn.Module = field(repr=False)
    tokenizer: Tokenizer | None = field(repr=False)
    vocab_size: int
    trained_in: Recipe | None
    device: torch.device
    cfg: DictConfig = field(repr=False)
    paths: Mapping[str, str | None]

    @property
    def source(self) -> Path:
        """The run directory, or the folder."""
        return self.weights.path

    @property
    def step(self) -> int | None:
        """Number of optimizer steps done; None: it is of a folder."""
        return self.weights.step

    @property
    def high_precision(self) -> NamedRecipe:
        """The run's own dtype without quantisation, in which its validation losses are measured
        too.
        """
        recipe = self.config.recipe
        if recipe.quantised:
            recipe = recipe.with_high_precision(*GEMMS)
        return NamedRecipe(
            name=f"high precision ({recipe.dtype})", recipe=recipe, policy=self.config.policy
        )

    @property
    def own(self) -> NamedRecipe:
        """The recipe that the model was trained for; one whose forward pass was never quantised has
        high precision.
        """
        if self.trained_in is None:
            return self.high_precision
        return NamedRecipe(
            name=self.trained_in.name, recipe=self.trained_in, policy=self.config.policy
        )

    def forward(
        self,
        named: NamedRecipe,
        *args: Tensor,
        constant: ConstantWeights | None = None,
        **more: Any,
    ) -> Tensor:
        """The model's forward pass in a recipe, without gradients.

        Args:
            constant: shared by passes between which nobody writes the model's weights.
        """
        context = Context(
            recipe=named.recipe,
            policy=named.policy,
            position=Position(RunStep(self.config.run.seed, self.step or 0)),
            counts="nothing",
            constant=constant,
        )
        with torch.no_grad(), use(context):
            output: Tensor = self.model(*(tensor.to(self.device) for tensor in args), **more)
        return output

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Within it the model attends as it was trained to, within documents, and counts the
        targets that count there.

        Elsewhere it attends to all that it is given, as the model of its export does: the id that
        ends a document is then seen by the text after it.
        """
        model: Any = self.model
        set_masks(model, self.config, borders_of(self.config.data, self.tokenizer))
        try:
            yield
        finally:
            if hasattr(model, "documents"):
                model.documents = None
                model.masked = False
            if hasattr(model, "begins"):
                model.begins = None

    @property
    def title(self) -> str:
        """The origin of the model: the run and its step, or the folder."""
        return self.weights.title

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return int(getattr(self.model, "seq_len", self.config.train.seq_len))

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            UserError: there is none.
        """
        if self.tokenizer is None:
            raise UserError(
                f"{self.source} was trained on token files without a tokenizer: text cannot "
                "be encoded"
            )
        return self.tokenizer


def load_trained(
    named: WeightSource | Path, paths: Mapping[str, str | None] | None = None
) -> TrainedModel:
    """The model of a run, or of a Hugging Face folder.

    Args:
        named: source of its weights; of a path the newest.
        paths: full key → path, which the command line gives; the rest are those of the run's
            configuration.

    Raises:
        UserError: there is no run or no such checkpoint, or it does not fit the configuration, or
            is not finite.
    """
    weights = WeightSource.of(named)
    source = weights.path
    step = weights.step
    if weights.is_folder:
        if weights != WeightSource(path=source) or paths:
            raise UserError(
                f"{source} is a Hugging Face folder and no run: leave out step= and keys of a run"
            )
        return _of_folder(source)
    paths = paths or {}
    cfg = saved_with(run_directory.read_trained(source), source, step, paths)
    with run_directory.recipes_of(source, plain(cfg)):
        config = to_config(cfg)
    kernels = config.train.kernels.replace("liger", "auto")  # where they do not run, too
    config = replace(
        config, train=replace(config.train, compile=False, cuda_graph=False, kernels=kernels)
    )
    with user_errors(UserError, after=how_to_have(weights.kind, config)):
        stored = checkpoint.load(source / run_directory.CHECKPOINTS, step, kind=weights.kind)
    check_belongs(stored, source, mend=False)
    tokenizer = own_tokenizer(config, source, lambda lost: check_paths(cfg, paths))
    device = choose_device(config.device)
    if tokenizer is None or isinstance(config.data, Tokens):
        vocab_size = planned_vocab_size(config.data)
    else:
        vocab_size = tokenizer.vocab_size
    model = build_model(config, vocab_size, device)
    strange = (LookupError, TypeError, ValueError, OSError, RuntimeError, AttributeError)
    with user_errors(*strange, before=f"{stored.path} does not fit the model of {source}: "):
        saved = saved_part(stored, weights.key, model)
        check_weights(model, saved)
    model.load_state_dict(saved)
    return TrainedModel(
        weights=weights.at(stored.step),
        config=config,
        model=model.eval(),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        trained_in=trained_recipe(build_timeline(config, source), stored.step),
        device=device,
        cfg=cfg,
        paths=paths,
    )


def _of_texts(section: Any) -> Tokenizer:
    """The tokenizer of a folder; a token that its file puts before a text stands before each
    document.
    """
    tokenizer: Tokenizer = section.open()
    begin = getattr(tokenizer, "token_before_texts", None)
    if begin is None or begin == getattr(tokenizer, "end", None):
        return tokenizer
    beginning: Tokenizer = replace(section, begin_of_document=begin).open()
    return beginning


def _of_folder(folder: Path) -> TrainedModel:
    """The model of a Hugging Face folder; its context is the longest that it was made for, up to
    `CONTEXT`.
    """
    cfg = compose(
        [quoted("init", str(folder)), "data=text", quoted("data.path", str(folder)), "policy=all"]
    )
    cfg = with_folder(cfg, ())
    positions = cfg.model.get("max_positions")
    if positions is None:
        cfg.train.seq_len = CONTEXT
    else:
        cfg.train.seq_len = min(int(positions), CONTEXT)
    config = to_config(cfg)
    source = WeightSource(path=folder)
    weights = open_source(source, config.model)
    tokenizer = _of_texts(config.data.tokenizer)  # type: ignore[attr-defined]
    device = choose_device(config.device)
    model = build_model(config, tokenizer.vocab_size, device)
    weights.load(model)
    return TrainedModel(
        weights=source,
        config=config,
        model=model.eval(),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        trained_in=None,
        device=device,
        cfg=cfg,
        paths={},
    )


def trained_recipe(timeline: Timeline, step: int) -> Recipe | None:
    """The recipe of the last of the first `step` steps whose forward pass was quantised; None:
    there is none.
    """
    ran = [stretch.recipe for stretch in timeline.stretches() if stretch.start < max(step, 1)]
    return next((recipe for recipe in reversed(ran) if recipe.table()["fprop"].quantised), None)
