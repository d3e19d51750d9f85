"""Files of conversations, and what is read of them."""

import json
from pathlib import Path
from typing import Any

from fp4train.data import Chat, TokenArray
from fp4train.data.tokenizers import Bytes

END = 256


def talk(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text(
        "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines),
        encoding="utf-8",
    )
    return path


def source(path: Path, **changes: Any) -> Chat:
    return Chat(
        **{"path": str(path), "cache_dir": str(path.parent / "cache"), "val": 0.25, **changes}
    )


TALKS = [talk(f"what is {n}?", f"it is {n}" + "!" * (n % 5)) for n in range(8)]


def documents(tokens: TokenArray) -> list[tuple[str, str]]:
    """The text of each conversation, and what of it is answers; padding is left out."""
    found = []
    ids = tokens.ids.tolist()
    scored = tokens.scored
    assert scored is not None
    start = 0
    for place, token in enumerate(ids):
        if token == END:
            whole = ids[start : place + 1]
            answers = [
                i
                for i, s in zip(ids[start : place + 1], scored[start : place + 1], strict=True)
                if s
            ]
            if len(whole) > 1:
                found.append((Bytes().decode(whole), Bytes().decode(answers)))
            start = place + 1
    return found
