"""What keys, groups and options mean, as the command line shows it; no question ends in Hydra's own
text.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import Cli
from omegaconf import OmegaConf

from fp4train.cli import help as screens
from fp4train.config import default_of, own_class, own_options
from fp4train.config.binding import as_node
from fp4train.config.composition import Composed, composed, sections
from fp4train.config.descriptions import CLASSES, Descriptions, comments

OPTIONS = [(group, option) for group, names in own_options().items() for option in names]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def keys_of(section: object, place: str) -> Iterator[tuple[str, str]]:
    """The keys of a section and of those in it, each with its class, or else with its place."""
    if isinstance(section, Mapping):
        place = section.get("_target_", place)
        for key, value in section.items():
            yield place, key
            yield from keys_of(value, f"{place}.{key}")
    elif isinstance(section, list):
        for entry in section:
            yield from keys_of(entry, place)


def commands_of(group: str) -> Iterator[tuple[str, Composed]]:
    """Option → what the command that chooses it composes, for options that have all keys of the
    group between them; a section is put into one composition.
    """
    options = own_options()[group]
    if group == "experiment":  # it has no section
        for option in options:
            yield option, next(composed([f"{group}={option}"]))
        return
    words = {"phases": ["schedule=wsd"], "data/tokenizer": ["data=text"]}.get(group, [])
    command = next(composed(words))
    named = sections({group: options})
    described: set[tuple[str, str]] = set()
    for (_, option), section in named.items():
        keys = set(keys_of(section, group))
        if keys <= described:
            continue
        described |= keys
        cfg = copy.deepcopy(command.cfg)
        OmegaConf.update(cfg, group.replace("/", "."), section, merge=False)
        yield option, replace(command, cfg=cfg, choices={**command.choices, group: option})


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, marks=[pytest.mark.long] * (group == "experiment"))
        for group in own_options()
    ],
)
def test_every_key_of_every_option_has_a_description(group: str) -> None:
    section = "" if group == "experiment" else group.replace("/", ".")
    missing = set()
    for option, command in commands_of(group):
        known = screens.Topics(command, own_options(), Descriptions())
        keys = [key for key in known.keys if key.path.startswith(section)]
        missing |= {(option, key.path) for key in keys if not known.describe(key)}
    assert not missing


def test_every_key_of_the_default_run_has_a_description() -> None:
    known = screens.topics([])
    assert not [key.path for key in known.keys if not known.describe(key)]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_and_group_has_a_description(group: str, option: str) -> None:
    assert Descriptions().option(group, option) and Descriptions().group(group)


def test_keys_that_no_option_sets_have_the_defaults_of_their_classes() -> None:
    for target, fields in yaml.safe_load(CLASSES.read_text("utf-8")).items():
        kind = own_class(target, "_target_")
        defaults = {name: as_node(default_of(kind.__dataclass_fields__[name])) for name in fields}
        assert fields == {name: value if value != () else [] for name, value in defaults.items()}


def test_comments_are_read_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(
        "# the file\n# in two lines\n\na: 'x # no comment'  # of a\n"
        "b:  # of b\n  - {_target_: m.K, d: 1}  # of d\n# above\nc: [1,  # of c\n  2]\nf: '#'\n"
    )
    found = comments(path)
    assert found.header == "the file in two lines"
    assert found.keys == {
        "a": "of a",
        "b": "of b",
        "b._target_": "of d",
        "b.d": "of d",
        "c": "of c",
    }
    assert found.classes["m.K", "d"] == "of d"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["help", "train.batch_size"],
            ["train.batch_size", "sequences per step", "16", "a whole number"],
        ),
        (["help", "optim.lr"], ["0.003, with optim=adamw"]),
        (["help", "recipe"], ["* nvfp4", "MXFP8: E4M3 with a power of two", "recipe.guard=1.0"]),
        (["help", "recipe=mxfp8"], ["recipe.scale_rounding=rceil"]),
        (["plan", "full=true", "--help"], ["full=true", "every layer and GEMM"]),
        (
            ["help", "experiment=llama_1b_fineweb"],
            [
                "/data: fineweb_edu_29b",
                "/data/tokenizer: gpt_neox",
                "batch_size: 256 # × 2,048 tokens",
                "warmup: 5000",
            ],
        ),
        (["help", "checkpoint."], ["checkpoint.keep"]),
        (["help", "plan", "gpu"], ["gpu=B200", "H200"]),
        (["help", "data.path"], ["data.path", "with data=", "takes text or a list"]),
        (["help", "compare", "out"], ["out=FILE"]),
        (["compare", "runs/a", "runs/b", "--help"], ["fp4train compare"]),
    ],
)
def test_help_says_what_a_word_means(cli: Cli, words: list[str], shown: list[str]) -> None:
    found = cli.raw(*words)
    text = " ".join(found.out.split())
    assert found.code == 0 and not [part for part in shown if part not in text]
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["help", "train.stepz"], "unknown key 'train.stepz'; did you mean 'train.steps'?"),
        (["help", "nvfp4"], "did you mean 'recipe=nvfp4'?"),
        (["recipe=NVFP4"], "there is no such recipe; did you mean 'nvfp4'?"),
        (["--multirun"], "no key has several values"),
        (["--resolve"], "shown by --cfg job, with --resolve or not"),
        (["data.tokenizer=gpt2"], "is chosen with a slash, data/tokenizer=NAME"),
        (["~train"], "train is missing"),
        (["--cfg", "job", "recipe=nvpf4"], "there is no such recipe; did you mean 'nvfp4'?"),
        (["--cfg", "job", "foo"], "'foo' is no key=value"),
        (["--cfg", "jobb"], "shown by --cfg job"),
        (["--info", "defaults"], "unknown flag --info"),
        (["trian"], "unknown verb 'trian'; did you mean 'train'?"),
    ],
)
def test_what_help_does_not_know_is_one_line(cli: Cli, words: list[str], message: str) -> None:
    found = cli.raw(*words)
    assert found.code == 1 and message in " ".join(found.err.split())
    assert found.err.count("fp4train: ") == 1 and not re.search(
        "Traceback|Hydra|hydra.cc", found.err
    )
    assert max(map(len, found.err.splitlines())) <= 80


@pytest.mark.parametrize("verb", ["plan", "rank"])
def test_an_option_of_a_verb_without_one_of_its_letters_is_suggested(
    cli: Cli, verb: str, small_run: Path
) -> None:
    options = re.findall(r"^  (\w+)=", cli.raw("help", verb).out, re.MULTILINE)
    assert options
    for option in options:
        middle = len(option) // 2
        word = f"{option[:middle]}{option[middle + 1 :]}=1"
        refused = cli.raw(verb, str(small_run), word)
        message = " ".join(refused.err.split())
        assert refused.code in (1, 2, 3) and refused.err.count("fp4train: ") == 1
        assert f"did you mean {option!r}?" in message, message


@pytest.mark.parametrize(
    ("verb", "options"), [("check", "step"), ("sensitivity", "step, batches"), ("plan", "full")]
)
def test_a_verb_on_a_run_lists_its_own_options(
    cli: Cli, verb: str, options: str, small_run: Path
) -> None:
    refused = " ".join(cli.raw(verb, str(small_run), "zzz=3").err.split())
    assert f"unknown key 'zzz' (known: {options}" in refused
    assert "and the keys of a run)" in refused and "write plan" not in refused


@pytest.mark.parametrize("verb", ["compare", "report"])
def test_what_a_verb_knows_follows_what_was_meant(cli: Cli, verb: str) -> None:
    for word, hint in (("bsln=a", "; did you mean 'baseline'?"), ("zzz=a", "")):
        key = word.partition("=")[0]
        message = f"unknown key {key!r}{hint} (known: baseline, out, "
        assert message in " ".join(cli.raw(verb, "a", "b", word).err.split())


def test_the_configuration_is_shown_with_keys_that_only_classes_have(cli: Cli) -> None:
    shown = yaml.safe_load(cli.raw("--cfg", "job", "recipe.fused_scales=true").out)
    assert shown["recipe"]["fused_scales"] is True and shown["run"]["name"].startswith("${hydra:")
    assert "hydra" not in shown
    resolved = yaml.safe_load(cli.raw("--cfg", "job", "--resolve").out)
    assert resolved["run"]["name"] == "llama_tiny-nvfp4"


def test_help_lists_a_users_own_option_with_its_comments(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "house.yaml").write_text(
        "# Ours\ndefaults: [mxfp8, _self_]\nelement: hybrid  # as we like it\n"
    )
    shown = cli.raw("help", "--config-dir", "own", "recipe=house").out
    assert "Ours" in shown and "as we like it" in shown and "32×32 blocks" in shown


def test_help_of_plan_says_what_a_run_takes(cli: Cli, small_run: Path) -> None:
    lines = cli.raw("help", "plan").out
    assert "not of RUN" in next(line for line in lines.splitlines() if "--json" in line)
    for option in ("full=true", "full=false"):
        assert cli.raw("plan", str(small_run), option).code == 0
    for option in ("--json", "gpus=2", "gpu=B200"):
        refused = cli.raw("plan", str(small_run), option)
        assert refused.code == 1 and "plan RUN shows the run as it is" in " ".join(
            refused.err.split()
        )
    assert "unknown flag --zzz" in cli.raw("plan", str(small_run), "--zzz").err


def test_help_lists_the_keys_of_a_plugins_option(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own" / "optim").mkdir(parents=True)
    (tmp_path / "own" / "optim" / "lion.yaml").write_text("_target_: helplab.Lion\n")
    (tmp_path / "own" / "helplab.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Lion:\n"
        "    betas: float = 0.75\n    width: int = 7\n    def build(self, model): ...\n"
    )
    named = ("optim=lion", "plugins=[helplab]", "--config-dir", "own")
    shown = cli.raw("help", *named).out
    assert "optim.betas=0.75" in shown and "plugins" not in shown
    assert "value   7, with optim=lion" in cli.raw("help", "optim.width", *named).out
