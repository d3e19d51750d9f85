"""What only a GPU machine can tell:

    bash scripts/gpu_check.sh benchmarks/NAME --total 9 [PART…]     within nine minutes, however many parts
    bash scripts/gpu_check.sh benchmarks/NAME PART…                 in as much time as they take
    bash scripts/gpu_check.sh [benchmarks/NAME] [PART…] --dry-run   on a CPU

`PARTS` lists the parts; without one `nine` runs, whose order is that of what is worth most. `--total MINUTES` bounds
the whole call, its last archive included. Each step of `nine` has a limit, too, which `--total` stretches or shortens;
what a step leaves of its time, the next one may take.

Results are files NAME-*.json and .md, written as they are found; what is done is noted in NAME.done and not done again,
so that a call that was cut off goes on when it is repeated. After each step, also one that failed, and every ten
seconds of one, all results are packed into NAME.tgz in `--archive` (by default the folder that the environment calls
OUT): where only that folder comes back from a machine, nothing is lost. Unpacked beside NAME.done it lets another
machine go on.

A step whose time is up is ended with all its processes. What cannot run on a machine is left out with its reason. The
last line names what failed, what cannot run here, and what was left for want of time. Exit code 0: nothing failed,
though steps may be left; 1: something did; 2: wrong arguments; 3: torch sees no GPU, and nothing ran.

`--kernels ARCHIVE` unpacks kernels that `pack_gpu.py` compiled beforehand, and says in one line how many of those that
are launched are found.

`--te FOLDER` installs a carried Transformer Engine first, which needs no compiler: FOLDER/install.sh is called with the
folder to install into, and FOLDER/probe.py must end well. `te --te FOLDER --total 3.5` is meant for 210 seconds.

`--dry-run` runs all of it on a CPU, at tiny sizes and in one process, with stand-ins for what needs a GPU, which
`gpu_stand_ins.py` names. It says for each step what a GPU would be asked, by which command and for how long; its
figures mean nothing, and no time is bounded. What has no stand-in is only named: the installation of Transformer
Engine. Without benchmarks/NAME its results go to a new temporary folder, which its first line names.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import gpu_packed

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
PARTS = {
    "nine": "what no GPU has confirmed: one kernel, or stop; layers in blocks; bits and bandwidth of "
    "kernels; steps; pieces of research; sums",
    "kernels": "the Triton kernels: their bits against the reference, their bandwidth beside that of a copy",
    "native": "`fp4train doctor`; tensor cores' sums; layers and experts on torch's scaled products "
    "against the emulation",
    "te": "layers and experts on Transformer Engine against the emulation; its reference; given weights",
    "training": "short runs in each recipe; compiled, recorded, recomputed, resumed, in liger's kernels; "
    "the time of a checkpoint",
    "profile": "where a step of llama_1b goes: kernels, host beside GPU, memory, attention; eager, "
    "compiled, recorded",
}
NINE = 540.0
MEANT = {"nine": NINE, "te": 210.0}
"""Seconds for which the limits of the steps of a part are meant; with others they are stretched or
shortened.
"""
LEFT_OUT = 3
"""Exit code of a step that cannot run on this machine, whose last line says why, and of a call that
sees no GPU.
"""
TOO_LONG = 124
"""Exit code of a program that was ended since its time was up."""
EVERY = 10.0
"""Seconds between two archives during a step."""
ENDING = 10.0
"""Seconds before the end of a call when its last step is ended: processes end, and results are
packed.
"""
GRACE = 3.0
"""Seconds that a program has to end by itself after it was told to."""
PATIENCE = 60.0
"""Seconds in which torch must have said whether it sees a GPU."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program.

    Args:
        name: its name in NAME.done.
        asks: the figures or equalities that it looks for on a GPU.
        words: the command, which begins with a script of this folder, "fp4train", or "bash".
        dry: more words in a dry run; None: nothing stands in for what it needs, and it is only
            named there.
        limit: seconds that it may take, where its part has those of `MEANT`; None: as long as its
            part.
        gate: whether its part goes on only if this step ended well.
        beside: steps that run while this one does.
    """

    name: str
    asks: str
    words: tuple[str, ...]
    dry: tuple[str, ...] | None = ("--dry-run",)
    limit: float | None = None
    gate: bool = False
    beside: tuple[Step, ...] = ()

    def command(self) -> list[str]:
        program, *words = self.words
        if program == "fp4train":
            return [sys.executable, "-u", "-m", "fp4train", *words]
        if program.endswith(".py"):
            return [sys.executable, "-u", str(SCRIPTS / program), *words]
        return list(self.words)


def steps_of(part: str, out: Path, te: Path | None) -> Iterator[Step]:
    """What a part runs, in order."""

    def results(ending: str) -> tuple[str, str]:
        return "--out", f"{out}-{ending}.json"

    def program(name: str, script: str, asks: str, *words: str) -> Step:
        return Step(name=name, asks=asks, words=(script, *words, *results(name)))

    if part == "nine":
        yield from nine_steps(out)
    elif part == "kernels":
        asks = "all cases and one of more than 2^31 elements to the bit"
        yield program("kernels", "gpu_kernels.py", asks, "all")
        asks = "what recipes of research add to the bit"
        yield program("pieces", "gpu_kernels.py", asks, "pieces")
        asks = "GB/s of each kernel beside a copy's; TFLOP/s of products"
        yield program("bandwidth", "gpu_bandwidth.py", asks)
    elif part == "native":
        asks = "what each recipe runs on here, and its codes and products beside the reference's"
        yield Step(name="doctor", asks=asks, words=("fp4train", "doctor", "--json"), dry=())
        asks = "BF16 products of codes equal, in every bit, to what is known of this GPU's sums"
        yield program("sums", "gpu_sums.py", asks)
        asks = (
            "y, dx and dw of each recipe through torch's scaled products, of a layer and of experts"
        )
        yield program("native", "gpu_layers.py", asks, "native")
    elif part == "te":
        if te is not None:
            asks = "that the carried Transformer Engine is one for this machine's PyTorch"
            words = ("bash", str(te / "install.sh"), str(site_of(out)))
            yield Step(name="te install", asks=asks, words=words, dry=None, limit=40, gate=True)
            asks = "that its kernels load and multiply"
            probe = (str(te / "probe.py"),)
            yield Step(name="te probe", asks=asks, words=probe, dry=None, limit=30, gate=True)
        asks = "y, dx and dw of each recipe on Transformer Engine, of a layer and of experts"
        yield replace(program("te", "gpu_layers.py", asks, "te"), limit=130)
    elif part == "training":
        asks = "losses of short runs, equal in every bit where they must be"
        yield program("training", "gpu_training.py", asks)
        asks = "how long a checkpoint of llama_1b holds the loop up, and how long it is written"
        cost = ("benchmark.py", "checkpoint", "--processes", "1", "--out", f"{out}-checkpoint")
        dry = ("--quick", "--device", "cpu")
        yield Step(name="checkpoint", asks=asks, words=cost, dry=dry)
    else:
        yield program("profile", "gpu_profile.py", PARTS["profile"])


def nine_steps(out: Path) -> Iterator[Step]:
    """What nine minutes on a GPU are for: what no GPU has confirmed, and nothing that one has, which
    other parts repeat. The limits leave time for a look at the machine and for packing.

    First a compiled kernel that is equal, without which nothing else counts; bits of kernels before
    their speed; steps before long lists of cases.
    """

    def step(name: str, limit: float, asks: str, *words: str, gate: bool = False) -> Step:
        words = (*words, "--out", f"{out}-{name}.json")
        return Step(name=f"nine {name}", asks=asks, words=words, limit=limit, gate=gate)

    asks = "that a Triton kernel compiles, and that its codes are the reference's in every bit"
    yield step("kernel", 25, asks, "gpu_kernels.py", "first", gate=True)
    asks = "y, dx and dw of layers in blocks"
    yield step("blocks", 30, asks, "gpu_layers.py", "native", "--no-timing", "--only", "block")
    asks = (
        "codes, scales, amaxes and values to the bit, of the kernels that a training run launches"
    )
    yield step("exact", 35, asks, "gpu_kernels.py", "launched", "--processes", "8")
    asks = "GB/s of copies and of the kernels of a training step; TFLOP/s of products"
    yield step("bandwidth", 35, asks, "gpu_bandwidth.py")
    asks = (
        "ten queued steps of llama_1b, kernels and clocks: BF16 first and last, FP8, NVFP4, MXFP8"
    )
    yield step("profile", 215, asks, "gpu_profile.py", "--nine")
    asks = "what recipes of research add to the bit: few random bits, HiF4, IF4"
    yield step("pieces", 90, asks, "gpu_kernels.py", "pieces", "--processes", "8")
    asks = "products of codes equal to what is known of this GPU's sums"
    yield step("sums", 80, asks, "gpu_sums.py")


def site_of(out: Path) -> Path:
    """Where a carried Transformer Engine is installed."""
    return out.with_name(f"{out.name}.site")


@dataclass(kw_only=True)
class Check:
    """The state of one call.

    Args:
        out: results begin with this path.
        archive: the folder that keeps what is packed; None: nothing is packed.
        ends: when the last step of the call is ended, of `time.monotonic`.
        te: the folder of a carried Transformer Engine.
        dry: whether it is a dry run.
    """

    out: Path
    archive: Path | None
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
        self.take(steps_of(name, self.out, self.te), MEANT.get(name, NINE))

    def take(self, steps: Iterable[Step], meant: float = NINE) -> None:
        """Run steps that are not done yet, until a gate among them is not passed; their limits are
        meant for so many seconds.
        """
        stretch = (self.ends - time.monotonic()) / meant
        spare = 0.0
        for step in steps:
            limit = float("inf")
            if step.limit is not None:
                limit = step.limit * stretch + spare
            began = time.monotonic()
            passed = self.together(step, limit)
            spare = max(0.0, limit - (time.monotonic() - began))
            self.pack()
            named = self.dry and step.dry is None
            if step.gate and not passed and not named:
                print(f"== the part stops here: without {step.name} the other steps tell nothing")
                return

    def together(self, step: Step, limit: float) -> bool:
        """Run a step and those beside it that are not done yet, each for at most `limit` seconds;
        whether the step itself is done.
        """
        seconds = min(limit, self.ends - time.monotonic())
        pending = []
        for program in (step, *step.beside):
            if program.name in self.done_before():
                print(f"== {program.name}: done before")
            elif self.dry:
                self.dry_run(program)
            elif seconds <= 0:
                print(f"== {program.name}: no time left; call it again")
                self.late.append(program.name)
            else:
                pending.append(program)
        if pending:
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
        elif code == LEFT_OUT and (self.dry or not step.gate):
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
        lines = [f"{what}: {', '.join(steps)}" for what, steps in told.items() if steps]
        return "; ".join(lines) or "all steps ended well"

    def run(self, steps: list[Step], seconds: float) -> None:
        """Run steps beside each other, each in a process group that is ended as a whole when the
        seconds are over, or with this call.
        """
        began = time.monotonic()
        packed = began
        with ExitStack() as stack:
            running: dict[str, tuple[Step, subprocess.Popen[bytes]]] = {}
            for step in steps:
                print(f"== {step.name}: {shlex.join(step.words)}", flush=True)
                process = self.start(step)
                running[step.name] = (step, process)
                stack.callback(end_group, process)
            while running:
                for step, process in list(running.values()):
                    code = process.poll()
                    if code is None and time.monotonic() - began >= seconds:
                        print(f"{step.name} was ended: its {seconds:.0f} s are over")
                        code = TOO_LONG
                    if code is not None:
                        end_group(process)
                        del running[step.name]
                        lines = self.log(step).read_text(errors="replace").splitlines()
                        print(*lines[-12:], sep="\n")
                        self.note(step, code, time.monotonic() - began)
                if time.monotonic() - packed >= EVERY:
                    packed = time.monotonic()
                    self.pack()
                time.sleep(0.05)

    def start(self, step: Step) -> subprocess.Popen[bytes]:
        with self.log(step).open("wb") as log:
            return subprocess.Popen(
                step.command(),
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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
        self.note(step, dry_step(step), time.monotonic() - began)

    def environment(self) -> dict[str, str]:
        """The package, the carried Transformer Engine, and a cache of kernels that is no result."""
        site = site_of(self.out)
        places = [str(ROOT), *[str(site)] * site.is_dir()]
        path = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        kernels = str(Path(tempfile.gettempdir(), f"{self.out.name}.triton"))
        return {"TRITON_CACHE_DIR": kernels} | dict(os.environ) | {"PYTHONPATH": path}

    def why_no_gpu(self) -> str | None:
        """Why nothing can run here, in words; None: torch sees a GPU, whose machine is written to
        NAME-machine.json.
        """
        command = [sys.executable, str(SCRIPTS / "gpu_results.py")]
        options = {"cwd": ROOT, "env": self.environment(), "text": True, "timeout": PATIENCE}
        try:
            answer = subprocess.run(command, capture_output=True, **options)  # type: ignore[call-overload]
        except subprocess.TimeoutExpired:
            return f"torch did not say within {PATIENCE:.0f} s whether there is a GPU"
        if answer.returncode:
            return str(((answer.stdout + answer.stderr).strip().splitlines() or ["no message"])[-1])
        self.machine.write_text(answer.stdout)
        print(answer.stdout, end="", flush=True)
        return None

    @property
    def machine(self) -> Path:
        return self.out.with_name(f"{self.out.name}-machine.json")

    def kernels(self, packed: Path) -> str:
        """Copy kernels that were compiled beforehand into Triton's cache; a line about them."""
        capability = json.loads(self.machine.read_text())["capability"]
        return gpu_packed.unpack(packed, Path(self.environment()["TRITON_CACHE_DIR"]), capability)

    def pack(self) -> None:
        """Write NAME.tgz: whole or, where that fails, as it was."""
        if self.archive is None:
            return
        self.archive.mkdir(parents=True, exist_ok=True)
        target = self.archive / f"{self.out.name}.tgz"
        beside = target.with_suffix(".part")
        try:
            with tarfile.open(beside, "w:gz") as file:
                for path in self.out.parent.glob(f"{self.out.name}*"):
                    if path != site_of(self.out) and path.suffix not in (".tgz", ".part"):
                        file.add(path, path.name, filter=without_checkpoints)
        # a step changed a file that was just read; the next archive has it
        except OSError as error:
            print(f"== {target} stays as it was: {error}", flush=True)
            return
        beside.replace(target)


