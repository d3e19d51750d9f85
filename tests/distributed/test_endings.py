"""All ranks end together: what cannot begin is told once, by rank 0; what ends a run is agreed, and
leaves it whole.
"""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import events, reading, recorded
from patches import ASKS_FOR_MXFP8, fails_at_3, told

Ranks = Any


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["parallel.dp_shard=3"], "parallel.dp_shard=3 is 3 ranks, and this run has 2"),
        pytest.param(
            ["parallel.dp_replicate=3"],
            "parallel.dp_replicate=3 does not divide the 2 ranks",
            marks=pytest.mark.long,
        ),
        (["train.batch_size=3"], "train.batch_size=3 is not divisible by 2 data ranks"),
        pytest.param(
            ["train.microbatch=4"],
            "train.batch_size=4 is not divisible by 2 data ranks × train.microbatch=4: every rank must "
            "have the same number of sequences and microbatches. Data ranks that divide it: 1; or use",
            marks=pytest.mark.long,
        ),
        (
            ["run.seed={rank}"],
            "the ranks do not run the same thing: run.seed is 0 on rank 0 and 1 on rank 1",
        ),
        pytest.param(
            ["run.dir=runs/a{rank}"],
            "run.dir is runs/a0 on rank 0 and runs/a1 on rank 1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["parallel.cp=2", "train.seq_len=48"],
            "parallel.cp=2: sequences of train.seq_len=48 tokens must be chunks of whole blocks, "
            "and are not: a shard of 24 is not whole blocks of 16; use parallel.cp=1 or 3",
            marks=pytest.mark.long,
        ),
        (
            ["parallel.cp=2", "parallel.tp=2"],
            "parallel.tp=2 × parallel.cp=2 does not divide the 2 ranks of this run; use parallel.cp=1",
        ),
        (
            ["parallel.ep=2"],
            "parallel.ep=2: LlamaModel has no layers of experts; use parallel.ep=1",
        ),
        pytest.param(
            ["parallel.ep=2", "parallel.dp_replicate=2"],
            "parallel.ep=2 does not divide the 1 rank of parallel.dp_shard, which share the experts; "
            "parallel.ep allowed: 1",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["parallel.ep=2", "model=moe_tiny", "model.experts.count=3"],
            "parallel.ep=2: the ranks do not divide the 3 experts of a layer; parallel.ep allowed: "
            "1, 3",
            marks=pytest.mark.long,
        ),
        (["parallel.ep=2", "parallel.tp=2"], "whole layers and sequences: use parallel.tp=1"),
        pytest.param(
            ["parallel.ep=2", "model=moe_tiny", "recipe=chon", "policy=all"],
            "and parallel.ep cuts blocks.1.mlp.gate_up: use parallel.ep=1, or",
            marks=pytest.mark.long,
        ),
        (["-m", "recipe=bf16,nvfp4"], "2 ranks train one together"),
    ],
)
def test_what_cannot_begin_is_one_message(ranks: Ranks, arguments: list[str], said: str) -> None:
    ended = ranks(2, "run.name=a", *arguments)
    assert said in ended.message and ended.codes == [1, 1], "the code of an error of the run"


SCHEDULE = """from dataclasses import dataclass
from fp4train.optim.schedule import Constant

@dataclass(frozen=True, kw_only=True)
class Halved(Constant):
    def after_warmup(self, step: int, warmup: int, steps: int) -> float:
        return {factor}
"""


