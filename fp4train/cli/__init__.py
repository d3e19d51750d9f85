"""The command line, one file per verb."""

from fp4train.cli.main import main
