"""Model architectures: one folder per family; `common` holds the parts that families share.

A new model is a folder with a frozen dataclass like `Architecture` in `model.py`, and a YAML in
`configs/model`; one that `transformers` has too goes there and back by its `hf.py` (`families.py`).

Linear layers of a model are torch's own nn.Linear until `fp4train.convert` replaces them. Of the
package's code outside of `nn/` three places ask for that class: what finds the layers
(`precision/blocks.py`), what says why one is not replaced (`precision/layers.py`), and what draws
its first weights (`models/common/initialise.py`).
"""

from typing import Protocol

from torch import nn


class Architecture(Protocol):
    """The shape of a model.

    `build` returns a module. `model(tokens, targets)`, int64 [B, T] each, returns the mean loss in
    nats per token; `model(tokens)` returns logits [B, T, vocabulary]. Its repeated blocks are in an
    `nn.ModuleList`, or it names them (`precision/blocks.py`), so that a policy can count them.
    Activations have the dtype that `precision.context.activation_dtype` gives. A model whose
    weights exceed the machine's memory is refused: `build` is first called on the meta device
    (`run/build.py`).
    """

    def build(self, *, vocab_size: int, seq_len: int) -> nn.Module:
        """The model with newly initialised weights."""
