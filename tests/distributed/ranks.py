"""Programs on several gloo ranks of this machine, and the end that such a program needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT = 240
"""Seconds that a program may take."""

END = """
sys.stdout.flush(); sys.stderr.flush()
dist.barrier(); dist.destroy_process_group(); os._exit(0)
"""
"""gloo's threads sometimes abort the interpreter's own end."""

BEGIN = """
import json, os, sys
import torch
import torch.distributed as dist
rank, world = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=world)

def report(value):
    if rank == 0:
        print("RESULT " + json.dumps(value))
"""


def run(program: str, ranks: int, folder: Path, *arguments: str) -> list[Any]:
    """What rank 0 of `program` reported; fails with the end of every rank's output if a rank fails."""
    script = folder / "program.py"
    script.write_text(BEGIN + program + END)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    outputs = [(folder / f"rank{rank}.txt") for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as stream:
            command = [sys.executable, str(script), str(rank), str(ranks), str(rendezvous), *arguments]
            processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment))
    try:
        failed = any([process.wait(timeout=LIMIT) for process in processes])
    finally:
        for process in processes:
            process.kill()
    ends = "\n".join(f"rank {rank}:\n{output.read_text()[-3000:]}" for rank, output in enumerate(outputs))
    assert not failed, ends
    lines = outputs[0].read_text().splitlines()
    return [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
