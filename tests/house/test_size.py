"""Code is a cost: the package stays within a budget of lines and files."""

from pathlib import Path

from count_code import code_lines, counts

import fp4train

BUDGET = {
    "one scale for fused weights": (160, 1),
    "CUDA graphs per block": (362, 2),
    "kernels that a plan names": (22, 1),
    "decoding factors from kernels": (3, 0),
    "Transformer Engine over microbatches and shards": (80, 0),
    "one quantised input for layers on Transformer Engine": (72, 0),
    "Liger's kernels": (140, 1),
    "gradients added in torch's products": (17, 0),
    "FP8 with one scale per tensor, quantised once": (35, 0),
    "accumulators of FP8": (62, 0),
    "CPU kernels for every recipe": (19, 0),
    "float32 products by oneDNN": (7, 0),
    "codes of both forms by one kernel": (144, 1),
    "deterministic runs that GPUs do not refuse": (19, 0),
    "recipes tried at once by doctor": (20, 0),
    "where a step on one GPU goes": (75, 1),
    "training": (23_252, 232),
    "Hugging Face families": (312, 2),
    "start from Hugging Face folders": (304, 3),
    "text from a model": (424, 5),
    "export to folders of Hugging Face": (560, 7),
    "evaluation": (410, 4),
    "packed codes, and their verification": (839, 7),
    "packed codes of experts": (52, 0),
    "attention within documents": (35, 0),
    "conversations": (375, 2),
    "distillation": (193, 2),
    "guard of the first step": (76, 1),
    "other people's loops": (383, 5),
    "stages of unequal size": (45, 0),
    "DNA": (212, 1),
    "hybrid models": (443, 5),
    "scans by kernels of other software": (119, 1),
    "mixtures of experts": (574, 6),
    "experts": (517, 4),
    "all experts in one product": (125, 1),
    "experts on Transformer Engine": (102, 1),
    "tensor parallelism by segments": (290, 1),
    "Mamba-2 of Hugging Face": (82, 1),
    "families of plugins, read from folders": (13, 0),
    "StripedHyena 2": (638, 6),
    "moments in BF16": (282, 2),
    "AdamW on shards": (8, 0),
    "experts of transformers": (92, 1),
    "outlier channels of experts": (20, 0),
    "experts over tensor-parallel ranks": (104, 1),
    "calls of experts, and the memory that a mesh lacks": (50, 0),
}
"""Code lines and files of the package by capability: each has an entry of its own."""


def test_the_package_keeps_its_budget_of_code() -> None:
    found = counts(Path(fp4train.__file__).parent)
    lines, files = (sum(column) for column in zip(*BUDGET.values(), strict=True))
    assert sum(found.values()) <= lines
    assert len(found) <= files


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    source = '''"""A module."""

# why
X = (
    1,
)
"""Of X."""


def f():
    """Gives one."""
    return """
    text"""  # twice
'''
    assert code_lines(source) == 3 + 1 + 2
