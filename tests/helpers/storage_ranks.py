"""What one rank does in the tests of sharded checkpoints: `run(TASK, FOLDER)`.

Each task gives plain data. `whole/` beside a checkpoint holds the same state as one rank wrote it.
"""

import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp4train import checkpoint, shards
from fp4train.audits.settings import AuditSettings
from fp4train.checkpoint import CheckpointGroup
from fp4train.config import CheckpointSettings
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.models.common import materialise
from fp4train.models.llama import Llama
from fp4train.nn import convert
from fp4train.optim import Constant
from fp4train.parallel.world import World
from fp4train.run.record.journal import Journal
from fp4train.run.record.run_record import RunRecord
from fp4train.run.state.base import RunState, saved_part
from fp4train.run.state.moments import Moments, group_values
from fp4train.run.state.weights import ModelWeights


class Tied(nn.Module):
    """Sizes that neither 2 nor 4 divides, a tied head, and more ranks than rows in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.narrow = nn.Linear(7, 3)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = torch.relu(block(h))
        return self.head(h).logsumexp(-1).sum() + self.narrow(h).square().sum()


def built(seed: int = 0, mesh: DeviceMesh | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(2):
        loss = model(torch.arange(step, step + 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[RunState]:
    run: Any = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        built_groups=group_values(optimizer),
        inventory=None,
        world=SimpleNamespace(device=torch.device("cpu")),
    )
    return [ModelWeights(run), Moments(run)]


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scales = {"blocks.0": {"history.x": torch.tensor([1.0, 2.0])}}
    saved = {state.key: state.saved() for state in states(model, optimizer)}
    return {**saved, "scaling": scales, "loss_scale": 1.0}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def others(size: int) -> dict[str, Tensor]:
    """DTensors of the kinds that tensor parallel and hybrid sharding make."""
    grid = init_device_mesh("cpu", (size // 2, 2))
    made = {}
    for name, shape, placements in (
        ("grid", (10, 6), [Shard(0), Shard(1)]),
        ("columns", (5, 9), [Replicate(), Shard(1)]),
        ("hybrid", (9, 4), [Replicate(), Shard(0)]),
        ("copies", (6,), [Replicate(), Replicate()]),
        ("number", (), [Replicate(), Replicate()]),
        ("empty", (0, 4), [Shard(0), Replicate()]),
        ("byte", (7, 8), [Shard(1), Shard(0)]),
    ):
        torch.manual_seed(len(name))
        whole = torch.randn(shape)
        whole = whole.to(torch.float8_e4m3fn).view(torch.uint8) if name == "byte" else whole
        made[name] = distribute_tensor(whole, grid, placements)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    torch.manual_seed(1)
    named = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    both = parallelize_module(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), named["tp"], plan)
    fully_shard(both, mesh=named["dp"])
    return made | {f"both.{name}": tensor for name, tensor in both.state_dict().items()}


def task_save(folder: Path, ranks: CheckpointGroup) -> Any:
    model, optimizer = built(mesh=init_device_mesh("cpu", (ranks.size,)))
    train(model, optimizer)
    for step in (1, 2):
        tree = state(model, optimizer)
        tensors, rest = checkpoint.flatten(tree)
        tensors |= others(ranks.size)
        checkpoint.save(folder / "parts", step, tensors, rest, keep=2, ranks=ranks)
        whole = {name: full(tensor) for name, tensor in tensors.items()}
        if ranks.first:
            checkpoint.save(folder / "whole", step, whole, rest, keep=2)
        losses = train(model, optimizer)
    parts = shards.owned(tensors, leads=ranks.leads)
    return {
        "losses": losses,
        "bytes": sum(
            part.tensor.nbytes for name, part in parts.items() if name != "model/head.weight"
        ),
    }


def task_load(folder: Path, ranks: CheckpointGroup) -> Any:
    """Equal bits of every tensor, whole and as parts; the run goes on."""
    found = checkpoint.load(folder / "parts", ranks=ranks)
    whole = checkpoint.load(folder / "whole", found.step)
    assert found.state == whole.state
    assert set(found.tensors) == set(whole.tensors)
    different = [
        n
        for n, t in whole.tensors.items()
        if found.tensors.dtype(n) != t.dtype or not same(found.tensors[n], t)
    ]
    model, optimizer = built(seed=9, mesh=init_device_mesh("cpu", (ranks.size,)))
    for each in states(model, optimizer):
        table = saved_part(found, each.key, model)
        each.check(table)
        each.load(table)
    sharded = [t for t in table["embed.weight"].values() if isinstance(t, DTensor)]
    assert len(sharded) == 2, "the moments lie as the parameter does"
    again, _ = checkpoint.flatten(state(model, optimizer))
    different += [
        name for name, tensor in again.items() if not same(full(tensor), whole.tensors[name])
    ]
    if ranks.size > 1:
        for name, tensor in others(ranks.size).items():
            read = found.tensors.read_like(name, tensor)
            if not same(full(read), whole.tensors[name]):
                different.append(f"{name} by parts")
    return {"different": different, "losses": train(model, optimizer), "step": found.step}


def same(a: Tensor, b: Tensor) -> bool:
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)


def task_find(folder: Path, ranks: CheckpointGroup) -> Any:
    """Which checkpoint is taken of each damaged folder, and what is said of the newer one."""
    told = {}
    for each in sorted(p for p in folder.iterdir() if p.is_dir()):
        try:
            found = checkpoint.load(each, ranks=ranks)
            told[each.name] = [found.step, *(reason for _, reason in found.skipped)]
        except UserError as error:
            told[each.name] = [None, str(error)]
    return told


def failing(step_of: str) -> None:
    """A disk that takes no more, for this rank alone."""
    from fp4train.checkpoint import tensors

    def full_disk(descriptor: int, data: Any) -> None:
        raise OSError(28, "No space left on device")

    def killed(descriptor: int, data: Any) -> None:
        os.write(descriptor, b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    tensors.write_all = {"full": full_disk, "killed": killed}[step_of]


def task_kill(folder: Path, ranks: CheckpointGroup) -> Any:
    """The last rank is killed in its write of step 2."""
    values = distribute_tensor(
        torch.arange(10.0), init_device_mesh("cpu", (ranks.size,)), [Shard(0)]
    )
    checkpoint.save(folder, 1, {"w": values}, {}, keep=5, ranks=ranks)
    if ranks.rank == ranks.size - 1:
        failing("killed")
    try:
        checkpoint.save(folder, 2, {"w": values}, {}, keep=5, ranks=ranks)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "written"


def task_async(folder: Path, ranks: CheckpointGroup) -> Any:
    """Checkpoints are written while training goes on, with collectives of its own; one fails, one
    is not finite.
    """
    from fp4train.checkpoint import tensors
    from fp4train.run.supervise.saving import Saver

    model, optimizer = built(mesh=init_device_mesh("cpu", (ranks.size,)))
    train(model, optimizer)
    place = Folder.open(folder / "run", create=True)
    run = SimpleNamespace(
        world=World(device=torch.device("cpu")),
        model=model,
        step=0,
        device=torch.device("cpu"),
        record=replace(
            RunRecord.empty(place),
            inbox=SimpleNamespace(sync=lambda journal: None),
            journal=Journal(place, ""),
        ),
    )
    run.state = lambda: state(model, optimizer)
    run.row_orders = dict
    run.states = states(model, optimizer)
    run.must_be_finite = lambda path: path.startswith(("model/", "optimizer/"))
    settings = CheckpointSettings(every=0, keep=10)
    parts = {
        "audit": AuditSettings(sums=1),
        "run": SimpleNamespace(name="a"),
        "train": SimpleNamespace(steps=9),
        "schedule": Constant(),
    }
    run.config = SimpleNamespace(checkpoint=settings, **parts)
    saver, told, held = Saver(run, ranks), [], None  # type: ignore[arg-type]
    original = tensors.write_all
    for step in (1, 2, 3, 4):
        run.step = step
        last = ranks.rank == ranks.size - 1
        if step == 2 and last:
            failing("full")
        if step == 3 and last:
            held = shards.local(optimizer.state_dict()["state"][2]["exp_avg"])
            held[0] = torch.nan
        tree = {
            name: full(tensor).clone()
            for name, tensor in checkpoint.flatten(state(model, optimizer))[0].items()
        }
        assert saver.begin(proven=True)
        if step < 3:
            train(model, optimizer)  # the copies are made: what is written is the state before
        elif held is not None:
            held[0] = 0.0
        saver.wait()
        tensors.write_all = original
        told += [[each.step, each.problem, each.bad] for each in saver.outcomes()]
        if told[-1][1:] == [None, None]:
            found = checkpoint.load(folder / "run" / "checkpoints", step, ranks=ranks)
            assert all(same(found.tensors[name], tensor) for name, tensor in tree.items())
    saver.close()
    return told


def task_born(folder: Path, ranks: CheckpointGroup) -> Any:
    """Checksums of the weights that ranks drew as shards, by how they are cut; and the first loss."""
    grid = init_device_mesh(
        "cpu", (ranks.size // 2 or 1, min(2, ranks.size)), mesh_dim_names=("dp", "tp")
    )
    meshes = {"sharded": init_device_mesh("cpu", (ranks.size,)), "hybrid": grid, "both": grid["dp"]}
    told: dict[str, Any] = {}
    for cut in ("sharded", "hybrid", "both") if ranks.size > 1 else ("sharded",):
        with torch.device("meta"):
            shape = Llama(width=32, layers=2, heads=4, kv_heads=2, hidden=48)
            model = convert(shape.build(vocab_size=60, seq_len=16))
        if cut == "both":
            for block in model.blocks:
                plan = {
                    "mlp.gate": ColwiseParallel(),
                    "mlp.up": ColwiseParallel(),
                    "mlp.down": RowwiseParallel(),
                }
                parallelize_module(block, grid["tp"], plan)
        for block in model.blocks:
            fully_shard(block, mesh=meshes[cut])
        fully_shard(model, mesh=meshes[cut])
        materialise(model, torch.device("cpu"), seed=5)
        assert model.head.weight is model.embed.weight
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + full(tensor).contiguous().numpy().tobytes())
        tokens = torch.arange(16)[None]
        loss = None if cut == "both" else float(model(tokens, tokens.roll(1)).detach())
        told[cut] = [digest.hexdigest(), loss]
    return told


def run(task: str, folder: str) -> Any:
    """What `task` gives on this rank."""
    return globals()[f"task_{task}"](Path(folder), CheckpointGroup(dist.new_group(backend="gloo")))
