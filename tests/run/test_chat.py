"""Runs on conversations: the loss is that of the answers of a whole batch, however it is cut;
resume to the bit.
"""

import json
from pathlib import Path

import pytest
from command_line import Cli, lines, losses
from torch.nn.functional import cross_entropy

from fp4train.data import Loader
from fp4train.exchange import held_out, load_trained
from fp4train.run.record import directory as run_directory

WORDS = (
    "data=chat",
    "data.val=0.2",
    "train.seq_len=256",
    "train.steps=4",
    "phases=none",
    "recipe=fp32",
    "checkpoint.every=2",
)


@pytest.fixture
def chat(tmp_path: Path) -> tuple[str, ...]:
    def talk(n: int) -> dict[str, list[dict[str, str]]]:
        answer = "y" * (1 + n * 7 % 13)
        return {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": answer},
            ]
        }

    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(talk(n)) + "\n" for n in range(60)), encoding="utf-8")
    return (*WORDS, f"data.path={path}", f"data.cache_dir={tmp_path / 'cache'}")


def test_the_loss_of_a_step_is_that_of_its_answers_for_any_microbatches(
    cli: Cli, chat: tuple[str, ...]
) -> None:
    """The mean over the answers of the batch, and not of the means of its microbatches."""
    assert cli("run.name=whole", *chat).code == 0
    assert cli("run.name=cut", *chat, "train.microbatch=1").code == 0
    whole = losses("runs/whole")
    cut = losses("runs/cut")
    for step in whole:
        assert cut[step][:2] == pytest.approx(whole[step][:2], rel=2e-5)


@pytest.mark.long
def test_the_validation_loss_is_that_of_all_held_out_answers_whatever_the_batch(
    cli: Cli, chat: tuple[str, ...]
) -> None:
    assert cli("run.name=begun", *chat).code == 0
    found = []
    for batch in (1, 16):
        name = f"batch{batch}"
        words = ("init=runs/begun", "train.steps=1", "optim.lr=1e-12", "eval.batches=99")
        assert cli(f"run.name={name}", *chat, *words, f"train.batch_size={batch}").code == 0
        found += [line["val/loss"] for line in lines(f"runs/{name}") if "val/loss" in line]
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_the_validation_loss_is_torchs_over_the_answers_alone(
    cli: Cli, chat: tuple[str, ...]
) -> None:
    assert cli("run.name=a", *chat).code == 0
    trained = load_trained(Path("runs/a"))
    config = trained.config
    data = config.data.build(Path("runs/a"), 256, 0)
    tokens, targets = Loader(data.val, batch_size=4, seq_len=256, seed=0).rows(0, 4)
    with trained.masked():
        logits = trained.forward(trained.high_precision, tokens)
    expected = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
    (score,) = held_out(trained, [trained.high_precision], trained.config.eval.batches)
    logged = next(v for v in losses("runs/a")[4][5:6])
    assert logged == pytest.approx(float(expected), rel=1e-5) and score.values["loss"] == logged
    assert score.values["tokens"] == int((targets >= 0).sum())


def test_a_run_resumes_to_the_bit_with_its_own_template(
    cli: Cli, chat: tuple[str, ...], tmp_path: Path
) -> None:
    assert cli("run.name=a", *chat).code == 0
    whole = losses("runs/a")
    assert (
        Path("runs/a") / "chat_template.json"
    ).exists() and "chat_template.json" in run_directory.TOKENIZER
    assert cli.raw("resume=runs/a", "resume_step=2").code == 0
    assert losses("runs/a") == whole


def test_a_broken_line_ends_the_start_with_its_number(cli: Cli, chat: tuple[str, ...]) -> None:
    path = Path(
        next(word for word in chat if word.startswith("data.path=")).removeprefix("data.path=")
    )
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:7], '{"messages": 1}\n', *lines[7:]]))
    found = cli("run.name=a", *chat)
    assert f"{path}, line 8: " in found.message and not Path("runs/a/metrics.jsonl").exists()


def test_pipelines_are_refused(cli: Cli, chat: tuple[str, ...]) -> None:
    found = cli("plan", *chat, "parallel.pp=2", "gpu=B200", "gpus=2")
    assert "data=chat: later stages of a pipeline" in found.message
