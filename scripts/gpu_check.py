"""What only a GPU machine can tell:

    bash scripts/gpu_check.sh benchmarks/NAME --total 9 [PART…]     within nine minutes, however many parts
    bash scripts/gpu_check.sh benchmarks/NAME [PART…]               in parts of at most eight minutes each
    bash scripts/gpu_check.sh [benchmarks/NAME] [PART…] --dry-run   on a CPU

`gpu_parts.py` lists the parts. Without one, `--total` runs `nine`, whose order is that of what is worth most, and a
call without it all parts but those that are only run when asked for. `--total MINUTES` bounds the whole call, its last
archive included, `--minutes` each part. Each step of `nine` has a limit, too, which `--total` stretches or shortens;
what a step leaves of its time, the next one may take.

Results are files NAME-*.json, .md and .png and runs/NAME-*, written as they are found; what is done is noted in
NAME.done and not done again, so that a part that was cut off goes on when it is called again. After each step, also one
that failed, and every ten seconds of one, all results are packed into NAME.tgz in `--archive` (by default the folder
that the environment calls OUT), without checkpoints and compiled kernels: where only that folder comes back from a
machine, nothing is lost. Unpacked beside NAME.done it lets another machine go on.

A step whose time is up is ended with all its processes. What cannot run on a machine is left out with its reason. The
last line names what failed, what cannot run here, and what was left for want of time. Exit code 0: nothing failed,
though steps may be left; 1: something did; 2: wrong arguments; 3: torch sees no GPU, and nothing ran.

`--kernels ARCHIVE` unpacks kernels that `pack_gpu.py` compiled beforehand, and says in one line how many of those that
are launched are found.

`--te FOLDER` installs a carried Transformer Engine first: FOLDER/install.sh is called with the folder to install into.

`--dry-run` runs all of it on a CPU, at tiny sizes and in one process, with stand-ins for what needs a GPU, which
`gpu_stand_ins.py` names. It says for each step what a GPU would be asked, by which command and for how long; its
figures mean nothing, and no time is bounded. What has no stand-in is only named: the installation of Transformer
Engine, and compute-sanitizer. Without benchmarks/NAME its results go to a new temporary folder, which its first line
names.
"""

from __future__ import annotations

import argparse
import json
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

import gpu_kernels_packed
from gpu_parts import (
    ASKED_FOR,
    NINE,
    PARTS,
    ROOT,
    SCRIPTS,
    WITHOUT_GPU,
    Step,
    hours,
    site_of,
    steps_of,
)
from gpu_processes import TOO_LONG, Program, run_beside

LEFT_OUT = 3
"""Exit code of a step that cannot run on this machine, whose last line says why, and of a call that
sees no GPU.
"""
EVERY = 10.0
"""Seconds between two archives during a step."""
ENDING = 10.0
"""Seconds before the end of a call when its last step is ended: processes end, and results are
packed.
"""
PATIENCE = 60.0
"""Seconds in which torch must have said whether it sees a GPU."""


