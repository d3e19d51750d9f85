"""The way of a model from another's folder to a served one: fine-tuned on conversations in NVFP4,
distilled, packed.
"""

import json
from pathlib import Path

import pytest
from command_line import Cli, lines

from fp4train.exchange import load_trained, log_likelihoods

QUANTISED = ("recipe=nvfp4", "policy=all", "phases=none")
FACTS = {
    "the sky": "blue",
    "grass": "green",
    "coal": "black",
    "snow": "white",
    "blood": "red",
    "the sun": "yellow",
}


def talk(number: int) -> dict[str, list[dict[str, str]]]:
    thing = [*FACTS][number % len(FACTS)]
    asked = (f"{thing}?", f"what colour has {thing}?", f"colour of {thing}?")[number // 6 % 3]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": FACTS[thing]}]
    return {"messages": messages}


def loss(run: str) -> float:
    found: float = [line["val/loss"] for line in lines(run) if "val/loss" in line][-1]
    return found


@pytest.mark.long
def test_fine_tuning_distillation_and_packed_export(cli: Cli, tmp_path: Path) -> None:
    shape = (
        "model.width=64",
        "model.layers=3",
        "train.seq_len=128",
        "train.batch_size=8",
        "optim.lr=3e-3",
    )
    assert cli("run.name=base", *shape, *QUANTISED, "train.steps=60").code == 0
    assert cli.raw("export", "runs/base", "to=hf", "out=base").code == 0
    Path("talks.jsonl").write_text(
        "".join(json.dumps(talk(number)) + "\n" for number in range(400))
    )
    data = (
        "data=chat",
        "data.path=talks.jsonl",
        f"data.cache_dir={tmp_path / 'cache'}",
        "track=jsonl",
    )
    tuning = (
        "train.seq_len=128",
        "train.batch_size=8",
        "eval.batches=2",
        "train.steps=250",
        "optim.lr=5e-3",
    )

    assert cli.raw("init=base", "run.name=tuned", *data, *tuning, *QUANTISED).code == 0
    assert loss("runs/tuned") < 0.1, "it has learned the answers"
    answers = colours("runs/tuned")
    assert sum(answers) >= 5, answers

    assert cli.raw("export", "runs/tuned", "to=hf", "out=tuned").code == 0
    taught = (
        "init=tuned",
        "teacher=tuned",
        "run.name=distilled",
        "optim.lr=3e-4",
        "train.steps=40",
    )
    given = [word for word in tuning if not word.startswith(("train.steps", "optim"))]
    assert cli.raw(*taught, *data, *given, *QUANTISED).code == 0
    assert (
        loss("runs/distilled") < loss("runs/tuned") + 0.05 and sum(colours("runs/distilled")) >= 5
    )

    assert cli.raw("export", "runs/distilled", "to=compressed-tensors", "out=packed").code == 0
    verified = cli.raw("verify", "packed", "against=runs/distilled")
    assert verified.code == 0, verified.out


def colours(run: str) -> list[bool]:
    """Of each fact, whether the model finds its colour the most likely of all colours."""
    trained = load_trained(Path(run))
    tokenizer = trained.text_tokenizer()
    found = []
    for thing, colour in FACTS.items():
        prompt = f"<|im_start|>user\nwhat colour has {thing}?<|im_end|>\n<|im_start|>assistant\n"
        asked = [tokenizer.encode(f"{prompt}{each}<|im_end|>") for each in FACTS.values()]
        scored = [(ids, len(ids) - len(tokenizer.encode(prompt))) for ids in asked]
        totals = [total for total, _ in log_likelihoods(trained, trained.own, scored, rows=8)]
        found.append([*FACTS.values()][totals.index(max(totals))] == colour)
    return found
