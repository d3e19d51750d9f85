"""Whether two checkouts train to the same bits.

    python scripts/same_bits.py OLD NEW [RECIPE …] [--ranks 1 2]

Each checkout, with its own `.venv`, trains a tiny Llama in each recipe (default: all of OLD's `recipes/`) on one and on
two gloo ranks. Each run is killed in the middle and resumed. Compared are what `metrics.jsonl` says of each step,
without timings and memory, and every tensor of the last checkpoint, by name and byte. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

STEPS = 12
KILLED_AFTER = 5
TINY = (
    "model.width=128",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=192",
    "device=cpu",
    "train.batch_size=4",
    "train.seq_len=32",
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    "policy.last=0.5",
    "eval.batches=1",
    "eval.every=4",
    "eval.errors_every=3",
    "track=jsonl",
    "data=text",
    "run.name=a",
)
"""Rows of 128 and heads of 64 features, which the C kernels of norms, gates and rotations take."""
PATHS = ("data.path=text.txt", "data.cache_dir=cache")
ASKED = "FP4TRAIN_SAME_BITS"
"""Set for the process that each checkout runs: the recipes and numbers of ranks, as JSON."""
MEASURED = re.compile(r"perf/|time/|after$|crc$")
"""Keys of a step whose values are timings, memory or checksums of lines."""


def last_step(metrics: Path) -> int:
    """The last step that a running run has written."""
    try:
        steps = re.findall(r'"step": (\d+), "train', metrics.read_text(errors="replace"))
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0


def kill_after(metrics: Path, step: int) -> None:
    """SIGKILL this process once `step` is written."""
    while last_step(metrics) < step:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def rank(arguments: list[str], number: int, ranks: int, port: int, *, killed: bool) -> int:
    """Fork a rank that runs the command line in the current directory; its process id."""
    if child := os.fork():
        return child
    if ranks > 1:
        place = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
        }
        os.environ.update(
            {k: str(v) for k, v in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    log = os.open(f"rank{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code: object = 70
    try:
        from fp4train.cli import main

        if killed:
            threading.Thread(
                target=kill_after, args=(Path("runs/a/metrics.jsonl"), KILLED_AFTER), daemon=True
            ).start()
        main(arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 70)


def command(arguments: list[str], ranks: int, *, killed: bool = False) -> None:
    """Run it on so many ranks. Once one was killed, the others are."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    running = [rank(arguments, number, ranks, port, killed=killed) for number in range(ranks)]
    while running:
        ended, status = os.wait()
        running.remove(ended)
        code = os.waitstatus_to_exitcode(status)
        if code != (-signal.SIGKILL if killed else 0):
            log = Path("rank0.log").read_text()[-1500:]
            raise RuntimeError(f"{' '.join(arguments)}: a rank ended with {code}: {log}")
        if killed:
            for other in running:
                os.kill(other, signal.SIGKILL)


def digests(run: Path) -> dict[str, str]:
    """Of what a run wrote, by step and tensor."""
    import torch
    from safetensors import safe_open

    texts = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "event" not in values and "step" in values:
            told = {key: value for key, value in values.items() if not MEASURED.search(key)}
            texts[f"step {values['step']}"] = json.dumps(told, sort_keys=True)
    for file in sorted((run / "checkpoints" / f"step_{STEPS:08d}").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  the file is no mapping
                tensor = tensors.get_tensor(name)
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                digest = hashlib.sha256(data).hexdigest()
                # of the rank; weights may lie apart from moments
                part = file.stem.partition("-")[2]
                texts[f"{part} {name}".strip()] = f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
    return texts


def measure(recipes: list[str], ranks: list[int]) -> None:
    """Print a line of JSON per run of the checkout whose interpreter this is."""

    text = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    for recipe in recipes:
        for size in ranks:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                Path("text.txt").write_text(text[:200_000])
                command([*TINY, *PATHS, f"recipe={recipe}"], size, killed=True)
                command(["resume=runs/a", *PATHS], size)
                print(
                    json.dumps({"recipe": recipe, "ranks": size, "found": digests(Path("runs/a"))}),
                    flush=True,
                )
                os.chdir("/")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    recipes = options.recipes or sorted(
        path.stem for path in (options.old / "recipes").glob("*.yaml")
    )
    asked = json.dumps([recipes, options.ranks])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", ASKED: asked}
    old, new = (
        subprocess.Popen(
            [tree / ".venv/bin/python", __file__],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tree in (options.old, options.new)
    )
    assert old.stdout is not None and new.stdout is not None
    runs = different = 0
    for old_run, new_run in map(
        lambda pair: map(json.loads, pair), zip(old.stdout, new.stdout, strict=False)
    ):
        keys = old_run["found"].keys() | new_run["found"].keys()
        unlike = sorted(
            key for key in keys if old_run["found"].get(key) != new_run["found"].get(key)
        )
        runs += 1
        different += bool(unlike)
        told = f"equal: {len(keys)} steps and tensors"
        if unlike:
            told = f"DIFFERENT: {', '.join(unlike[:4])}"
        print(f"{old_run['recipe']}, ranks {old_run['ranks']}: {told}", flush=True)
    failed = max(old.wait(), new.wait())
    print(f"{runs} runs of {len(recipes) * len(options.ranks)}, {different} different")
    return int(bool(failed or different or runs < len(recipes) * len(options.ranks)))


if __name__ == "__main__":
    if ASKED in os.environ:
        measure(*json.loads(os.environ[ASKED]))
    else:
        sys.exit(main())