@pytest.mark.long
def test_another_version_of_a_plugin_on_a_rank_is_refused(ranks: Ranks) -> None:
    """The rank's learning rate would be half of the others': each trains on, and no number shows
    it.
    """
    for rank in range(2):
        package = ranks.folder / f"side{rank}" / "mylab"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "schedules.py").write_text(SCHEDULE.format(factor=1 / (rank + 1)))
    options = (
        "plugins=[mylab]",
        "schedule=constant",
        "schedule._target_=mylab.schedules.Halved",
        "phases=none",
    )
    patch = "import sys\nsys.path.append(f'side{rank}')"
    refused = ranks(2, "run.name=a", *options, patch=patch).message
    assert "the source mylab/schedules.py is SHA-256 " in refused and "on rank 1" in refused
    assert not (ranks.folder / "runs/a").exists()


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        pytest.param(
            "import fp4train.run.host as h\nreal = h.package_version\n"
            "h.package_version = lambda name: f'{real(name)}.{rank}' if name == 'triton' "
            "else real(name)",
            "the version of triton is ",
            marks=pytest.mark.long,
        ),
        (
            "import fp4train.parallel.agree as a\nreal = a.own_files\n"
            "a.own_files = lambda: {k: v for k, v in real().items() if rank == 0 or '_cpu' "
            "not in k}",
            "_cpu.",
        ),
    ],
    ids=["a library", "no compiled extension"],
)
def test_another_library_or_extension_on_a_rank_is_refused(
    ranks: Ranks, patch: str, said: str
) -> None:
    refused = ranks(2, "run.name=a", patch=patch).message
    assert (
        said in refused and "on rank 0 and " in refused and "the same code and libraries" in refused
    )


def test_a_run_directory_that_is_not_shared_is_refused(ranks: Ranks) -> None:
    """Two machines with a disk each have the same path, and another directory there."""
    patch = "import fp4train.parallel.agree as a\na._SEEN_SECONDS = 0.5\nimport os\n"
    patch += "os.makedirs(f'disk{rank}', exist_ok=True)\nos.chdir(f'disk{rank}')"
    said = ranks(2, "run.name=a", patch=patch).message
    assert said.startswith("rank 1: runs/a is not the directory that rank 0 trains in")


@pytest.mark.long
def test_two_jobs_in_one_directory(ranks: Ranks) -> None:
    patch = (
        "import fcntl, os\nos.makedirs('runs/a', exist_ok=True)\nf = open('runs/a/.lock', 'w')\n"
    )
    patch += "if not rank:\n    import subprocess, sys\n"
    patch += (
        "    p = subprocess.Popen([sys.executable, '-c', 'import fcntl, time; f = "
        'open("runs/a/.lock");'
    )
    patch += (
        " fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(20)'], "
        "stdout=subprocess.PIPE)\n"
    )
    patch += "    p.stdout.readline()\n    import atexit\n"
    assert (
        "runs/a is in use: another process trains in it"
        in ranks(2, "run.name=a", patch=patch).message
    )


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2' must be a whole number from 0 below 2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_ADDR is not set: start the ranks with torchrun or srun",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "each process would train the whole batch"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "which host leads"),
    ],
)
def test_a_launcher_that_says_too_little_is_refused(
    ranks: Ranks, environment: dict[str, str], said: str
) -> None:
    assert said in ranks(1, "run.name=a", **environment).message


def test_one_rank_that_is_to_be_two_is_refused(ranks: Ranks) -> None:
    said = ranks(1, "run.name=a", "parallel.dp_shard=2").message
    assert "is 2 ranks, and this run has 1: start it under torchrun" in said


SLOW = "import time, fp4train.train as loop\noriginal = loop.train_step\n"
SLOW += (
    "def step(run, recipe):\n    time.sleep(0.05)\n    return original(run, "
    "recipe)\nloop.train_step = step"
)


def training(ranks: Ranks, run: str) -> bool:
    path = ranks.folder / "runs" / run / "metrics.jsonl"
    return path.exists() and path.read_text().count("train/loss") >= 2


