"""What only a GPU machine can tell, in parts of at most eight minutes, each with its results on disk:

    bash scripts/gpu_check.sh benchmarks/NAME [PART…] [--te FOLDER] [--archive FOLDER]
    bash scripts/gpu_check.sh [benchmarks/NAME] [PART…] --dry-run

`gpu_parts.py` lists the parts; without one, all run but those that are only run when asked for. Results are files
NAME-*.json, .md and .png and runs/NAME-*; what is done is noted in NAME.done and not done again, so that a part that
was cut off goes on when it is called again. After each step, also one that failed, and every half minute of one, all
results are packed into NAME.tgz in `--archive` (by default the folder that the environment calls OUT), without
checkpoints and compiled kernels: where only that folder comes back from a machine, nothing is lost. Unpacked beside
NAME.done it lets another machine go on.

A step that takes longer than is left of its part's `--minutes` is ended with all its processes. What cannot run on a
machine is left out with its reason. The last line names what failed, what cannot run here, and what was left for want
of time. Exit code 0: nothing failed, though steps may be left; 1: something did; 2: wrong arguments.

`--te FOLDER` installs a carried Transformer Engine first: FOLDER/install.sh is called with the folder to install into.

`--dry-run` runs all of it on a CPU, at tiny sizes and in one process, with stand-ins for what needs a GPU, which
`gpu_stand_ins.py` names, and says for each step what a GPU would be asked. Its figures mean nothing. What has no
stand-in is only named: the installation of Transformer Engine, and compute-sanitizer. Without benchmarks/NAME its
results go to a new temporary folder, which its first line names.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpu_parts import ASKED_FOR, PARTS, ROOT, SCRIPTS, Step, hours, site_of, steps_of

LEFT_OUT = 3
"""Exit code of a step that cannot run on this machine; its last line says why."""
EVERY = 30.0
"""Seconds between two archives during a step."""


@dataclass(kw_only=True)
class Check:
    """The state of one call.

    Args:
        out: results begin with this path.
        archive: the folder that keeps what is packed; None: nothing is packed.
        seconds: of a part.
        dry: whether it is a dry run.
    """

    out: Path
    archive: Path | None
    seconds: float
    te: Path | None = None
    dry: bool = False
    failed: list[str] = field(default_factory=list)
    """Steps that did."""
    absent: list[str] = field(default_factory=list)
    """Steps that cannot run here, or are only named in a dry run."""
    late: list[str] = field(default_factory=list)
    """Steps for which no time was left."""

    @property
    def done(self) -> Path:
        return self.out.with_name(f"{self.out.name}.done")

    def part(self, name: str) -> None:
        """Run the steps of a part that are not done yet, as long as there is time."""
        ends = time.monotonic() + self.seconds
        print(f"==== {name}: {PARTS[name]}", flush=True)
        for step in steps_of(name, self.out, self.te, dry=self.dry):
            if step.name in (self.done.read_text().splitlines() if self.done.exists() else ()):
                print(f"== {step.name}: done before")
                continue
            self.step(step, ends - time.monotonic())
            self.pack()

    def step(self, step: Step, seconds: float) -> None:
        """Run one, and note how it ended."""
        began = time.monotonic()
        if self.dry:
            print(f"== {step.name}: on a GPU: {step.asks}")
            code = dry_step(step)
        elif seconds <= 0:
            print(f"== {step.name}: no time left in this part; call it again")
            self.late.append(step.name)
            return
        else:
            print(f"== {step.name}: {shlex.join(step.words)}", flush=True)
            code = self.run(step, seconds)
        took = f"{time.monotonic() - began:.0f} s"
        if code == 0:
            with self.done.open("a") as file:
                file.write(f"{step.name}\n")
            print(f"== {step.name}: ended, {took}", flush=True)
        elif code == LEFT_OUT:
            print(f"== {step.name}: left out", flush=True)
            self.absent.append(step.name)
        else:
            print(f"== {step.name}: FAILED ({code}), {took}", flush=True)
            self.failed.append(step.name)

    def summary(self) -> str:
        """One line: what failed, what cannot run here, and what is still to be done."""
        told = {"failed": self.failed, "cannot run here": self.absent, "no time was left, call it again": self.late}
        return (
            "; ".join(f"{what}: {', '.join(steps)}" for what, steps in told.items() if steps) or "all steps ended well"
        )

    def run(self, step: Step, seconds: float) -> int:
        """A process group of its own, which is ended as a whole; 124 if it took too long."""
        command, log = step.command(), self.out.with_name(f"{self.out.name}-{step.name.replace(' ', '-')}.log")
        if shutil.which(command[0] if command[0] != "env" else command[2]) is None:
            print(f"{command[0]} is not installed")
            return LEFT_OUT
        ends = time.monotonic() + seconds
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                while True:
                    try:
                        code = process.wait(max(0.0, min(EVERY, ends - time.monotonic())))
                        break
                    except subprocess.TimeoutExpired:
                        self.pack()
                        if time.monotonic() >= ends:
                            print(f"ended after {seconds:.0f} s, what is left of the part")
                            code = 124
                            break
            finally:
                end_group(process)
        print(*log.read_text(errors="replace").splitlines()[-12:], sep="\n")
        if step.name == "doctor" and code in (0, 1):
            shutil.copyfile(log, self.out.with_name(f"{self.out.name}-doctor.json"))
        return code

    def environment(self) -> dict[str, str]:
        """The package, the carried Transformer Engine, and a cache of kernels that is no result."""
        known = [str(ROOT), *([str(site_of(self.out))] if site_of(self.out).is_dir() else [])]
        path = os.pathsep.join([*known, *filter(None, [os.environ.get("PYTHONPATH")])])
        kernels = str(Path(tempfile.gettempdir(), f"{self.out.name}.triton"))
        return {"TRITON_CACHE_DIR": kernels} | dict(os.environ) | {"PYTHONPATH": path}

    def pack(self) -> None:
        """Write NAME.tgz: whole or, where that fails, as it was."""
        if self.archive is None:
            return
        self.archive.mkdir(parents=True, exist_ok=True)
        target = self.archive / f"{self.out.name}.tgz"
        beside = target.with_suffix(".part")
        with tarfile.open(beside, "w:gz") as file:
            for path in sorted([*self.out.parent.glob(f"{self.out.name}*"), *ROOT.glob(f"runs/{self.out.name}-*")]):
                if path == site_of(self.out) or path.suffix in (".tgz", ".part"):
                    continue
                name = f"runs/{path.name}" if path.parent.name == "runs" else path.name
                file.add(path, name, filter=lambda each: None if "/checkpoints" in each.name else each)
        beside.replace(target)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue


def dry_step(step: Step) -> int:
    """The same in this process, with what stands in for a GPU; returns the exit code."""
    if step.dry is None:
        print(f"== {step.name}: only named in a dry run: {shlex.join(step.words)}")
        return LEFT_OUT
    first, *rest = step.words
    try:
        if first == "fp4train":
            import gpu_runs
            import gpu_stand_ins

            with gpu_stand_ins.instead_of([*rest, *step.dry]) as words:
                said = gpu_runs.in_this_process(words)
            print(said or "ended well")
            return 1 if said else 0
        with arguments([first, *rest, *step.dry]):
            runpy.run_path(str(SCRIPTS / first), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception:  # a step of a real run is a process, which would end with this traceback and 1 as well
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def arguments(words: list[str]) -> Iterator[None]:
    """What a program finds in `sys.argv`."""
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


def read(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out",
        type=Path,
        nargs="?",
        help="beginning of the paths of all results: benchmarks/NAME; a dry run needs none",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument(
        "--te", type=Path, metavar="FOLDER", help="a Transformer Engine to install, with its install.sh"
    )
    parser.add_argument("--archive", type=Path, default=os.environ.get("OUT"), help="folder of NAME.tgz")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a part")
    parser.add_argument("--dry-run", action="store_true", help="all of it on a CPU, with stand-ins")
    parser.add_argument("--from", dest="here", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--write-hours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args(words)
    if given.out is not None and str(given.out) in PARTS:
        given.out, given.parts = None, [str(given.out), *given.parts]
    if given.out is None:
        if not given.dry_run:
            parser.error("the following argument is required: out, before the parts")
        given.out = Path(tempfile.mkdtemp(prefix="gpu_check_"), "dry")
        print(f"results: {given.out}-*")
    if unknown := [each for each in given.parts if each not in PARTS]:
        parser.error(f"unknown part {unknown[0]}: it is one of {', '.join(PARTS)}")
    given.out = (given.here / given.out).absolute()
    given.te = None if given.te is None else (given.here / given.te).absolute()
    if given.te is not None and not (given.te / "install.sh").is_file():
        parser.error(f"--te {given.te} holds no install.sh")
    return given


def main(words: list[str] | None = None) -> int:
    given = read(words)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.write_hours:
        path = given.out.with_name(f"{given.out.name}-hours.sh")
        path.write_text(hours(given.out.name))
        print(f"{path}: DATA=tokens.bin VOCABULARY=128256 bash {path}")
        return 0
    archive = None if given.archive is None else (given.here / given.archive).absolute()
    if given.dry_run:
        import gpu_stand_ins

        sys.path.insert(0, str(ROOT))
        gpu_stand_ins.interpret()
    check = Check(out=given.out, archive=archive, seconds=60 * given.minutes, te=given.te, dry=given.dry_run)
    for part in given.parts or [each for each in PARTS if each not in ASKED_FOR]:
        check.part(part)
    print(f"gpu_check: {check.summary()}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
