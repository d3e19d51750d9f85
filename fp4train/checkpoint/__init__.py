"""Checkpoints: verified folders of safetensors and JSON, written atomically by one rank or many,
free of pickle.
"""

from fp4train.checkpoint.folder import Checkpoint as Checkpoint
from fp4train.checkpoint.folder import CheckpointError as CheckpointError
from fp4train.checkpoint.folder import load as load
from fp4train.checkpoint.folder import newest_state as newest_state
from fp4train.checkpoint.folder import prune as prune
from fp4train.checkpoint.folder import save as save
from fp4train.checkpoint.folder import steps as steps
from fp4train.checkpoint.layout import ALONE as ALONE
from fp4train.checkpoint.layout import CheckpointGroup as CheckpointGroup
from fp4train.checkpoint.layout import directory_name as directory_name
from fp4train.checkpoint.layout import file_name as file_name
from fp4train.checkpoint.reading import StoredTensors as StoredTensors
from fp4train.checkpoint.tensors import StreamedTensor as StreamedTensor
from fp4train.checkpoint.tensors import read_header as read_header
from fp4train.checkpoint.tensors import write_parts as write_parts
from fp4train.checkpoint.tree import escaped as escaped
from fp4train.checkpoint.tree import flatten as flatten
from fp4train.checkpoint.tree import unflatten as unflatten
