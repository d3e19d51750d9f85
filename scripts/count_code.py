"""Code lines per folder: lines of Python without blanks, comments and docstrings.

    python scripts/count_code.py [FOLDER …]

Counts `fp4train/` where no folder is named, and then by capability, too: each has the files that it names, and training
all others. The package keeps one bound, `BOUND`, which a test of the house holds.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fp4train"

BOUND = (32_168, 308)
"""The most code lines and files of the package. A capability that is new raises it by what it needs."""

TRAINING = "training: recipes, kernels, layers, runs, the command line"
CAPABILITIES = {
    "the laboratory: costs, studies, figures, reports, doctor": ("lab/*", "measure/*"),
    "models in and out of Hugging Face's and packed folders": (
        *("exchange/*", "models/hf.py", "models/*/hf.py", "models/common/hf.py"),
        *("checkpoint/model_folder.py", "config/from_folder.py", "cli/export.py", "cli/verify.py"),
    ),
    "text from a trained model, and its evaluation": ("cli/sample.py", "cli/eval.py", "cli/trained.py"),
    "other people's loops": ("integrations/*",),
    "mixtures of experts, and layers of experts": (
        *("models/moe/*", "models/common/experts.py", "run/experts.py", "nn/experts.py", "nn/executors/groups.py"),
        *("nn/transformers_experts.py", "backends/grouped.py", "backends/te/experts.py"),
    ),
    "hybrids of attention and scans": ("models/hybrid/*", "models/common/scan*.py"),
    "StripedHyena 2": ("models/hyena/*", "models/common/convolution.py"),
    "DNA": ("data/dna.py",),
    "conversations": ("data/chat.py", "data/template.py"),
    "distillation": ("models/common/distillation.py", "run/teacher.py"),
    "moments in BF16, and kernels of AdamW": ("optim/rounded.py", "kernels/triton/adamw.py"),
    "weights that oscillate": ("optim/oscillation.py",),
    "CUDA graphs": ("run/graphs.py", "run/step_graph.py", "run/block_graph.py"),
    "Liger's kernels": ("models/common/liger.py", "run/fuse.py"),
}
"""Capability → its files in fp4train/; a file counts for the first that names it. Their lines in other files count as
training's."""

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code; a string that stands alone (a docstring) holds none."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - texts)


def counts(folder: Path) -> dict[str, int]:
    """Code lines of each Python file below `folder`, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): code_lines(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.py"))
    }


def capability(path: str) -> str:
    """The capability that a file of the package counts for."""
    return next((name for name, own in CAPABILITIES.items() if any(fnmatchcase(path, each) for each in own)), TRAINING)


def by_capability(found: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Capability → (code lines, files), the most lines first."""
    groups: dict[str, list[int]] = {}
    for path, lines in found.items():
        groups.setdefault(capability(path), []).append(lines)
    return {name: (sum(each), len(each)) for name, each in sorted(groups.items(), key=lambda item: -sum(item[1]))}


def main() -> None:
    for folder in [Path(name) for name in sys.argv[1:]] or [PACKAGE]:
        found = counts(folder)
        lines: Counter[str] = Counter()
        for path, count in found.items():
            lines[path.partition("/")[0] if "/" in path else "."] += count
        for name, count in lines.most_common():
            print(f"{count:7,}  {name}")
        print(f"{sum(found.values()):7,}  code lines in {len(found)} files of {folder.name}/")
        if folder == PACKAGE:
            print(f"{BOUND[0]:7,}  at most, in {BOUND[1]} files; lines and files by capability:")
            for name, (count, files) in by_capability(found).items():
                print(f"{count:7,} {files:4}  {name}")


if __name__ == "__main__":
    main()
