"""fp4train prepare key=value… [part=3/16] [verify=true]

Tokenise the data of a run into data.cache_dir, where its start finds them;
trains nothing. Started again it goes on; several at once share the work, on any
machines with the same folder. Takes the keys of a run, which are listed below.

  data.workers=N   so many processes
  part=3/16        one of 16 shares, for job arrays
  verify=true      once all is there, read it, and make anew what is damaged
"""

import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fp4train.cli.launch import Command, launch
from fp4train.config.command_line import CommandLine, read_line
from fp4train.data.tokenizers.json_file import keeps_tokenizer
from fp4train.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(CommandLine):
    part: str = "1/1"
    verify: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """The number of this share, from 0, and how many there are.

        Raises:
            UserError: they are none.
        """
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.part)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"part={self.part} must be a share such as 3/16, from 1/16 to 16/16")
        return int(match[1]) - 1, int(match[2])


def main(arguments: list[str]) -> int:
    """Tokenise; returns the exit code."""
    line = read_line(arguments, PrepareOptions, __doc__, keys=None)
    return launch(
        [*line.flags, *line.words], partial(_prepare, share=line.share, verify=line.verify)
    )


def _prepare(command: Command, share: tuple[int, int], *, verify: bool) -> int:
    config = command.config
    entries_of = getattr(config.data, "entries", None)
    if entries_of is None:
        raise UserError(
            f"{type(config.data).__name__} keeps no tokens in a cache: its run needs no preparation"
        )
    with ExitStack() as stack:
        place = Path(config.run.dir)
        if not keeps_tokenizer(place):
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        entries = entries_of(place, config.train.seq_len)
        for entry in entries:
            print(entry.prepare(*share, verify=verify))
    if not entries:
        print("nothing to prepare: these data are not kept in a cache")
    return 0
