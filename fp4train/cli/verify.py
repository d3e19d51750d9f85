"""fp4train verify FOLDER against=RUN [key=value…] [--json]

Whether a folder that `export` wrote has the numbers of the run: codes, block scales, global scales, what is in high
precision, names, shapes and configuration; a line for each layer, and for each file that an export does not write,
since other software may read it. Exit code 0: all are equal; 1: not.

  against=RUN      the run directory, or RUN@200:ema as for export
  step=200         the checkpoint; the default is the one that the folder names, or the newest
  stretch=100      a step of the steps whose codes the folder has; the default is as it says
  loss=8           also the loss of the folder in transformers, on so many batches of held-out text, beside the run's,
                   where all is equal
  --json           as data
  data.path=PATH   and other paths of the run's data, where it names some outside of itself, for loss=
  plugins=[NAME]   packages of classes of your own that the run needs
"""

import json
from pathlib import Path

from fp4train.cli.output import print_screen, usage
from fp4train.cli.trained import STEP, named_paths, source_named
from fp4train.config import overrides, plugins
from fp4train.config.overrides import Option, read_options
from fp4train.errors import UserError
from fp4train.exchange.served import served_losses
from fp4train.exchange.verify import verify
from fp4train.text import whole_number

USAGE = usage(__doc__)
OPTIONS = {
    "against": Option(),
    "step": STEP,
    "stretch": Option(
        whole_number, "stretch={!r} must be a step of the steps whose codes the folder has"
    ),
    "loss": Option(whole_number, "loss={!r} must be a number of batches"),
}


def main(arguments: list[str]) -> int:
    """Compare, and print a line for each layer; returns the exit code."""
    line = read_options(arguments, OPTIONS, keys=("plugins",), data=True)
    run, step, stretch, batches = (line.options[key] for key in OPTIONS)
    line.check_flags(USAGE, folders=False)
    if len(line.runs) != 1 or run is None:
        raise UserError(f"verify needs one folder and the run that it was made from: {USAGE}")
    paths = named_paths(overrides.parse(line.overrides), tuple(OPTIONS))
    with plugins.using(overrides.plugins(line.overrides)):
        verified = verify(Path(line.runs[0]), source_named(run, step), stretch=stretch)
        losses: dict[str, float] = {}
        if batches and verified.equal:
            losses = served_losses(verified, batches, paths)
    if line.as_data:
        print(json.dumps({**verified.as_json(), "losses": losses}, indent=1))
    else:
        print_screen("verify.txt", verified=verified, losses=losses, batches=batches)
    return 0 if verified.equal else 1
