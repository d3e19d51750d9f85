"""Checkpoints: verified folders of safetensors and JSON, written atomically by one rank or many,
free of pickle.
"""

from fp4train.checkpoint.folder import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    load as load,
    prune as prune,
    save as save,
    set_doubt as set_doubt,
    steps as steps,
)
from fp4train.checkpoint.layout import (
    ALONE as ALONE,
    DOUBT as DOUBT,
    GOOD as GOOD,
    NAMED as NAMED,
    STATE as STATE,
    SUMS as SUMS,
    WEIGHTS as WEIGHTS,
    WRITE_SECONDS as WRITE_SECONDS,
    CheckpointGroup as CheckpointGroup,
    directory_name as directory_name,
    file_name as file_name,
)
from fp4train.checkpoint.model_folder import open_weights as open_weights
from fp4train.checkpoint.reading import StoredTensors as StoredTensors
from fp4train.checkpoint.source import WeightSource as WeightSource
from fp4train.checkpoint.tensors import (
    StreamedTensor as StreamedTensor,
    read_header as read_header,
    write_parts as write_parts,
)
from fp4train.checkpoint.tree import (
    escaped as escaped,
    flatten as flatten,
    merged as merged,
    unflatten as unflatten,
)
