"""fp4train rank RUN… recipe=A,B,… [policy=…] [phases=…] [baseline=A] [step=…] [forks=6]

Which recipe is better, and with what certainty: short forks of a checkpoint on
the same batches, their differences with intervals and tests (docs/ranking.md).
RUN… are run directories: what is found on one checkpoint holds for it alone, on
several (other seeds, recipes, ages) the spread between them is in the
intervals.

  recipe=A,B  policy=A,B  phases=A,B    and their keys, recipe.KEY=A,B: every
                                        combination is a candidate, the first
                                        one the reference; the default is
                                        recipe=bf16,mxfp8,nvfp4,mxfp4
  baseline=mxfp8   the candidate that gaps are to, by its name in the table; the
                   default is the first one
  step=100,200     the checkpoints of each run; the default is the newest
  forks=6          seeds of each candidate at each checkpoint
  steps=24         optimizer steps of a fork; the default with schedule=own is
                   the rest of the run
  schedule=linear  the learning rate falls to zero over the steps; own: as the
                   run's would
  lr=1e-3          that it falls from; the default is that of the checkpoint
  batches=8        validation batches; the default is the run's
  margin=0.0005    nats per token; smaller differences do not matter
  processes=1      forks at the same time, each with a copy of the model
  plugins=[NAME]   packages of the classes of your own that the run uses
  data.path=PATH   paths of the run's configuration, where it is another user's
                   or machine's, or the data was moved
  out=FOLDER       for the record and the results; the default is a folder in
                   RUN/studies
  picture=FILE     the picture for a paper, too: .svg, .pdf or .png, width=6.3
                   inches wide

Writes rank.json and rank.png. Finished forks are recorded: the same command
goes on, with more forks, candidates or checkpoints too. Decide on the forks
beforehand: every further look at a record asks for more.
"""

from dataclasses import dataclass
from pathlib import Path

from fp4train.cli.forks import making_forks, write_results
from fp4train.cli.output import fitted, terminal_width
from fp4train.config.command_line import read_line
from fp4train.lab.analysis import FIGURES, PICTURE, Width, check_out, save
from fp4train.lab.studies import RANKING, RankRequest, RankResult, figures, rank
from fp4train.lab.studies.candidates import SECTIONS
from fp4train.lab.studies.ranking import render

FIGURE = "rank.png"


@dataclass(frozen=True, kw_only=True)
class RankOptions(RankRequest):
    picture: Path | None = None
    width: Width = PICTURE


def main(arguments: list[str]) -> int:
    """Rank, print the table, and write rank.json and rank.png; returns the exit code."""
    line = read_line(arguments, RankOptions, __doc__, keys=(*SECTIONS, "plugins"), paths=True)
    if line.picture is not None:
        check_out(line.picture, FIGURES, "picture")
    with making_forks(line):
        ranking, folders = rank(line)
    print(fitted(render(ranking, terminal_width())) + "\n")
    result = RankResult.of(ranking)
    results = write_results(RANKING, result, folders, ranking.bases)
    pictures = [folder / FIGURE for folder in folders]
    draw = figures.ranking(result)
    save(draw, PICTURE, *pictures)
    if line.picture is not None:
        save(draw, line.width, line.picture)
        print(line.picture)
    for written, picture in zip(results, pictures, strict=True):
        print(f"{written}; {picture}")
    return 0
