"""What a rank does for the first time, done before ranks are forked: torch, Hydra and jinja keep what
they find out (how operators divide tensors that are cut, signatures, parsed templates), and each
rank would find it out again, in a quarter of the time that a tiny run takes.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from command_line import TINY, besides
from llama_steps import model
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp4train as f4
from fp4train.cli import main as command_line
from fp4train.optim.adamw import AdamW
from fp4train.parallel import Parallel
from fp4train.parallel.fsdp import distribute, share_tensors
from fp4train.parallel.launch import ProcessRank
from fp4train.parallel.world import REPLICATE, SHARD, STAGES, TENSOR, World
from fp4train.precision import NVFP4

MANY = 8
"""More ranks than a test has: torch keeps meshes by their sizes, and one of this process, which is
the first rank of it, must be none of a job.
"""


def take() -> None:
    """A run of one rank, and a step of a model that is cut in each way. What libraries keep of them
    stays, and the seed of the run.
    """
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), settings_of_the_process():
        train_alone()
    for parallel in (Parallel(dp_shard=MANY), Parallel(tp=MANY)):
        step_of_a_cut_model(parallel)


@contextmanager
def settings_of_the_process() -> Iterator[None]:
    """Sets again what a command sets in its process for good."""
    log = logging.getLogger("fp4train")
    hook = sys.excepthook
    level = log.level
    handlers = log.handlers[:]
    environment = dict(os.environ)
    yield
    sys.excepthook = hook
    log.setLevel(level)
    log.handlers[:] = handlers
    os.environ.clear()
    os.environ.update(environment)


def train_alone() -> None:
    with TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("the quick brown fox " * 400, encoding="utf-8")
        words = besides(TINY, {"train.steps"})
        paths = (f"data.path={text}", f"data.cache_dir={folder}/cache", f"run.dir={folder}/run")
        try:
            command_line([*words, *paths, "train.steps=1", "backend=emulate"])
        except SystemExit as ended:
            assert ended.code == 0, ended.code


def step_of_a_cut_model(parallel: Parallel) -> None:
    """The first of `MANY` ranks, of which the others do not exist: what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MANY)
    mesh = parallel.mesh(MANY)
    sizes = (mesh.pipeline, mesh.replicate, mesh.shard, mesh.tensor)
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=(STAGES, REPLICATE, SHARD, TENSOR))
    world = World(
        place=ProcessRank(size=MANY),
        device=torch.device("cpu"),
        mesh=mesh,
        data_mesh=grid[REPLICATE, SHARD],
        tensor=grid[TENSOR] if mesh.tensor > 1 else None,
        control=dist.group.WORLD,
    )
    cut = model(width=128, layers=1, heads=MANY, kv_heads=MANY, hidden=128)
    share_tensors(cut, world, parallel)
    distribute(cut, world, parallel.gather, parallel.reduce)
    optimizer = AdamW().build(cut)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with warnings.catch_warnings(), f4.autocast(NVFP4(), step=0):
        # of views that FSDP's modules return, as in any run
        warnings.simplefilter("ignore", UserWarning)
        cut(tokens, tokens).backward()
    optimizer.step()
    dist.destroy_process_group()
