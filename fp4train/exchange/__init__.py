"""Models in and out: the folders of other software, which are written without building a model and
without any other framework; and what a trained model says: text, and its losses on tasks.
"""

from fp4train.exchange.card import RecordedResults
from fp4train.exchange.evaluation import (
    HELD_OUT,
    Score,
    held_out,
    log_likelihoods,
)
from fp4train.exchange.folder import new_export, write_weights
from fp4train.exchange.formats import (
    COMPRESSED_TENSORS,
    FORMATS,
    LAYOUTS,
    MODELOPT,
)
from fp4train.exchange.generation import (
    Sampling,
    TextStream,
    generate,
)
from fp4train.exchange.huggingface import export_huggingface
from fp4train.exchange.packed import pack
from fp4train.exchange.quantised import Measures, export_quantised
from fp4train.exchange.servers import SERVERS
from fp4train.exchange.stored import open_stored
from fp4train.exchange.tokenizer import stored_tokenizer
from fp4train.exchange.trained import (
    NamedRecipe,
    TrainedModel,
    load_trained,
)
from fp4train.exchange.verify import Verified, verify