@dataclass(kw_only=True)
class Check:
    """The state of one call.

    Args:
        out: results begin with this path.
        archive: the folder that keeps what is packed; None: nothing is packed.
        seconds: of a part.
        ends: when the last step of the call is ended, of `time.monotonic`.
        dry: whether it is a dry run.
    """

    out: Path
    archive: Path | None
    seconds: float
    ends: float = float("inf")
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
        print(f"==== {name}: {PARTS[name]}", flush=True)
        ends = min(time.monotonic() + self.seconds, self.ends)
        stretch = (ends - time.monotonic()) / NINE
        spare = 0.0
        for step in steps_of(name, self.out, self.te, dry=self.dry):
            limit = float("inf") if step.limit is None else step.limit * stretch + spare
            began = time.monotonic()
            passed = self.together(step, limit, ends)
            spare = max(0.0, limit - (time.monotonic() - began))
            self.pack()
            if step.gate and not passed:
                print(f"== {name} stops here: without {step.name} the other steps tell nothing")
                return

    def together(self, step: Step, limit: float, ends: float) -> bool:
        """Run a step and those beside it that are not done yet; whether the step itself is done.

        Args:
            limit: seconds that each of them may take.
            ends: when their part does.
        """
        seconds = min(limit, ends - time.monotonic())
        pending = [each for each in (step, *step.beside) if each.name not in self.done_before()]
        for each in (step, *step.beside):
            if each not in pending:
                print(f"== {each.name}: done before")
            elif self.dry:
                self.dry_run(each)
            elif seconds <= 0:
                print(f"== {each.name}: no time left; call it again")
                self.late.append(each.name)
        if not self.dry and seconds > 0:
            self.run(pending, seconds)
        return step.name in self.done_before()

    def done_before(self) -> list[str]:
        return self.done.read_text().splitlines() if self.done.exists() else []

    def note(self, step: Step, code: int, seconds: float) -> None:
        """Note how a step ended that took so many seconds."""
        if code == 0:
            with self.done.open("a") as file:
                file.write(f"{step.name}\n")
            print(f"== {step.name}: ended, {seconds:.0f} s", flush=True)
        elif code == LEFT_OUT and not step.gate:
            print(f"== {step.name}: left out", flush=True)
            self.absent.append(step.name)
        else:
            print(f"== {step.name}: FAILED ({code}), {seconds:.0f} s", flush=True)
            self.failed.append(step.name)

    def summary(self) -> str:
        """One line: what failed, what cannot run here, and what is still to be done."""
        told = {
            "failed": self.failed,
            "cannot run here": self.absent,
            "no time was left, call it again": self.late,
        }
        return (
            "; ".join(f"{what}: {', '.join(steps)}" for what, steps in told.items() if steps)
            or "all steps ended well"
        )

    def run(self, steps: list[Step], seconds: float) -> None:
        """Run steps beside each other, each in a process group that is ended as a whole when the
        seconds are over.
        """
        possible = []
        for step in steps:
            print(f"== {step.name}: {shlex.join(step.words)}", flush=True)
            if (program := step.program()) is not None and shutil.which(program) is None:
                print(f"{program} is not installed")
                self.note(step, LEFT_OUT, 0.0)
            else:
                possible.append(step)
        began = time.monotonic()
        logs = [self.log(step) for step in possible]

        def ended(place: int, code: int) -> None:
            step = possible[place]
            log = logs[place]
            print(*log.read_text(errors="replace").splitlines()[-12:], sep="\n")
            if code == TOO_LONG:
                print(f"{step.name} was ended: its {seconds:.0f} s are over")
            if step.name == "doctor" and code in (0, 1):
                shutil.copyfile(log, self.out.with_name(f"{self.out.name}-doctor.json"))
            self.note(step, code, time.monotonic() - began)

        programs = [
            Program(words=step.command(), log=log, seconds=seconds)
            for step, log in zip(possible, logs, strict=True)
        ]
        run_beside(
            programs,
            environment=self.environment(),
            folder=ROOT,
            every=EVERY,
            meanwhile=self.pack,
            ended=ended,
        )

    def log(self, step: Step) -> Path:
        """The file of what a step prints."""
        return self.out.with_name(f"{self.out.name}-{step.name.replace(' ', '-')}.log")

    def dry_run(self, step: Step) -> None:
        """Say what a step asks of a GPU, and run it without one."""
        limit = "" if step.limit is None else f", within {step.limit:g} s of nine minutes"
        print(f"== {step.name}: on a GPU: {step.asks}{limit}")
        print(f"== {step.name}: by {shlex.join(step.words)}")
        began = time.monotonic()
        code = dry_step(step)
        self.note(step, code, time.monotonic() - began)

    def environment(self) -> dict[str, str]:
        """The package, the carried Transformer Engine, and a cache of kernels that is no result."""
        known = [str(ROOT), *([str(site_of(self.out))] if site_of(self.out).is_dir() else [])]
        path = os.pathsep.join([*known, *filter(None, [os.environ.get("PYTHONPATH")])])
        kernels = str(Path(tempfile.gettempdir(), f"{self.out.name}.triton"))
        return {"TRITON_CACHE_DIR": kernels} | dict(os.environ) | {"PYTHONPATH": path}

    def why_no_gpu(self) -> str | None:
        """Why nothing can run here, in words; None: torch sees a GPU, whose machine is written to
        NAME-machine.json.
        """
        command = [sys.executable, str(SCRIPTS / "gpu_machine.py")]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return f"torch did not say within {PATIENCE:.0f} s whether there is a GPU"
        if done.returncode:
            return ((done.stdout + done.stderr).strip().splitlines() or ["no message"])[-1]
        self.out.with_name(f"{self.out.name}-machine.json").write_text(done.stdout)
        print(done.stdout, end="", flush=True)
        return None

    def kernels(self, packed: Path) -> str:
        """Copy kernels that were compiled beforehand into Triton's cache; a line about them."""
        machine = json.loads(self.out.with_name(f"{self.out.name}-machine.json").read_text())
        cache = Path(self.environment()["TRITON_CACHE_DIR"])
        return gpu_kernels_packed.unpack(packed, cache, machine["capability"])

    def pack(self) -> None:
        """Write NAME.tgz: whole or, where that fails, as it was."""
        if self.archive is None:
            return
        self.archive.mkdir(parents=True, exist_ok=True)
        target = self.archive / f"{self.out.name}.tgz"
        beside = target.with_suffix(".part")
        try:
            with tarfile.open(beside, "w:gz") as file:
                for path in self.results():
                    name = f"runs/{path.name}" if path.parent.name == "runs" else path.name
                    file.add(
                        path,
                        name,
                        filter=lambda each: None if "/checkpoints" in each.name else each,
                    )
        # a step changed a file that was just read; the next archive has it
        except OSError as error:
            print(f"== {target} stays as it was: {error}", flush=True)
            return
        beside.replace(target)

    def results(self) -> list[Path]:
        """The files and folders that are packed."""
        paths = [*self.out.parent.glob(f"{self.out.name}*"), *ROOT.glob(f"runs/{self.out.name}-*")]
        return sorted(
            path
            for path in paths
            if path != site_of(self.out) and path.suffix not in (".tgz", ".part")
        )


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
    # a step of a real run is a process, which would end with this traceback and 1 as well
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def arguments(words: list[str]) -> Iterator[None]:
    """What a program finds in `sys.argv`."""
    before = sys.argv
    sys.argv = words
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
        "--te",
        type=Path,
        metavar="FOLDER",
        help="a Transformer Engine to install, with its install.sh",
    )
    parser.add_argument(
        "--kernels",
        type=Path,
        metavar="ARCHIVE",
        help="kernels that `pack_gpu.py --kernels` compiled",
    )
    parser.add_argument(
        "--archive", type=Path, default=os.environ.get("OUT"), help="folder of NAME.tgz"
    )
    time_limit = parser.add_mutually_exclusive_group()
    time_limit.add_argument(
        "--total", type=float, metavar="MINUTES", help="of the whole call; runs `nine` by default"
    )
    time_limit.add_argument("--minutes", type=float, help="of each part; 8 by default")
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
    for name in ("total", "minutes"):
        if (minutes := getattr(given, name)) is not None and not minutes > 0:
            parser.error(f"--{name} {minutes:g} must be positive")
    if given.total is not None and given.total * 60 <= 2 * ENDING:
        parser.error(f"--total {given.total:g} leaves nothing: a call takes {ENDING:.0f} s to end")
    if not given.parts:
        by_default = [part for part in PARTS if part not in ASKED_FOR]
        given.parts = by_default if given.total is None else ["nine"]
    given.out = (given.here / given.out).absolute()
    given.te = None if given.te is None else (given.here / given.te).absolute()
    if given.te is not None and not (given.te / "install.sh").is_file():
        parser.error(f"--te {given.te} holds no install.sh")
    given.kernels = None if given.kernels is None else (given.here / given.kernels).absolute()
    if given.kernels is not None and not given.kernels.is_file():
        parser.error(f"--kernels {given.kernels} is no file")
    if given.kernels is not None and given.dry_run:
        parser.error(
            "--kernels with --dry-run: a dry run interprets its kernels, and takes none that "
            "are compiled"
        )
    return given


