"""The configuration: its schema, the binding of YAML to typed objects, command-line overrides, plugins."""

from fp4train.config.folders import CONFIGS, RECIPES
from fp4train.config.schema import Config, plain, to_config

__all__ = ["CONFIGS", "RECIPES", "Config", "plain", "to_config"]
