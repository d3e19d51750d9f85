"""Code lines per folder: lines of Python without blanks, comments and docstrings.

    python scripts/count_code.py [FOLDER …]

Counts `fp4train/` where no folder is named.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

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


def main() -> None:
    for folder in [Path(name) for name in sys.argv[1:]] or [Path(__file__).parents[1] / "fp4train"]:
        found = counts(folder)
        lines: Counter[str] = Counter()
        for path, count in found.items():
            lines[path.partition("/")[0] if "/" in path else "."] += count
        for name, count in lines.most_common():
            print(f"{count:7,}  {name}")
        print(f"{sum(found.values()):7,}  code lines in {len(found)} files of {folder.name}/")


if __name__ == "__main__":
    main()
