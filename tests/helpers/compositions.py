"""What Hydra composed of the package's own files, the texts that it loaded, and the words that it
parsed, remembered: they take as long as the steps of a tiny run.
"""

import pickle
from collections.abc import Callable
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

from fp4train.config.folders import registered_files


def remembering(compose: Callable[..., Any]) -> Callable[..., Any]:
    """Hydra's `compose`, which composes the same words once; with other folders in its search path,
    or files that are options, each time.
    """
    kept: dict[tuple[str, ...], bytes] = {}

    def remembered(name: str, overrides: list[str], **options: Any) -> Any:
        searches = any(word.startswith("hydra.searchpath") for word in overrides)
        if searches or any(registered_files().values()):
            return compose(name, overrides=overrides, **options)
        words = (name, *overrides)
        if words not in kept:
            kept[words] = pickle.dumps(compose(name, overrides=overrides, **options))
        return pickle.loads(kept[words])

    return remembered


def parsing_once(parse: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """`OverridesParser.parse_override` of Hydra, which parses the same word once."""
    kept: dict[str, Any] = {}

    def parsed(self: Any, word: str) -> Any:
        if word not in kept:
            kept[word] = parse(self, word)
        return deepcopy(kept[word])

    return parsed


def loading_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """`OmegaConf.load`, which parses the same text once."""
    kept: dict[str, bytes] = {}

    def loaded(file: Any) -> Any:
        text = file.read() if hasattr(file, "read") else Path(file).read_text(encoding="utf-8")
        if text not in kept:
            kept[text] = pickle.dumps(load(StringIO(text)))
        return pickle.loads(kept[text])

    return loaded
