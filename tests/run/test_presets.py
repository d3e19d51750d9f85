"""Complete runs of real sizes: planned whole without a network, and begun at reduced width;
warnings about sizes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli, Outcome
from configured import config_of
from lengths import long_but

from fp4train.config import CONFIGS

PRESETS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*_fineweb.yaml"))
SHORT = ("llama_125m_fineweb",)
TOKENS = {"llama_125m": 9.9e9, "llama_1b": 28.8e9, "llama_8b": 137.8e9, "moe_30b": 1.0e12}
SMALL = (
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.head_dim=16",
    "model.hidden=64",
    "train.steps=3",
    "train.batch_size=2",
    "train.microbatch=1",
    "train.seq_len=32",
    "schedule.warmup=1",
    "data=text",
    "data.val=0.05",
    "data/tokenizer=bytes",
    "eval.batches=1",
    "track=jsonl",
    "model.vocab_size=257",
)
EXPERTS = ("model.experts.count=4", "model.experts.top=2", "model.experts.hidden=32")


def test_the_presets_are_these() -> None:
    assert [name.removesuffix("_fineweb") for name in PRESETS] == list(TOKENS)


@pytest.fixture(scope="module")
def plans() -> dict[str, Outcome]:
    """Plans that several tests read, by the preset's name."""
    return {}


@pytest.fixture
def planned(cli: Cli, plans: dict[str, Outcome]) -> Callable[[str], Outcome]:
    """The plan of a preset on one GPU, which is made once."""

    def plan(name: str) -> Outcome:
        if name not in plans:
            plans[name] = cli.raw("plan", f"experiment={name}", "gpu=B200")
        return plans[name]

    return plan


@pytest.mark.parametrize("name", long_but(SHORT, PRESETS))
def test_a_preset_has_the_tokens_of_its_source_and_is_planned_without_a_network(
    planned: Callable[[str], Outcome], name: str
) -> None:
    config = config_of(f"experiment={name}")
    assert config.train.steps * config.train.step_tokens == pytest.approx(
        TOKENS[name.removesuffix("_fineweb")], rel=0.01
    )
    header = (CONFIGS / "experiment" / f"{name}.yaml").read_text("utf-8").split("defaults:")[0]
    assert "arXiv:" in header or "karpathy/" in header
    ended = planned(name)
    assert ended.code == 0 and "NVFP4" in ended.out and "warning" not in ended.err


@pytest.mark.parametrize("name", long_but(("moe_30b_fineweb",), PRESETS))
def test_the_first_steps_of_a_preset_run_at_reduced_width(cli: Cli, name: str) -> None:
    words = [*SMALL, *(EXPERTS if name.startswith("moe") else ())]
    ended = cli.raw(f"experiment={name}", *words, cli.paths[0], cli.paths[1], "run.name=small")
    assert ended.code == 0, ended.err
    assert "BF16" in Path("runs/small/plan.txt").read_text("utf-8")


def test_a_large_model_with_few_tokens_or_with_bytes_is_told_so(cli: Cli) -> None:
    said = cli.raw("plan", "model=llama_1b").err
    assert "0.0013 for each, and about 20 are usual" in said.replace("0.00126", "0.0013")
    assert "reads bytes: data/tokenizer=gpt_neox" in said
    assert "warning" not in cli.raw("plan").err
    assert "reads bytes" not in cli.raw("plan", "model=evo2_1b", "data=dna", "data.path=x").err
