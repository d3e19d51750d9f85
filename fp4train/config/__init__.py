"""The configuration: its schema, the binding of YAML to typed objects, command-line overrides."""

from fp4train.config.schema import CONFIGS, Config, plain, to_config

__all__ = ["CONFIGS", "Config", "plain", "to_config"]
