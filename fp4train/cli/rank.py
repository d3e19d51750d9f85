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

Writes rank.json and rank.png; fp4train report RUN figures=pdf draws the picture
for a paper. Finished forks are recorded: the same command
goes on, with more forks, candidates or checkpoints too. Decide on the forks
beforehand: every further look at a record asks for more.
"""

from fp4train.cli.forks import making_forks, write_results
from fp4train.cli.output import fitted, terminal_width
from fp4train.config.command_line import read_line
from fp4train.lab.analysis import PICTURE, save
from fp4train.lab.studies import RANKING, RankRequest as RankOptions, RankResult, figures, rank
from fp4train.lab.studies.candidates import SECTIONS
from fp4train.lab.studies.ranking import render

FIGURE = "rank.png"


def main(arguments: list[str]) -> int:
    """Rank, print the table, and write rank.json and rank.png; returns the exit code."""
    line = read_line(arguments, RankOptions, __doc__, keys=(*SECTIONS, "plugins"), paths=True)
    with making_forks(line):
        ranking = rank(line)
    print(fitted(render(ranking, terminal_width())) + "\n")
    result = RankResult.of(ranking)
    files = write_results(RANKING, result, line, ranking.bases)
    save(figures.ranking(result), PICTURE, *(file.with_name(FIGURE) for file in files))
    for file in files:
        print(f"{file}; {file.with_name(FIGURE)}")
    return 0
