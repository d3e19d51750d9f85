"""`TrainerPrecision`: recipe, policy and phases in transformers' Trainer.

The Trainer's own checkpoints hold all that a resume needs: its `trainer_state.json` has what the
layers carry from step to step as a safetensors file in base64, because the Trainer tells no
callback the folder that it resumes from.
"""

import base64
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fp4train.errors import UserError
from fp4train.integrations.loop import Precision, on_cpu


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

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if model is not None:  # with model_init there is none yet
            self.precision.check(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        sums = args.gradient_accumulation_steps * args.world_size > 1
        self.precision.attach(model, steps=state.max_steps, sums=sums)
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
        return {"args": state_dict["settings"], "attributes": {"tensors": tensors}}

    def _load(self, saved: Any) -> None:
        """Take over what `state` gave, read again; None: the checkpoint is of a run without
        fp4train.

        Raises:
            UserError: it is damaged, or of several callbacks of this class.
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
        self.precision.load_state_dict({"step": 0, "layers": layers, "settings": settings})
