"""Checkpoints: verified folders of safetensors and JSON, written atomically by one rank or many,
free of pickle.
"""

from fp4train.checkpoint.folder import (
    Checkpoint,
    CheckpointError,
    load,
    prune,
    save,
    set_doubt,
    steps,
)
from fp4train.checkpoint.layout import (
    ALONE,
    DOUBT,
    GOOD,
    NAMED,
    STATE,
    SUMS,
    WEIGHTS,
    WRITE_SECONDS,
    CheckpointGroup,
    directory_name,
    file_name,
)
from fp4train.checkpoint.model_folder import open_weights
from fp4train.checkpoint.reading import StoredTensors
from fp4train.checkpoint.source import WeightSource
from fp4train.checkpoint.tensors import (
    StreamedTensor,
    read_header,
    write_parts,
)
from fp4train.checkpoint.tree import (
    escaped,
    flatten,
    merged,
    unflatten,
)
