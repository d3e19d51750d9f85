"""The configuration: its schema, the binding of YAML to typed objects, command-line overrides,
plugins.
"""

from fp4train.config.binding import (
    bind,
    complete,
    default_of,
    path_values,
    unknown_keys,
)
from fp4train.config.folders import (
    CONFIGS,
    RECIPES,
    own_options,
)
from fp4train.config.plugins import own_class
from fp4train.config.schema import (
    CheckpointSettings,
    Config,
    TrainSettings,
    plain,
    to_config,
)
