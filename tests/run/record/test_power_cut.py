"""A power cut keeps only what was synced: the calls of fsync of a real run are recorded, and the
rest is dropped.
"""

from pathlib import Path

import pytest
from command_line import STEADY, Cli, losses, steps
from storms.power import PowerCut


@pytest.mark.parametrize(
    "moments",
    [slice(3, None, 18), pytest.param(slice(0, None, 6), marks=pytest.mark.long)],
    ids=["few", "many"],
)
def test_a_power_cut_at_any_moment_leaves_a_run_that_the_same_command_finishes(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: slice
) -> None:
    command = ("run.name=a", "checkpoint.every=2", "eval.errors_every=3", *STEADY)
    place = tmp_path / "power"
    place.mkdir()
    monkeypatch.chdir(place)
    with PowerCut(place) as power:
        assert cli(*command).code == 0
    power.close()
    whole = losses("runs/a")
    measured = Path("runs/a/statistics.bin").read_bytes()

    monkeypatch.chdir(power.rebuild(tmp_path / "end"))
    assert steps()[-1] == 6 and losses("runs/a") == whole
    assert Path("runs/a/statistics.bin").read_bytes() == measured
    for moment in power.moments[moments]:
        monkeypatch.chdir(power.rebuild(tmp_path / str(moment), moment))
        again = cli(*command)
        assert again.code == 0, (moment, again.err)
        assert losses("runs/a") == whole