@pytest.mark.long
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(
    ranks: Ranks, number: int, rank: int
) -> None:
    options = (
        "train.steps=900",
        "phases=none",
        "schedule=constant",
        "schedule.warmup=0",
        "eval.every=0",
        "recipe=bf16",
    )
    job = ranks.start(2, "run.name=a", *options, patch=SLOW)
    ranks.until(lambda: training(ranks, "a"))
    os.kill(job.processes[rank], number)
    ended = job.wait()
    assert ended.codes == [128 + number] * 2, ended.err
    done = len(ranks.losses("a"))
    assert [p.name for p in (ranks.folder / "runs/a/checkpoints").glob("step_*")] == [
        f"step_{done:08d}"
    ]
    assert f"step {done}, stopped by" in ended.out[0] and not ended.out[1]
    assert ranks(2, "resume=runs/a", f"train.steps={done + 2}").codes == [0, 0]
    whole = ranks.reference("train.microbatch=2", f"train.steps={done + 2}", *options[1:])
    ranks.same(whole, "a")


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all_in_seconds_with_its_name(ranks: Ranks, rank: int) -> None:
    ended = ranks(
        2,
        "run.name=a",
        "checkpoint.every=2",
        patch=fails_at_3(rank, "raise ValueError('a bad disk')"),
    )
    lines = [
        line for text in ended.err for line in text.splitlines() if line.startswith("fp4train: ")
    ]
    assert len(lines) == 1 and lines[0].startswith(f"fp4train: rank {rank} on ")
    assert lines[0].endswith("ended: ValueError: a bad disk")
    assert ended.codes == [1, 1] and ended.seconds < 60
    ranks.train(2, "a", "checkpoint.every=2")
    ranks.same(ranks.reference("train.microbatch=2"), "a")


OWN_CACHE = "import fp4train.data.source as s\nreal = s.entry_of\n"
OWN_CACHE += "s.entry_of = lambda d, t, folder, key: real(d, t, f'cache{rank}', key)\n"
"""Each rank is a machine with a disk of its own."""
CACHED = "path = next(__import__('pathlib').Path(f'cache{rank}').glob('*/*.bin')); "
DATA_CHANGES = {
    "cut off after the run had opened it": CACHED + "os.truncate(path, 100)",
    "changed after it was written": CACHED + "path.open('r+b').write(bytes(path.stat().st_size))",
}


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        pytest.param(0, "cut off after the run had opened it", marks=pytest.mark.long),
        (1, "changed after it was written"),
    ],
)
def test_a_cache_that_changes_on_one_machine_ends_all_ranks_saved(
    ranks: Ranks, rank: int, change: str
) -> None:
    options = ("train.steps=5", "eval.every=0")
    patch = OWN_CACHE + fails_at_3(rank, DATA_CHANGES[change])
    ended = ranks(2, "run.name=a", *options, patch=patch)
    assert f".bin was {change}" in ended.message
    steps = [
        int(folder.name[5:]) for folder in (ranks.folder / "runs/a/checkpoints").glob("step_*")
    ]
    assert steps in ([3], [4]) and ended.seconds < 60
    ranks.train(2, "a", *options, patch=OWN_CACHE)
    ranks.same(ranks.reference("train.microbatch=2", *options), "a")


@pytest.mark.long
def test_validation_text_that_one_rank_cannot_read_ends_all_saved(ranks: Ranks) -> None:
    unreadable = "from fp4train.errors import DataError; "
    unreadable += "run.data.validation.rows = lambda *place: (_ for _ in ()).throw(DataError('the text is gone'))"
    ended = ranks(2, "run.name=a", patch=fails_at_3(1, unreadable))
    assert ended.message == "rank 1: the text is gone" and ended.seconds < 60
    assert [folder.name for folder in (ranks.folder / "runs/a/checkpoints").glob("step_*")] == [
        "step_00000004"
    ]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_by_another_and_ends_all(ranks: Ranks, rank: int) -> None:
    """Rank 0 keeps the store through which ranks tell each other: without torchrun it is gone,
    too.
    """
    ended = ranks(
        2, "run.name=a", "checkpoint.every=2", patch=fails_at_3(rank, "os.kill(os.getpid(), 9)")
    )
    assert ended.codes == ([75, -9] if rank else [-9, 75])
    said = told(ended, by=1 - rank)
    assert (
        f"lost rank {rank}" in said
        and ", which ended without a word (killed, or out of memory?)" in said
    )
    assert len(events(ranks.run("a"), "lost rank")) == rank, "the first rank tells its trackers"
    ranks.train(2, "a", "checkpoint.every=2")
    ranks.same(ranks.reference("train.microbatch=2"), "a")


