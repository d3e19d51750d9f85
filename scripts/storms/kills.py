"""Commands that are killed (SIGKILL) at random moments, and given again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from storms.ground import SCENARIOS, Ground, Result, begin, goes_on


def kill_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    name = draw.choice(tuple(SCENARIOS))
    ground.copy(place)
    seconds = ground.undisturbed(name).seconds
    for _ in range(draw.randint(1, 3)):
        pid = begin(place, *SCENARIOS[name].command)
        time.sleep(draw.random() * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    seen = goes_on(ground, name, place)
    return Result(name, not seen, seen)
