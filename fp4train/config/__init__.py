"""The configuration: its schema, the binding of YAML to typed objects, command-line overrides,
plugins.
"""

from fp4train.config.folders import CONFIGS as CONFIGS
from fp4train.config.folders import RECIPES as RECIPES
from fp4train.config.schema import Config as Config
from fp4train.config.schema import plain as plain
from fp4train.config.schema import to_config as to_config
