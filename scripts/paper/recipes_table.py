"""The table of docs/recipes.md, from configs/ledger.yaml: python scripts/paper/recipes_table.py"""

from collections.abc import Sequence

from fp4train.lab.ledger import PublishedRecipe, ledger


def markdown(entries: Sequence[PublishedRecipe]) -> list[str]:
    """The table: the words, the source and the layers kept of each entry."""
    lines = ["| words of `fp4train` | source | layers kept |", "|---|---|---|"]
    for entry in entries:
        source = f"[{entry.title}]({entry.link}), {entry.year}"
        lines.append(f"| `{entry.settings}` | {source} | {entry.kept} |")
    return lines


if __name__ == "__main__":
    print("\n".join(markdown(ledger())))