def main(words: list[str] | None = None) -> int:
    began = time.monotonic()
    given = read(words)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.write_hours:
        path = given.out.with_name(f"{given.out.name}-hours.sh")
        path.write_text(hours(given.out.name))
        print(f"{path}: DATA=tokens.bin VOCABULARY=128256 bash {path}")
        return 0
    archive = None if given.archive is None else (given.here / given.archive).absolute()
    check = Check(out=given.out, archive=archive, seconds=8 * 60, te=given.te, dry=given.dry_run)
    if given.minutes is not None:
        check.seconds = 60 * given.minutes
    if given.total is not None:
        check.ends = began + 60 * given.total - ENDING
        check.seconds = float("inf")
    if given.dry_run:
        import gpu_stand_ins

        sys.path.insert(0, str(ROOT))
        gpu_stand_ins.interpret()
    else:
        # ends what was started, too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if set(given.parts) - set(WITHOUT_GPU) and (reason := check.why_no_gpu()) is not None:
            print(f"gpu_check: {reason}; nothing ran. On a CPU: --dry-run", file=sys.stderr)
            return LEFT_OUT
        if given.kernels is not None and set(given.parts) - set(WITHOUT_GPU):
            print(check.kernels(given.kernels), flush=True)
    for part in given.parts:
        check.part(part)
    print(f"gpu_check: {check.summary()}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
