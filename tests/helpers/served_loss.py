"""The loss of an exported folder as `transformers` computes it."""

from pathlib import Path

import torch
import torch.nn.functional as F

from fp4train.data.passes import Passes
from fp4train.exchange import TrainedModel
from fp4train.exchange.evaluation import data_of


def transformers_loss(folder: Path, trained: TrainedModel, batches: int) -> tuple[float, int]:
    """(The mean loss on so many batches of the run's held-out text, the targets that it is of);
    codes are multiplied in BF16, as compressed-tensors emulates them.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    settings = trained.config.train
    loader = data_of(trained).validation(batch_size=settings.batch_size, seq_len=settings.seq_len)
    passes = Passes(loader=loader, rows=settings.rows(1), batches=batches)
    total = 0.0
    for part in passes.parts:
        tokens, targets = loader.rows(part.start, len(part))
        with torch.no_grad():
            logits = model(input_ids=tokens).logits.float()
        total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    count = sum(passes.targets)
    return total / count, count
