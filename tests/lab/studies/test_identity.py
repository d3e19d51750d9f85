"""A record is recognised after an upgrade that adds options, and not after a change of what was
measured.
"""

from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from subjects import subject_of

from fp4train.errors import UserError
from fp4train.lab.studies import Base, ForkSettings, RecipeParts, open_record, open_subject
from fp4train.lab.studies.sensitivity import identity_of
from fp4train.lab.studies.subject import described, digest
from fp4train.precision import FP16, MXFP4, NVFP4, LayerPolicy
from fp4train.quantize import QuantSpec
from fp4train.run.find import Command
from fp4train.run.record import directory as run_directory


@dataclass(frozen=True, kw_only=True)
class Options:
    needed: int
    shape: tuple[int, ...] = (1, 16)
    inner: QuantSpec = field(default_factory=QuantSpec)


def later(**values: Any) -> Any:
    """An object of the class as a later version has it, with one more option."""
    kind = make_dataclass(
        "Options",
        [("added", str, field(default="off"))],
        bases=(Options,),
        kw_only=True,
        frozen=True,
    )
    kind.__module__ = Options.__module__
    return kind(**values)


def test_an_option_that_a_later_version_adds_changes_no_description_until_it_is_set() -> None:
    assert described(later(needed=3)) == described(Options(needed=3))
    assert digest([later(needed=3)]) == digest([Options(needed=3)])
    assert described(later(needed=3, added="on")) == {**described(Options(needed=3)), "added": "on"}


def test_whatever_differs_from_a_default_is_in_the_description() -> None:
    inner = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
    found = described(Options(needed=3, shape=(2,), inner=inner))
    assert found["needed"] == 3 and found["shape"] == [2]
    assert found["inner"]["element"] == "e4m3" and "formula" not in found["inner"]
    different = [
        NVFP4(),
        NVFP4(hadamard=False),
        NVFP4(high_precision=("fprop",)),
        MXFP4(),
        LayerPolicy(last=0.25),
    ]
    assert len({digest(each) for each in different}) == len(different)


def test_a_run_from_before_an_option_has_the_settings_of_one_with_its_default(
    trained: Path,
) -> None:
    cfg = run_directory.read_config(trained)
    cfg.resume, cfg.run.dir = str(trained), str(trained)
    del cfg.model.recompute, cfg.oscillation
    now = subject_of(trained)
    older = open_subject(Command.of(cfg))
    assert older.identity == now.identity
    assert (
        now.settings["train.batch_size"] == 4
        and "optim.lr" not in now.settings
        and "data.path" not in now.settings
    )


def test_a_ranking_finds_its_folder_again_whatever_options_are_added(trained: Path) -> None:
    subject = subject_of(trained)
    settings = ForkSettings(steps=3, schedule="linear", lr=1e-3, batches=2)

    def mark(subject: Any, settings: ForkSettings = settings) -> str:
        known = {"source": trained, "run": "a", "trained": "NVFP4", "targets": [1]}
        return Base(step=subject.step, settings=settings, identity=subject.identity, **known).mark

    name = mark(subject)
    assert mark(replace(subject, settings={**subject.settings, "model.added": "on"})) == name
    assert mark(subject, replace(settings, steps=4)) != name
    assert mark(subject_of(trained, step=3)) != name


def test_a_refusal_names_the_settings_that_differ(trained: Path, tmp_path: Path) -> None:
    subject = subject_of(trained)
    with open_record(tmp_path, identity_of(subject, NVFP4(), 2), subject.step):
        pass
    other = replace(
        subject, settings={**subject.settings, "train.batch_size": 7, "model.added": "on"}
    )
    named = (
        r"settings\.train\.batch_size: 4 there, 7 here; settings\.model\.added: the default "
        r"there, on here"
    )
    with (
        pytest.raises(UserError, match=named),
        open_record(tmp_path, identity_of(other, NVFP4(), 2), 6),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"recipe\.hadamard: the default there, False here"),
        open_record(tmp_path, identity_of(subject, NVFP4(hadamard=False), 2), 6),
    ):
        pass


def test_a_policy_has_the_same_key_in_a_record_whatever_options_are_added(trained: Path) -> None:
    parts = RecipeParts(subject_of(trained), NVFP4(), repeats=1)
    one, two = (parts.under(LayerPolicy(first=first, last=0), "chosen") for first in (0, 0.5))
    assert one.key != two.key and digest(one.policy)[:12] in one.key


def test_a_study_of_an_older_fp4train_with_another_loss_scale_is_not_gone_on_with(
    trained: Path, tmp_path: Path
) -> None:
    """Its record does not say which scale it had. One of a recipe without loss scaling goes on."""
    subject = subject_of(trained)
    scaled = identity_of(subject, FP16(), 2)
    older = {key: value for key, value in scaled.items() if key != "loss_scale"}
    with open_record(tmp_path, older, subject.step):
        pass
    with (
        pytest.raises(UserError, match=r"\(loss_scale: the default there, 65536.* out=…"),
        open_record(tmp_path, scaled, subject.step),
    ):
        pass
    assert "loss_scale" not in identity_of(subject, NVFP4(), 2)
