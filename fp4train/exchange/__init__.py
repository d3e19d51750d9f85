"""Models in and out: the folders of other software, which are written without building a model and
without any other framework; and what a trained model says: text, and its losses on tasks.
"""

from fp4train.exchange.card import RecordedResults as RecordedResults
from fp4train.exchange.evaluation import (
    HELD_OUT as HELD_OUT,
    Score as Score,
    held_out as held_out,
    log_likelihoods as log_likelihoods,
)
from fp4train.exchange.folder import new_export as new_export, write_weights as write_weights
from fp4train.exchange.formats import (
    COMPRESSED_TENSORS as COMPRESSED_TENSORS,
    FORMATS as FORMATS,
    LAYOUTS as LAYOUTS,
    MODELOPT as MODELOPT,
)
from fp4train.exchange.generation import (
    Sampling as Sampling,
    TextStream as TextStream,
    generate as generate,
)
from fp4train.exchange.huggingface import export_huggingface as export_huggingface
from fp4train.exchange.packed import pack as pack
from fp4train.exchange.quantised import Measures as Measures, export_quantised as export_quantised
from fp4train.exchange.servers import SERVERS as SERVERS
from fp4train.exchange.stored import open_stored as open_stored
from fp4train.exchange.tokenizer import stored_tokenizer as stored_tokenizer
from fp4train.exchange.trained import (
    NamedRecipe as NamedRecipe,
    TrainedModel as TrainedModel,
    load_trained as load_trained,
)
from fp4train.exchange.verify import Verified as Verified, verify as verify
