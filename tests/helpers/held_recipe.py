"""A recipe of a user's folder whose tensor scales are held for three steps."""

from pathlib import Path

HELD = """
_target_: fp4train.precision.Custom
label: held
fprop:
  _target_: fp4train.precision.Operands
  first: &x {_target_: fp4train.quantize.QuantSpec, held: 3}
  second: &w {_target_: fp4train.quantize.QuantSpec, held: 3, block: [16, 16]}
dgrad:
  _target_: fp4train.precision.Operands
  first: &dy {_target_: fp4train.quantize.QuantSpec, held: 3, rounding: stochastic}
  second: *w
wgrad:
  _target_: fp4train.precision.Operands
  first: *dy
  second: *x
"""
OPTIONS = ("--config-dir", "mine", "recipe=held", "policy=all", "phases=none")


def write_held(folder: Path) -> tuple[str, ...]:
    """The arguments of a run in `folder` that trains in the recipe, which is written there."""
    path = folder / "mine" / "recipe" / "held.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HELD)
    return OPTIONS
