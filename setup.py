"""What pyproject.toml cannot say: the folders that become packages, and the C extension of the CPU
kernels.

`configs/` and `recipes/` stand beside the package in the tree and inside it when installed. Neither
is a Python package; they are listed as ones so that setuptools puts their YAML files there
(package-data in pyproject.toml).

optional=True: where there is no compiler, or it fails, the package installs without the extension
and the torch reference is used. No torch headers: the kernels take pointers, so one build serves
every torch version.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("fp4train/kernels/cpu/csrc")


class BuildSideBySide(build_ext):
    """Compile the files of an extension at the same time: those of an instruction set take a minute
    each.
    """

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_each(sources, *args, **kwargs):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [
                    o
                    for found in pool.map(lambda s: compile_all([s], *args, **kwargs), sources)
                    for o in found
                ]

        self.compiler.compile = compile_each
        super().build_extensions()


def package_page():
    """The README as the page of the package: links to files beside it lead nowhere there, so their
    text alone stays.
    """
    text = Path("README.md").read_text(encoding="utf-8")
    without_pictures = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", without_pictures)


setup(
    long_description=package_page(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["fp4train*"]), "fp4train.configs", "fp4train.recipes"],
    package_dir={"fp4train.configs": "configs", "fp4train.recipes": "recipes"},
    cmdclass={"build_ext": BuildSideBySide},
    ext_modules=[
        Extension(
            "fp4train.kernels.cpu._cpu",
            sources=sorted(str(path) for path in CSRC.glob("*.c")),
            depends=sorted(str(path) for path in CSRC.glob("*.h")),
            # Bit-exactness: no contraction into fused multiply-adds, and nothing of -ffast-math.
            extra_compile_args=[
                "-std=gnu11",
                "-O3",
                "-ffp-contract=off",
                # nobody reads errno, and a loop with a square root is vectorised
                "-fno-math-errno",
                # Python's own flag: with it GCC 12 leaves E2M1 to nearest 8 to 30 % slower
                "-fno-wrapv",
                "-fvisibility=hidden",
                "-g0",
                "-Wno-maybe-uninitialized",
            ],
            libraries=[] if os.name == "nt" else ["m"],
            optional=True,
        )
    ],
)
