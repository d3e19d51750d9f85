"""Recipe, policy and phases of a model that another loop trains.

`Precision` knows no framework. It applies the plan of the coming stretch to a converted model and
runs the model's forward passes in it: a hook before each enters the context, a hook behind it
leaves. Hooks change neither `forward` nor its signature, and copies and pickles of the model stay
copies of it. Backward runs outside, as with `autocast`.

The step keys the random bits together with the layer and the token's index in the step, so a run
that is resumed at a step draws the same bits. Layers count the tokens of a step's microbatches;
each rank counts in a range of its own. A loop says where it is: `step` is the number of optimizer
steps that are done.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp4train.config.binding import as_node, bind
from fp4train.config.composition import named
from fp4train.errors import UserError, user_errors
from fp4train.hardware import Device
from fp4train.nn.called import check_called
from fp4train.nn.conversion import report
from fp4train.nn.planned import PlannedLayer
from fp4train.precision import LayerPolicy, Phase, Recipe, Timeline, recompute_contexts
from fp4train.precision.context import Context, pop, push, state
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import Plan, PlannedStretch, make_plan
from fp4train.precision.recomputation import is_stray_recomputation
from fp4train.quantize import Position, RunStep

_log = logging.getLogger(__name__)

_TOKENS = 1 << 31
"""Token indices of a step, which the ranks share out (`quantize.random`)."""
_MOST_STEPS = 1 << 28
"""Steps of a loop that does not know its end."""


class Precision:
    """Recipe, policy and phases of a model's layers while another loop trains it.

    Args:
        recipe: name of one, as in `recipe=` ("nvfp4"), an object, or its configuration.
        policy: choice of the layers that keep high precision: a name as in `policy=`, an object,
            its configuration, or None (each layer follows the recipe).
        phases: recipe changes over the run: a name as in `phases=`, a list of `Phase`, or its
            configuration.
        cooldown: first step of the learning rate's cooldown, or a share of the run, for phases that
            start there.
        seed: seed of the random bits of stochastic rounding.
        evaluates: True: passes in eval mode run in the recipe too, as in fp4train's own loop;
            False: outside of it, like the model without fp4train.
        unconverted: largest share of the model's matrix weights that may lie outside of fp4train's
            layers; a model with more (experts in 3-D parameters) is refused.

    Attributes:
        step: optimizer steps done.
        plan: plan of each layer in each stretch of the run; None before `attach`.

    Raises:
        UserError: a name is unknown, or a configuration is wrong.
        TypeError: an object has another type.
    """

    def __init__(
        self,
        recipe: str | Recipe | Mapping[str, Any] = "nvfp4",
        *,
        policy: str | LayerPolicy | Mapping[str, Any] | None = "last15",
        phases: str | Sequence[Phase] | Sequence[Mapping[str, Any]] | Mapping[str, Any] = (),
        cooldown: int | float | None = None,
        seed: int = 0,
        evaluates: bool = True,
        unconverted: float = 0.5,
    ) -> None:
        self.recipe: Recipe = _object("recipe", recipe, Recipe)
        self.policy: LayerPolicy | None = None
        if policy is not None:
            self.policy = _object("policy", policy, LayerPolicy)
        self.phases = _phases(phases)
        last = 1 if isinstance(cooldown, float) else _MOST_STEPS
        if cooldown is not None and not 0 <= cooldown <= last:
            raise UserError(
                f"cooldown={cooldown!r} must be a step (integer ≥ 0) or a share of the run "
                "(0.0 to 1.0)"
            )
        self.cooldown = cooldown
        self.seed = seed
        self.evaluates = evaluates
        self.unconverted = unconverted
        self.step = 0
        self.plan: Plan | None = None
        self._layers: list[PlannedLayer] = []
        self._handles: list[Any] = []
        self._recomputed: list[nn.Module] = []
        self._stretch: PlannedStretch | None = None
        self._called: dict[object, bool] | None = {}
        self._saved: Mapping[str, Any] | None = None
        self._start = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Precision:
        """A copy of a model (an average of its weights) runs in the precision of the original."""
        return self

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.recipe.name} by fp4train"
        return str(self.plan)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that this was made of, as plain values."""
        names = ("recipe", "policy", "phases", "cooldown", "seed", "evaluates", "unconverted")
        return {name: as_node(getattr(self, name)) for name in names}

    # -- the model ---------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> list[PlannedLayer]:
        """The converted layers of `model`.

        Raises:
            UserError: it is not converted, has other weights for the most part, or its weights are
                cut over ranks.
        """
        layers = [module for module in model.modules() if isinstance(module, PlannedLayer)]
        what = type(model).__name__
        if not layers:
            raise UserError(
                f"{what} has no layer of fp4train, so recipe {self.recipe.name} would change "
                "nothing: call "
                "model = fp4train.convert(model) before the loop is made"
            )
        coverage = report(model)
        if 1 - coverage.share > self.unconverted:
            raise UserError(
                f"{what}: {coverage.summary()}. Recipe {self.recipe.name} would reach "
                f"{coverage.share:.0%} of them; to train "
                f"so all the same give unconverted={min(1.0, 1.01 - coverage.share):.2f}"
            )
        for layer in layers:
            if isinstance(layer.weight, DTensor) or layer.weight.numel() != layer.layer.weights:
                raise UserError(
                    f"layer {layer.layer.name}: its weight is cut over ranks (FSDP, ZeRO-3, "
                    "tensor parallelism). In "
                    "other loops fp4train runs whole weights: use DDP, or fp4train's own "
                    "loop (parallel.dp_shard)"
                )
        return layers

    def attach(
        self,
        model: nn.Module,
        *,
        steps: int | None,
        sums: bool = False,
        entrances: Iterable[nn.Module] | None = None,
    ) -> None:
        """Run the forward passes of `model` in the recipe from now on, in the place of what was
        attached before.

        Args:
            model: converted model on its device, not wrapped (`accelerator.unwrap_model`).
            steps: number of optimizer steps of the run; None: the loop does not know.
            sums: True: gradients of several passes are summed: of microbatches or ranks.
            entrances: modules of the model whose calls enter the recipe; None: the model itself.

        Raises:
            UserError: the model or the plan is not possible; the message names the fix.
        """
        layers = self.check(model)
        self.detach()
        # wrappers (peft) have changed names since `convert`
        for name, layer in find_layers(model).items():
            module = model.get_submodule(name)
            if isinstance(module, PlannedLayer):
                module.rename(layer, module.backend)
                module.sum_gradients(sums)
        self.plan = self._planned(model, steps)
        self._layers = layers
        self._stretch = None
        self._called = {}
        self._recomputed = [
            module for module in model.modules() if hasattr(module, "gradient_checkpointing")
        ]
        rank = 0
        ranks = 1
        if dist.is_initialized():
            rank = dist.get_rank()
            ranks = dist.get_world_size()
        self._start = rank * (_TOKENS // ranks // 8 * 8)
        if entrances is None:
            entrances = [model]
        for module in entrances:
            for hook in list(module._forward_pre_hooks.values()):
                if isinstance(other := getattr(hook, "__self__", None), Precision):
                    other.detach()
            self._handles += [
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        self._restore()

    def detach(self) -> None:
        """Run the model as without this object, in high precision; training alone does not end
        it.
        """
        self._called = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _planned(self, model: nn.Module, steps: int | None) -> Plan:
        if steps is None:
            if any(
                isinstance(share, float)
                for share in (self.cooldown, *(phase.start for phase in self.phases))
            ):
                raise UserError(
                    "a phase starts after a share of the run, and this loop does not know "
                    "its number of steps: give "
                    "the phase a step, or the loop its steps (max_steps)"
                )
            steps = _MOST_STEPS
        cooldown = self.cooldown
        if isinstance(cooldown, float):
            cooldown = round(cooldown * steps)
        if cooldown is None and any(phase.start == "cooldown" for phase in self.phases):
            raise UserError(
                "a phase starts at the cooldown, and this loop does not say where that is: "
                "give cooldown=, a step or "
                "a share of the run (0.8)"
            )
        layers = find_layers(model)
        backends = {
            name: str(getattr(model.get_submodule(name), "backend", "auto")) for name in layers
        }
        devices = {Device.of(layer.weight.device) for layer in self.check(model)}
        if len(devices) > 1:
            raise UserError(
                f"layers lie on {', '.join(sorted(map(str, devices)))}: put the model on "
                "devices of one kind"
            )
        with user_errors(ValueError):
            ordered = sorted(self.phases, key=lambda phase: phase.step(steps, cooldown) or 0)
            timeline = Timeline(recipe=self.recipe, steps=steps, cooldown=cooldown, phases=ordered)
            (device,) = devices
            return make_plan(
                layers.values(), timeline, self.policy, tokens=1, device=device, backend=backends
            )

    # -- a forward pass ----------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, arguments: object) -> None:
        now = state()
        if now.context is not None or is_stray_recomputation(now):
            # an autocast of the caller's, an entrance inside of another, or an error of the layers
            push(now.context)
        elif module.training or self.evaluates:
            push(self._context())
        else:
            push(None)
        if module.training:
            for checkpointed in self._recomputed:
                _recompute_exactly(checkpointed)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, arguments: object, output: object) -> None:
        pop()

    def _context(self) -> Context:
        """The context of a pass. A copy of the model has no applied plan: its layers resolve the
        same one.
        """
        assert self.plan is not None
        stretch = self.plan.at(self.step)
        if stretch is not self._stretch:
            for layer in self._layers:
                layer.apply_plan(
                    stretch.layers[layer.layer.name],
                    stretch.recipe,
                    self.policy,
                    layer.weight.device,
                )
            _log.info("step %d: %s (%s)", self.step, stretch.recipe.name, stretch.reason)
            self._stretch = stretch
        return Context(
            recipe=stretch.recipe,
            policy=self.policy,
            position=Position(RunStep(self.seed, self.step), self._start),
            counts="tokens",
            called_layers=self._called,
        )

    # -- the loop ----------------------------------------------------------------------------------

    def check_called(self) -> None:
        """Check behind the first optimizer step, before the gradients are cleared, that the planned
        layers were called (`fp4train.nn.called`).

        Raises:
            UserError: a planned layer was not called in the model's forward pass, and its weight
                has a gradient.
        """
        if self._called is None or self.plan is None:
            return
        called = {module.layer.name for module in self._called if isinstance(module, PlannedLayer)}
        self._called = None
        elsewhere = (
            ", or it was called outside of the forward pass of the model that fp4train was "
            "attached to"
        )
        trained = lambda layer: layer.weight.grad is not None  # noqa: E731
        check_called(self.plan, self._layers, called, trained, elsewhere=elsewhere)

    def stepped(self) -> None:
        """Count an optimizer step that was made."""
        self.check_called()
        self.step += 1

    def count(self, optimizer: torch.optim.Optimizer, *, check: bool = True) -> None:
        """Count the steps of `optimizer` from now on, in place of calls of `stepped`.

        Args:
            check: False: its step is not the end of a pass of the whole model, and the loop calls
                `check_called` itself.
        """

        def stepped(*_: object) -> None:
            if check:
                self.check_called()
            self.step += 1

        self._handles.append(optimizer.register_step_post_hook(stepped))

    def state_dict(self) -> dict[str, Any]:
        """State for a resume: the step, the states of layers (amax histories), the settings."""
        layers = {layer.layer.name: layer.scaling_state() for layer in self._layers}
        return {
            "step": self.step,
            "layers": {k: v for k, v in layers.items() if v},
            "settings": self.settings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; before `attach`, that takes the layers' part over.

        Raises:
            UserError: it is of another model.
        """
        self._saved = state
        if self.plan is not None:
            self._restore()

    def _restore(self) -> None:
        if self._saved is None:
            return
        saved = self._saved
        self._saved = None
        self.step = int(saved["step"])
        tensors = saved["layers"]
        names = {layer.layer.name for layer in self._layers}
        if strange := sorted(tensors.keys() - names):
            raise UserError(
                f"the checkpoint has scales of layer {strange[0]}, which this model does not "
                "have: resume with the "
                "model that it was written with, adapters included"
            )
        for layer in self._layers:
            layer.load_scaling_state(
                {k: v.to(layer.weight.device) for k, v in tensors.get(layer.layer.name, {}).items()}
            )
        for name, value in self.settings.items():
            if value != saved["settings"].get(name, value):
                _log.warning("resumed with another %s than the checkpoint was trained with", name)


def _object(group: str, choice: Any, kind: type) -> Any:
    """The object that a name of an option, an object or its configuration stand for."""
    if isinstance(choice, kind):
        return choice
    if isinstance(choice, type) and issubclass(choice, kind):
        raise TypeError(f"{group}={choice.__name__}: give an object, {choice.__name__}()")
    if not isinstance(choice, (str, Mapping)):
        raise TypeError(
            f"{group}={choice!r} must be a name, such as those of `fp4train {group}=`, or a "
            f"{kind.__name__}"
        )
    if isinstance(choice, str):
        return bind(named(group, choice), kind, group)
    return bind(choice, kind, group)


def _phases(choice: Any) -> tuple[Phase, ...]:
    if isinstance(choice, str):
        phases = named("phases", choice)
    else:
        phases = choice
    if not isinstance(phases, Iterable):
        raise TypeError(
            f"phases={choice!r} must be a name, such as cooldown_fprop, or a list of Phase objects"
        )
    if isinstance(phases, Mapping):
        phases = phases.values()
    return tuple(_object("phases", phase, Phase) for phase in phases)


def _recompute_exactly(module: nn.Module) -> None:
    """Give a module of transformers whose checkpointing is switched on the contexts in which
    recomputation repeats the first pass in every bit. They cannot be among the kwargs of the
    switch: a Trainer writes those as JSON.
    """
    function = vars(module).get("_gradient_checkpointing_func")
    if isinstance(function, functools.partial) and "context_fn" not in function.keywords:
        exact = {**function.keywords, "use_reentrant": False, "context_fn": recompute_contexts}
        vars(module)["_gradient_checkpointing_func"] = functools.partial(
            function.func, *function.args, **exact
        )


def entrances_of(model: nn.Module) -> Iterator[nn.Module]:
    """`model` and the parts of it that its own code calls: for a module whose training step is no
    forward pass.
    """
    yield model
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from (entrance for entrance in entrances_of(child) if entrance is not child)
        elif any(isinstance(part, PlannedLayer) for part in child.modules()):
            yield child


def on_cpu(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a `state_dict`'s layers under flat names, on the CPU."""
    return {
        f"{name}/{key}": t.detach().cpu()
        for name, tensors in state["layers"].items()
        for key, t in tensors.items()
    }
