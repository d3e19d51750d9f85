"""wandb as on a machine where nobody has used it."""

import os
from pathlib import Path

import pytest


def forget_wandb(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Hide the account and the settings of the user; what wandb keeps goes into `folder`."""
    # Names the service of this process. Restored after the service has ended it would lead the
    # forks of later tests to nothing.
    os.environ.pop("WANDB_SERVICE", None)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", os.devnull)
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(folder / f"wandb_{kind.lower()}"))
