"""What Hydra composed of the package's own files, remembered: it takes as long as the steps of a
tiny run.
"""

import pickle
from collections.abc import Callable
from typing import Any


def remembering(compose: Callable[..., Any]) -> Callable[..., Any]:
    """Hydra's `compose`, which composes the same words once; with other folders in its search path,
    each time.
    """
    kept: dict[tuple[str, ...], bytes] = {}

    def remembered(name: str, overrides: list[str], **options: Any) -> Any:
        if any(word.startswith("hydra.searchpath") for word in overrides):
            return compose(name, overrides=overrides, **options)
        words = (name, *overrides)
        if words not in kept:
            kept[words] = pickle.dumps(compose(name, overrides=overrides, **options))
        return pickle.loads(kept[words])

    return remembered
