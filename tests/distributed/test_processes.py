"""A run in a process of its own: it is swapped from another terminal, and goes on after a kill."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from command_line import STEADY, Cli, lines, recorded

from fp4train.checkpoint import steps

Ranks = Any
ENDLESS = ("run.name=a", "train.steps=100000", "eval.every=0", *STEADY)


@contextmanager
def running(ranks: Ranks, *words: str) -> Iterator[Any]:
    """A job of one process, which ends with a test that fails."""
    job = ranks.start(1, *words)
    try:
        yield job
    except BaseException:
        job.kill()
        job.wait()
        raise


def test_a_running_process_is_swapped_from_another_terminal(cli: Cli, ranks: Ranks) -> None:
    run = ranks.run("a")
    with running(ranks, *ENDLESS) as job:
        ranks.until(lambda: (run / "metrics.jsonl").exists() and len(lines(run)) > 3)
        asked = cli.raw("swap", "runs/a", "recipe=bf16")
        assert asked.code == 0 and asked.out.startswith("runs/a: accepted, recipe bf16 from step ")
        refused = cli.raw("swap", "runs/a", "recipe=fp16").message
        assert "runs/a refuses recipe fp16 at the next step: a float16 run" in refused
        one_gemm = ("recipe=nvfp4", "recipe.high_precision=[dgrad]", "at=99999")
        answer = cli.raw("swap", "runs/a", *one_gemm).out
        assert "accepted, recipe nvfp4 (high_precision=[dgrad]) from step 99999 on" in answer
        listed = cli.raw("swap", "runs/a").out
        assert re.search(r"bf16 +took effect", listed)
        assert re.search(r"99999  nvfp4 .* recorded +cancel=99999", listed)
        cancelled = cli.raw("swap", "runs/a", "cancel=99999").out
        assert "the swap at step 99999 is cancelled" in cancelled
        assert "99999" not in cli.raw("swap", "runs/a").out
        begun = cli.raw("swap", "runs/a", f"cancel={recorded(run)[0][0]}").message
        assert "none is pending (what has begun stays)" in begun
        assert "is in use" in cli(*ENDLESS).message
        ranks.until(lambda: any(line.get("precision/recipe") == "BF16" for line in lines(run)))
        os.kill(job.processes[0], signal.SIGTERM)
    ended = job.wait()
    assert ended.codes == [128 + signal.SIGTERM]
    assert "stopped by SIGTERM" in ended.out[0] and "Traceback" not in ended.err[0]
    assert steps(run / "checkpoints") == [lines(run)[-1]["step"]]


def test_a_killed_process_goes_on_to_the_bit(ranks: Ranks) -> None:
    words = ("eval.every=0", "checkpoint.every=5", *STEADY)
    run = ranks.run("a")
    with running(ranks, *ENDLESS, *words) as job:
        ranks.until(lambda: len(list((run / "checkpoints").glob("step_*"))) > 1)
        job.kill()
    assert job.wait().codes == [-signal.SIGKILL]
    done = ranks.losses("a")[-1]["step"]
    ended = ranks(1, "resume=runs/a", f"train.steps={done + 2}")
    assert ended.codes == [0], ended.err
    ranks.train(1, "whole", *words, f"train.steps={done + 2}")
    ranks.same("whole", "a")
    assert [line["step"] for line in ranks.losses("a")] == list(range(1, done + 3))
