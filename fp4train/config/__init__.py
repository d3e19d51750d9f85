"""The configuration: its schema, the binding of YAML to typed objects, command-line overrides,
plugins.
"""

from fp4train.config.binding import (
    bind as bind,
    complete as complete,
    default_of as default_of,
    path_values as path_values,
    unknown_keys as unknown_keys,
)
from fp4train.config.folders import (
    CONFIGS as CONFIGS,
    RECIPES as RECIPES,
    own_options as own_options,
)
from fp4train.config.plugins import own_class as own_class
from fp4train.config.schema import (
    CheckpointSettings as CheckpointSettings,
    Config as Config,
    TrainSettings as TrainSettings,
    plain as plain,
    to_config as to_config,
)