def without_checkpoints(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "/checkpoints" in member.name else member


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started; what has ended stays as it is."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def dry_step(step: Step) -> int:
    """The same in this process, with what stands in for a GPU; returns the exit code."""
    if step.dry is None:
        print(f"== {step.name}: only named in a dry run: {shlex.join(step.words)}")
        return LEFT_OUT
    program, *words = step.words
    try:
        if program == "fp4train":
            import gpu_stand_ins

            gpu_stand_ins.fp4train([*words, *step.dry])
            return 0
        with patch.object(sys, "argv", [program, *words, *step.dry]):
            runpy.run_path(str(SCRIPTS / program), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    # a step of a real run is a process, which would end with this traceback and 1 as well
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def read(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="benchmarks/NAME; a dry run needs none")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--te", type=Path, metavar="FOLDER", help="with install.sh and probe.py")
    parser.add_argument("--kernels", type=Path, metavar="ARCHIVE", help="of pack_gpu.py --kernels")
    parser.add_argument("--archive", type=Path, default=os.environ.get("OUT"), help="a folder")
    parser.add_argument("--total", type=float, metavar="MINUTES", help="of the whole call")
    parser.add_argument("--dry-run", action="store_true", help="all of it on a CPU, with stand-ins")
    options = parser.parse_intermixed_args(words)
    if options.out is not None and str(options.out) in PARTS:
        options.out, options.parts = None, [str(options.out), *options.parts]
    if options.out is None:
        if not options.dry_run:
            parser.error("the following argument is required: out, before the parts")
        options.out = Path(tempfile.mkdtemp(prefix="gpu_check_"), "dry")
        print(f"results: {options.out}-*")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}: it is one of {', '.join(PARTS)}")
    if options.total is not None and not options.total * 60 > 2 * ENDING:
        parser.error(
            f"--total {options.total:g} leaves nothing: a call takes {ENDING:.0f} s to end"
        )
    for name in ("install.sh", "probe.py"):
        if options.te is not None and not (options.te / name).is_file():
            parser.error(f"--te {options.te} holds no {name}")
    if options.kernels is not None and not options.kernels.is_file():
        parser.error(f"--kernels {options.kernels} is no file")
    for name in ("out", "te", "archive"):
        if (path := getattr(options, name)) is not None:
            setattr(options, name, path.absolute())
    options.parts = options.parts or ["nine"]
    return options


def main(words: list[str] | None = None) -> int:
    began = time.monotonic()
    options = read(words)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    check = Check(out=options.out, archive=options.archive, te=options.te, dry=options.dry_run)
    if options.total is not None:
        check.ends = began + 60 * options.total - ENDING
    if options.dry_run:
        import gpu_stand_ins

        sys.path.insert(0, str(ROOT))
        gpu_stand_ins.interpret()
    else:
        # ends what was started, too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        if (reason := check.why_no_gpu()) is not None:
            print(f"gpu_check: {reason}; nothing ran. On a CPU: --dry-run", file=sys.stderr)
            return LEFT_OUT
        if options.kernels is not None:
            print(check.kernels(options.kernels), flush=True)
    for part in options.parts:
        check.part(part)
    print(f"gpu_check: {check.summary()}")
    return int(bool(check.failed))


if __name__ == "__main__":
    sys.exit(main())