KILLS = int(os.environ.get("FP4TRAIN_KILLS", "2"))
"""Random moments at which a rank is killed; docs/scale.md says how many were tried by hand."""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_killed_at_any_moment_costs_no_bit(ranks: Ranks, seed: int) -> None:
    """While it starts, trains, evaluates, writes a checkpoint or ends: the same command goes on."""
    draw = random.Random(seed)
    long = ("train.steps=20", "eval.every=10", "phases=none")
    job = ranks.start(2, "run.name=killed", "checkpoint.every=3", *long)
    metrics = ranks.folder / "runs/killed/metrics.jsonl"
    step = draw.randrange(20)
    ranks.until(
        lambda: not step or (metrics.exists() and metrics.read_text().count("train/loss") >= step)
    )
    time.sleep(draw.uniform(0, 0.2 if step else 1.0))
    with suppress(ProcessLookupError):  # the run was faster than the draw
        os.kill(job.processes[draw.randrange(2)], signal.SIGKILL)
    if any(job.wait().codes):
        ranks.train(2, "killed", "checkpoint.every=3", *long)
    ranks.same(ranks.reference("train.microbatch=2", *long), "killed")


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_and_saves(ranks: Ranks, rank: int) -> None:
    poison = (
        "next(iter(run.model.parameters())); run.model.blocks[1].mlp.down.register_forward_hook("
    )
    poison += "lambda m, a, y: y * float('nan'))"
    said = ranks(2, "run.name=a", "train.steps=5", patch=fails_at_3(rank, poison)).message
    assert said.startswith(
        "step 3: loss is nan in NVFP4; first non-finite: output of blocks.1.mlp.down"
    )
    assert "A checkpoint from before this step is saved" in said
    ranks.train(2, "a", "train.steps=5")
    ranks.same(ranks.reference("train.microbatch=2", "train.steps=5"), "a")


def test_a_swap_comes_after_the_same_step_on_all_ranks(ranks: Ranks) -> None:
    ranks.train(2, "asked", "phases=none", patch=ASKS_FOR_MXFP8)
    ranks.train(1, "one", "phases=none", "train.microbatch=2", patch=ASKS_FOR_MXFP8)
    assert [line["precision/recipe"] for line in ranks.losses("asked")] == ["NVFP4"] * 2 + [
        "MXFP8"
    ] * 2
    ranks.same("one", "asked")
    assert recorded(Path(ranks.folder, "runs/asked")) == [(2, "mxfp8")]


@pytest.mark.long
def test_the_lead_decides_whether_this_user_wrote_a_configuration(ranks: Ranks) -> None:
    """Each machine may have a key of its own, or none."""
    ranks.train(2, "a", "train.steps=1", XDG_STATE_HOME=str(ranks.folder / "state{rank}"))
    named = reading(ranks.text)
    said = ranks(
        2, "resume=runs/a", "train.steps=2", XDG_STATE_HOME=str(ranks.folder / "other{rank}")
    ).message
    assert "names paths, services or commands outside of the run" in said and all(
        option in said for option in named
    )
    for options, state in ((), "state{rank}"), (named, "other{rank}"):
        steps = f"train.steps={2 + len(options)}"
        ended = ranks(2, "resume=runs/a", steps, *options, XDG_STATE_HOME=str(ranks.folder / state))
        assert ended.codes == [0, 0], ended.err
