"""`TrainerPrecision`: recipe, policy and phases in transformers' Trainer.

The Trainer's own checkpoints hold all that a resume needs: its `trainer_state.json` has what the
layers carry from step to step as a safetensors file in base64, because the Trainer tells no
callback the folder that it resumes from.
"""

import base64
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fp4train.errors import UserError
from fp4train.integrations.loop import Precision, on_cpu
from fp4train.nn.planned import PlannedLayer
from fp4train.text import first_few

_SAMPLED = 8
"""Elements of each layer's weight that a checkpoint's record of this callback holds."""
_NAMED = 4
"""Most layers that a message names."""


class TrainerPrecision(TrainerCallback, ExportableState):
    """Runs the model of a Trainer in a recipe; the arguments are those of `Precision`.

        model = fp4train.convert(model)
        precision = TrainerPrecision("nvfp4")
        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[precision])

    Attributes:
        precision: core, with the plan once training has begun.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.precision = Precision(*arguments, **options)
        self._layers: list[PlannedLayer] = []

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if model is not None:  # with model_init there is none yet
            self.precision.check(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        sums = args.gradient_accumulation_steps * args.world_size > 1
        self.precision.attach(model, steps=state.max_steps, sums=sums)
        self._layers = self.precision.check(model)
        if state.global_step:
            self._load(state.stateful_callbacks.get(type(self).__name__))
        self.precision.step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.precision.step = state.global_step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.precision.check_called()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # weights have changed: what is evaluated now is of the next step
        self.precision.step = state.global_step

    # -- trainer_state.json ------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Entry of this callback in `trainer_state.json`."""
        state_dict = self.precision.state_dict()
        if state_dict["layers"]:
            tensors = base64.b64encode(save(on_cpu(state_dict))).decode()
        else:
            tensors = ""
        weights = base64.b64encode(save(_samples(self._layers))).decode()
        return {
            "args": state_dict["settings"],
            "attributes": {"tensors": tensors, "weights": weights},
        }

    def _load(self, saved: Any) -> None:
        """Take over what `state` gave, read again; None: the checkpoint is of a run without
        fp4train.

        Raises:
            UserError: it is damaged, or of several callbacks of this class; or the model has other
                weights than the checkpoint.
        """
        if saved is None:
            return
        layers: dict[str, dict[str, Any]] = {}
        try:
            encoded = saved["attributes"]["tensors"]
            settings = saved["args"]
            tensors: dict[str, Any] = {}
            if encoded:
                tensors = load(base64.b64decode(encoded, validate=True))
            samples: dict[str, Tensor] = {}
            if sampled := saved["attributes"].get("weights"):  # of earlier versions there are none
                samples = load(base64.b64decode(sampled, validate=True))
            for name, tensor in tensors.items():
                layer, _, key = name.rpartition("/")
                layers.setdefault(layer, {})[key] = tensor
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            if isinstance(saved, list):
                what = "is that of several"
            else:
                what = "is damaged"
            raise UserError(
                f"trainer_state.json: the state of {type(self).__name__} {what} ({error})"
            ) from error
        _check_weights(self._layers, samples)
        self.precision.load_state_dict({"step": 0, "layers": layers, "settings": settings})


def _samples(layers: Iterable[PlannedLayer]) -> dict[str, Tensor]:
    """Some elements of each layer's weight, on the CPU, by the layer's name."""
    weights = {layer.layer.name: layer.weight.detach().reshape(-1) for layer in layers}
    return {
        name: weight[:: -(-weight.numel() // _SAMPLED)].clone().cpu()
        for name, weight in weights.items()
    }


def _check_weights(layers: Iterable[PlannedLayer], samples: dict[str, Tensor]) -> None:
    """UserError where layers have other weights than the checkpoint that the Trainer has loaded.
    Weights that were made again in another dtype, of a base model under adapters, are the same.

    The Trainer looks up tensors of a checkpoint by the names of the model's parameters. Weights
    that `save_pretrained` renames, such as Mixtral's experts and GPT-NeoX's head, stay as they are
    then, with a warning. (Source: transformers 5.23, `Trainer._load_from_checkpoint`.)
    """
    strange = [
        name
        for name, sample in _samples(layers).items()
        if name in samples and not _same(sample, samples[name])
    ]
    if strange:
        raise UserError(
            f"{first_few(strange, _NAMED)}: other weights than in the checkpoint. transformers' "
            "Trainer does not load what it saves under other names (Mixtral's experts, GPT-NeoX's "
            "head): make the model by from_pretrained of the checkpoint's folder, convert it, and "
            "resume again. Under adapters of peft, which it saves alone, make the base model with "
            "the weights that it had"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether values are equal in the dtype of one of the two."""
    return torch.equal(one.to(other.dtype), other) or torch.equal(other.to(one.dtype), one)
