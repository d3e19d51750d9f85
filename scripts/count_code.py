"""Code lines per folder: lines of Python without blanks, comments and docstrings.

    python scripts/count_code.py [FOLDER …]

Counts `fp4train/` where no folder is named, and shows its bound, which a test of the house holds: that of what the
package could do at first, and by how much each later capability raised it.
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
from textwrap import dedent
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "fp4train"

FIRST = (23_297, 235)
"""The most code lines and files for what the package could do on November 22, 2026."""


class Capability(NamedTuple):
    """A capability that came later.

    Args:
        lines, files: by which it raised the bound of the package.
        own: patterns of the files that are its own.
        parts: what it added to files of others as whole definitions, "file.py:name" or "file.py:Class.method". The rest
            of its lines are single ones in definitions of others.
    """

    lines: int
    files: int
    own: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


LATER = {
    "models in and out of folders of other software, their text, their evaluation": Capability(
        2_919,
        28,
        (
            *("exchange/*", "models/hf.py", "models/llama/hf.py", "models/common/hf.py", "checkpoint/model_folder.py"),
            *("config/from_folder.py", "cli/export.py", "cli/verify.py", "cli/sample.py", "cli/eval.py"),
            *("cli/trained.py", "run/initial.py", "models/common/cache.py"),
        ),
    ),
    "mixtures of experts, and layers of experts": Capability(
        1_592,
        14,
        (
            *("models/moe/*", "models/common/experts.py", "run/experts.py", "nn/experts.py", "nn/executors/groups.py"),
            *("nn/planned.py", "parallel/received.py"),
            *("nn/transformers_experts.py", "backends/grouped.py", "backends/te/experts.py"),
        ),
    ),
    "StripedHyena 2": Capability(636, 6, ("models/hyena/*", "models/common/convolution.py")),
    "hybrids of attention and scans": Capability(644, 7, ("models/hybrid/*", "models/common/scan*.py")),
    "conversations, and attention within documents": Capability(410, 2, ("data/chat.py", "data/template.py")),
    "other people's loops": Capability(383, 5, ("integrations/*",)),
    "CUDA graphs per block": Capability(526, 4, ("run/graphs.py", "run/block_*.py", "lab/costs/block_graphs.py")),
    "tensor parallelism by segments, stages of unequal size": Capability(
        338,
        1,
        parts=(
            *("shards.py:RowOrder", "shards.py:row_orders", "shards.py:order_of", "run/restored.py:state_orders"),
            *("parallel/tensor.py:_check_rows", "parallel/tensor.py:_sliced", "quantize/sharded.py:quantised_in_runs"),
            *("nn/executors/cut.py:LayerShard.runs_of", "lab/costs/cluster.py:ClusterCost._slowest_stage"),
            *("models/common/cut.py:share_blocks", "models/common/cut.py:multiplications"),
            "models/common/cut.py:multiplied",
        ),
    ),
    "moments in BF16, and AdamW's kernels": Capability(290, 2, ("optim/rounded.py", "kernels/triton/adamw.py")),
    "norms, gates and rotations in C kernels": Capability(
        220,
        2,
        ("models/common/on_cpu.py", "models/common/operators.py"),
        ("kernels/cpu/__init__.py:fused",),
    ),
    "products and codes in fewer passes": Capability(
        460,
        2,
        ("kernels/triton/both.py", "quantize/triton_variant.py"),
        (
            *("quantize/triton_launch.py:BothPlan", "quantize/triton_launch.py:plan_both"),
            *("quantize/triton_launch.py:plan_turned", "quantize/triton.py:TritonQuantizer._with_transpose"),
            *("quantize/triton.py:has_pair_kernel", "quantize/triton.py:TritonQuantizer._both_amaxes"),
            *("quantize/random.py:words_of_both", "nn/weights.py:WeightForm.pair_with", "quantize/quantized.py:turned"),
        ),
    ),
    "DNA": Capability(220, 1, ("data/dna.py",)),
    "distillation": Capability(193, 2, ("models/common/distillation.py", "run/teacher.py")),
    "checks: called layers, deterministic GPUs, every recipe at once, the parts of a step": Capability(
        263,
        4,
        ("nn/called.py", "run/determinism.py", "lab/costs/host.py", "lab/costs/casts.py"),
        ("lab/doctor/recipes.py:check_all", "lab/doctor/recipes.py:_outcome", "lab/costs/cluster.py:ClusterCost._host"),
    ),
    "Liger's kernels, those that a plan names": Capability(
        197,
        2,
        ("models/common/liger.py", "run/fuse.py"),
        ("models/common/layers.py:RMSNorm._unfused", "models/common/layers.py:RMSNorm._weight"),
    ),
    "the cost of kernels between products, norms and gates that quantise among them, and which do": Capability(
        295,
        2,
        ("lab/costs/elementwise.py", "run/produced.py"),
        (
            *("lab/costs/estimate.py:shares_x", "lab/costs/estimate.py:_made", "lab/costs/roofline.py:own_bytes"),
            "lab/costs/search.py:MeshPlan.produced",
        ),
    ),
    "one scale for fused weights": Capability(
        160,
        1,
        own=("nn/fused_weights.py",),
        parts=(
            *("nn/weights.py:PreparedWeights._group_amax", "precision/layers.py:_fused"),
            *("parallel/gather.py:WeightGather.join_fused", "parallel/gather.py:WeightGather.fused_amax"),
            *("precision/layer_plan.py:fused_note", "precision/layer_plan.py:check_fused"),
            "precision/recipe.py:Recipe._check_fused",
        ),
    ),
    "Transformer Engine over microbatches, shards and layers with one input": Capability(
        152,
        0,
        parts=(
            *("backends/te/executor.py:_Built.codes_of", "backends/te/executor.py:te_autocast"),
            *("backends/te/translate.py:shares_codes", "backends/te/translate.py:_check_sums"),
            "backends/te/__init__.py:TransformerEngine.sums_fast",
            "backends/te/__init__.py:TransformerEngine.shares_input",
        ),
    ),
    "one product of layers that read one x": Capability(
        350,
        3,
        ("precision/joint.py", "nn/executors/joint.py", "lab/costs/joint.py"),
        (
            *("nn/weights.py:JointWeights", "nn/weights.py:is_of", "nn/weights.py:stack"),
            "quantize/sharded.py:stacked",
        ),
    ),
    "norms and gates that are quantised where they are made": Capability(
        855,
        6,
        (
            *("nn/produced.py", "quantize/produced.py", "quantize/launch.py", "models/common/stream.py"),
            *("kernels/triton/sources.py", "kernels/triton/norm.py"),
        ),
    ),
    "norms, gates and joint products on Transformer Engine": Capability(
        408,
        3,
        ("backends/te/given.py", "nn/backend_sources.py", "nn/executors/stacked.py"),
        ("nn/executors/whole_layer.py:BackendLayer._given",),
    ),
    "weights that Transformer Engine takes as codes from shards": Capability(
        115,
        1,
        ("backends/te/weights.py",),
        (
            *("backends/te/translate.py:why_values", "backends/te/executor.py:_Built.with_codes"),
            *("backends/te/quantizers.py:element_dtype", "quantize/quantized.py:Quantized.contiguous"),
            *("nn/executors/whole_layer.py:BackendLayer._codes", "nn/executors/whole_layer.py:BackendLayer.w"),
        ),
    ),
    "gradients added in products of recomputed blocks, shards and experts, or by autograd": Capability(
        59,
        0,
        parts=("nn/executors/gemms.py:adds", "nn/executors/gemms.py:accumulates", "nn/executors/gemms.py:sum_so_far"),
    ),
}
"""A new capability has an entry of its own; its lines are what it needs. An entry names its files or its parts."""

BOUND = tuple(map(sum, zip(FIRST, *(each[:2] for each in LATER.values()), strict=True)))
"""The most code lines and files of the package."""

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


def own_counts(found: Mapping[str, int], capability: Capability) -> list[int]:
    """Code lines of the files that are the capability's own, of those that `counts` found."""
    return [lines for path, lines in found.items() if any(fnmatchcase(path, each) for each in capability.own)]


def part_lines(part: str) -> int:
    """Code lines of a definition, "file.py:Class.method".

    Raises:
        StopIteration: the file has no such definition.
    """
    path, names = part.split(":")
    source = (PACKAGE / path).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for name in names.split("."):
        node = next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == name)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return code_lines(dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno])))


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
            print(f"{BOUND[0]:7,}  at most, in {BOUND[1]} files: lines and files allowed, those of own files and parts")
            rest, files = sum(found.values()), len(found)
            for name, each in LATER.items():
                own = own_counts(found, each)
                lines_of = sum(own) + sum(map(part_lines, each.parts))
                rest, files = rest - lines_of, files - len(own)
                print(f"{each.lines:7,} {each.files:4} {lines_of:7,} {len(own):4}  {name}")
            print(
                f"{FIRST[0]:7,} {FIRST[1]:4} {rest:7,} {files:4}  all before, whose files hold lines of the later, too"
            )


if __name__ == "__main__":
    main()
