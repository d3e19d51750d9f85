"""fp4train verify FOLDER against=RUN [key=value…] [--json]

Whether a folder that `export` wrote has the numbers of the run: codes, block
scales, global scales, what is in high precision, names, shapes and
configuration; a line for each layer, and for each file that an export does not
write, since other software may read it. Exit code 0: all are equal; 1: not.

  against=RUN      the run directory, or RUN@200:ema as for export
  step=200         the checkpoint; the default is the one that the folder names,
                   or the newest
  stretch=100      a step of the steps whose codes the folder has; the default
                   is as it says
  --json           as data
  plugins=[NAME]   packages of classes of your own that the run needs
"""

import json
from dataclasses import dataclass

from fp4train.cli.output import print_screen
from fp4train.cli.trained import source_named
from fp4train.config.command_line import CommandLine, WholeNumber, read_line
from fp4train.errors import UserError
from fp4train.exchange import verify


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CommandLine):
    against: str
    step: WholeNumber | None = None
    stretch: WholeNumber | None = None


def main(arguments: list[str]) -> int:
    """Compare, and print a line for each layer; returns the exit code."""
    line = read_line(arguments, VerifyOptions, __doc__, keys=("plugins",), data=True)
    if len(line.runs) != 1:
        raise UserError(f"verify needs one folder: {line.usage}")
    with line.using_plugins():
        source = source_named(line.against, line.step)
        verified = verify(line.run, source, stretch=line.stretch)
    if line.as_data:
        print(json.dumps(verified.as_json(), indent=1))
    else:
        print_screen("verify.txt", verified=verified)
    return 0 if verified.equal else 1
