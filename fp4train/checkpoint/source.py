"""Which weights: of a run at a step and of a kind, or of a Hugging Face folder.

    RUN             the newest checkpoint       runs/a
    RUN@STEP        the checkpoint of a step    runs/a@200
    RUN@STEP:KIND   another kind of weights     runs/a@200:ema, runs/a:ema
    FOLDER          a Hugging Face folder       models/llama

Every option that names weights is read here, an option for the step beside it too (`init_step=`,
`step=`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fp4train import sealed
from fp4train.checkpoint import model_folder
from fp4train.checkpoint.layout import WEIGHTS, key_of
from fp4train.errors import check_local
from fp4train.paths import split_weights


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """Weights by name; nothing is opened.

    Args:
        path: the run directory, or the folder.
        step: optimizer steps of the checkpoint; None: the newest.
        kind: the kind of weights that the checkpoint has: "weights", those that were trained, or
            what a state of the run keeps beside them.
    """

    path: Path
    step: int | None = None
    kind: str = WEIGHTS

    @classmethod
    def parse(cls, text: str, step: int | None = None) -> WeightSource:
        """The weights that a text names; a file or folder of that name is meant whatever is in its
        name.

        Args:
            step: step that an option beside the text names.

        Raises:
            ValueError: the text and the option name a step each.
        """
        check_local(text)
        path, in_text, kind = split_weights(text)
        if in_text is not None and step is not None:
            raise ValueError(f"{text} names the step {in_text}, and step {step} is named beside it")
        if in_text is not None:
            step = in_text
        return cls(path=Path(path), step=step, kind=kind or WEIGHTS)

    @classmethod
    def of(cls, source: WeightSource | Path) -> WeightSource:
        """`source`; of a path, the newest weights there."""
        if isinstance(source, WeightSource):
            return source
        return cls(path=source)

    def at(self, step: int) -> WeightSource:
        """The same weights at another step."""
        return replace(self, step=step)

    @property
    def key(self) -> str:
        """The key of the state of a checkpoint that has the weights."""
        return key_of(self.kind)

    @property
    def resume_words(self) -> list[str]:
        """The words of a command that goes on from the checkpoint."""
        words = [f"resume={self.path}"]
        if self.step is not None:
            words.append(f"resume_step={self.step}")
        return words

    @property
    def is_folder(self) -> bool:
        """Whether it is a Hugging Face folder, and no run directory."""
        is_run = (self.path / sealed.CONFIG).is_file()
        return not is_run and model_folder.is_model_folder(self.path)

    @property
    def title(self) -> str:
        """The source in words: the folder, or the run with its step and a kind other than the
        weights that were trained.
        """
        return self._joined(" at step ", ", ")

    def __str__(self) -> str:
        return self._joined("@", ":")

    def _joined(self, before_step: str, before_kind: str) -> str:
        text = str(self.path)
        if self.step is not None:
            text += f"{before_step}{self.step}"
        if self.kind != WEIGHTS:
            text += f"{before_kind}{self.kind}"
        return text
