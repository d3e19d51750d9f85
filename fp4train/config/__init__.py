"""The configuration: its schema, the binding of YAML to typed objects, command-line overrides,
plugins.
"""

from fp4train.config.binding import bind as bind
from fp4train.config.binding import complete as complete
from fp4train.config.binding import default_of as default_of
from fp4train.config.binding import path_values as path_values
from fp4train.config.binding import unknown_keys as unknown_keys
from fp4train.config.folders import CONFIGS as CONFIGS
from fp4train.config.folders import RECIPES as RECIPES
from fp4train.config.folders import own_options as own_options
from fp4train.config.plugins import own_class as own_class
from fp4train.config.schema import CheckpointSettings as CheckpointSettings
from fp4train.config.schema import Config as Config
from fp4train.config.schema import TrainSettings as TrainSettings
from fp4train.config.schema import plain as plain
from fp4train.config.schema import to_config as to_config
