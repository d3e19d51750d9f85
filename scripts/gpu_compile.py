"""Compile Triton kernels for a GPU that is not there into a cache that Triton reads on another machine:

    PYTHON scripts/gpu_compile.py LAUNCHES.json CACHE --sm 90 [--check]

PYTHON and its Triton are those of the other machine: Triton's keys hash its own files, the extension module of its
Python among them. Neither torch nor a GPU is needed, but a C compiler. LAUNCHES.json is what `gpu_recorded.py` writes.
Each launch goes the way that it takes through Triton's JIT, with a stand-in for the driver, and ends where the kernel
would be loaded; the C code that launches it is compiled, too. `--check` compiles nothing and counts what CACHE has.

A cache knows its files by their whole names. `--from FOLDER` copies the cache FOLDER into CACHE first, for its place.

The last line is a JSON object: kernels, compiled, found, missing. Exit code 1: `--check` missed a kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import build
from triton.runtime.driver import driver

ROOT = Path(__file__).resolve().parents[1]


class Pointer:
    """An argument that points to memory, as Triton's JIT looks at one."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        self.dtype = f"torch.{dtype}"
        self._aligned = aligned

    def data_ptr(self) -> int:
        return 0 if self._aligned else 4


class Constants:
    """Fields of a variant; Triton's keys take its text."""

    def __init__(self, fields: dict[str, Any], text: str) -> None:
        for name, value in fields.items():
            group = Constants(value, str(value)) if isinstance(value, dict) else value
            setattr(self, name, group)
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Driver:
    """Stands in for the driver of a GPU of a compute capability."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Unloaded(ModuleType):
    """A compiled module that is for a machine with libcuda: its functions are not there."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)

    def __getattr__(self, name: str) -> None:
        return None


class Missing(Exception):
    """A kernel is not in the cache."""


def kernels_without_torch() -> None:
    """Let the modules of kernels be imported, which need Triton alone, without their package, which
    needs torch.
    """
    for name in ("fp4train", "fp4train.kernels"):
        package = ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package


def argument(described: Any) -> Any:
    """An argument of a launch from its JSON."""
    if isinstance(described, list):
        return tuple(argument(part) for part in described)
    return Pointer(**described) if isinstance(described, dict) else described


def constant(described: Any) -> Any:
    return Constants(**described) if isinstance(described, dict) else described


def compiled_kernel(launch: dict[str, Any]) -> Any:
    """What Triton compiles for a launch, or finds in its cache."""
    kernel = getattr(import_module(launch["module"]), launch["kernel"])
    arguments = [argument(described) for described in launch["arguments"]]
    constants = {name: constant(described) for name, described in launch["constants"].items()}
    options = {"num_warps": launch["warps"], "enable_fp_fusion": False}
    return kernel.run(*arguments, grid=(1,), warmup=True, **constants, **options)


class Cache:
    """What happens to the launches.

    Args:
        check: whether nothing is compiled.
    """

    def __init__(self, check: bool) -> None:
        self.check = check
        self.compiled: set[str] = set()
        self.found: set[str] = set()
        self.missing: set[str] = set()

    def listen(self, *, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self.compiled).add(metadata["hash"])

    def take(self, launch: dict[str, Any]) -> None:
        """Compile a launch's kernel and launcher, or look for them."""
        try:
            compiled = compiled_kernel(launch)
        except Missing:
            self.missing.add(json.dumps(launch, sort_keys=True))
            return
        if not self.check:
            self.launcher(compiled)

    def launcher(self, made: Any) -> None:
        """Compile what launches a kernel, where Triton has C code for each. It is kept, and cannot
        be loaded without a driver.
        """
        if not hasattr(nvidia, "make_launcher"):
            return
        nvidia.CudaLauncher(made.src, made.metadata)


def driver_utilities() -> None:
    """Compile the module through which Triton asks the driver."""
    nvidia.CudaUtils()


def empty_libcuda(folder: str) -> None:
    """A library of libcuda's name, whose functions do nothing: what is linked to it needs the
    driver's where it is loaded. Without functions the linker would leave it out.
    """
    sources = [Path(nvidia.__file__), Path(nvidia.__file__).with_name("driver.c")]
    text = "".join(source.read_text("utf-8") for source in sources if source.exists())
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
    source = Path(folder, "libcuda.c")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
    library = str(Path(folder, "libcuda.so.1"))
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o", library]
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("launches", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--sm", type=int, required=True, help="compute capability times ten")
    parser.add_argument("--check", action="store_true", help="compile nothing")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FOLDER", help="a cache that is copied to CACHE"
    )
    options = parser.parse_args()
    if options.source is not None:
        copy(options.source, options.cache)
    kernels_without_torch()
    cache = Cache(options.check)
    triton.knobs.cache.dir = str(options.cache)
    triton.knobs.compilation.store_binary_only = True
    triton.knobs.compilation.listener = cache.listen
    driver.set_active(Driver(options.sm))
    if options.check:
        ASTSource.make_ir = not_compiled
    launches = json.loads(options.launches.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        if not options.check:
            empty_libcuda(folder)
            triton.knobs.nvidia.libcuda_path = folder
            build._load_module_from_path = Unloaded
            driver_utilities()
        for launch in launches:
            cache.take(launch)
    counts = {
        "compiled": len(cache.compiled),
        "found": len(cache.found),
        "missing": len(cache.missing),
    }
    print(json.dumps({"kernels": sum(counts.values()), **counts}))
    return int(bool(cache.missing))


def copy(source: Path, cache: Path) -> None:
    """Copy a cache, whose groups then name the files that are there, where they are now."""
    shutil.copytree(source, cache, dirs_exist_ok=True)
    for group in cache.glob("*/__grp__*"):
        described = json.loads(group.read_text("utf-8"))
        paths = {name: group.parent.absolute() / name for name in described["child_paths"]}
        described["child_paths"] = {
            name: str(path) for name, path in paths.items() if path.exists()
        }
        group.write_text(json.dumps(described), "utf-8")


def not_compiled(*_: Any, **__: Any) -> None:
    raise Missing


if __name__ == "__main__":
    sys.exit(main())
