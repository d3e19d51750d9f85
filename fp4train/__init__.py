"""fp4train: end-to-end low-precision pretraining with precision as an object.

import fp4train as f4
from fp4train.precision import NVFP4, LayerPolicy

model = f4.convert(model)                                    # nn.Linear → fp4train Linear, weights shared
with f4.autocast(NVFP4(), policy=LayerPolicy(last=0.15)):    # nesting overrides, as with Transformer Engine
    loss = model(tokens)
loss.backward()                                              # outside, as with Transformer Engine
"""

from fp4train.audits.loop import audit
from fp4train.nn import convert
from fp4train.nn.conversion import report as conversion
from fp4train.precision import autocast
from fp4train.precision.plan import plan

__version__ = "0.1.0"
__all__ = ["audit", "autocast", "conversion", "convert", "plan"]
