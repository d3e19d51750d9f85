"""Tasks of EleutherAI's lm-evaluation-harness (`lm_eval`) on a trained model, in any recipe.

`HarnessModel` answers the three kinds of requests as `lm_eval.models.huggingface.HFLM` does: a
context that is too long loses its beginning, a text that is too long is scored in windows,
generation stops at the task's words. Importing this module imports lm_eval.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from yaml import YAMLError

from fp4train.data.rendering import Message
from fp4train.errors import UserError, check_local
from fp4train.exchange.dialogue import Dialogue
from fp4train.exchange.evaluation import Score, before_document, log_likelihoods, windows
from fp4train.exchange.generation import Sampling, TextStream, generate
from fp4train.exchange.trained import NamedRecipe, TrainedModel
from fp4train.text import near_miss

GENERATED = 256
"""Tokens that are generated where a task does not say how many, as in lm_eval."""
RESAMPLES = 1000
"""Resamples for the standard error of a metric that has no formula."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A trained model in one recipe; `rows` is the most sequences of a batch, `chat` what asks its
    questions, if they are asked in a conversation.
    """

    def __init__(
        self, trained: TrainedModel, named: NamedRecipe, rows: int, chat: Dialogue | None = None
    ) -> None:
        super().__init__()
        self.trained = trained
        self.named = named
        self.rows = rows
        self.chat = chat
        self.text = trained.text_tokenizer()

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.text.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The id that stands before a text without context."""
        return before_document(self.text)

    @property
    def tokenizer_name(self) -> str:
        return self.text.identity

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **more: Any
    ) -> list[int]:
        return self.text.encode(string) if self.chat is None else self.chat.encode(string)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "" if self.chat is None else self.chat.template.source

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        assert self.chat is not None
        text = self.chat.text(chat_history, prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        begun = chat_history[-1]["content"]  # the answer is to go on from
        return text[: text.rindex(begun) + len(begun)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **more: Any
    ) -> list[tuple[float, bool]]:
        most = self.trained.context
        for (_, continuation), _, ids in requests:
            if len(ids) > most:
                raise UserError(
                    f"the answer {continuation[:40]!r}… has {len(ids):,} tokens, more than "
                    "the model's context of "
                    f"{most:,} (train.seq_len)"
                )
        scored = [([*context, *ids][-most - 1 :], len(ids)) for _, context, ids in requests]
        return log_likelihoods(self.trained, self.named, scored, self.rows)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        parts = [
            list(windows(self.text.encode(request.args[0]), self.text, self.trained.context))
            for request in requests
        ]
        totals = iter(
            log_likelihoods(
                self.trained, self.named, [window for part in parts for window in part], self.rows
            )
        )
        return [sum(next(totals)[0] for _ in part) for part in parts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts = Collator(
            [
                (self.tok_encode(text) or [self.prefix_token_id], settings)
                for text, settings in (request.args for request in requests)
            ],
            sort_fn=lambda prompt: len(prompt[0]),
            group_by="gen_kwargs",
            group_fn=lambda prompt: prompt[1],
        )
        texts: list[str] = []
        for batch in prompts.get_batched(n=self.rows):
            _, settings = batch[0]
            texts += self._generated([ids for ids, _ in batch], settings)
        ordered: list[str] = prompts.get_original(texts)
        return ordered

    def _generated(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        """The texts after `prompts`, without the word that stopped each."""
        options = normalize_gen_kwargs(settings, GENERATED)
        ends = [self.eot_token_id]
        words = list(options["until"])
        if self.chat is not None:
            ends = self.chat.ends
            words.append(self.chat.spelt_end)
        until = [word for word in words if word]
        sampling = Sampling(
            tokens=options["max_gen_toks"],
            temperature=options.get("temperature") or 0.0,
            top_k=options.get("top_k") or None,
            top_p=options.get("top_p") or 1.0,
        )
        room = self.trained.context - sampling.tokens
        if room < 1:
            raise UserError(
                f"the task generates up to {sampling.tokens:,} tokens, which leave no room "
                "for a prompt in the model's "
                f"context of {self.trained.context:,} (train.seq_len): give it max_gen_toks "
                "in generation_kwargs"
            )
        streams = [TextStream(self.text) for _ in prompts]
        rows = generate(
            self.trained,
            [prompt[-room:] for prompt in prompts],
            sampling,
            named=self.named,
            ends=ends,
            stops=lambda row: any(word in streams[row].text for word in until),
        )
        for tokens in rows:
            for stream, token in zip(streams, tokens, strict=True):
                if token is not None:
                    stream.add(token)
        for stream in streams:
            stream.end()
        return [
            min((stream.text.split(word)[0] for word in until), key=len, default=stream.text)
            for stream in streams
        ]


def task_manager(names: Sequence[str]) -> TaskManager:
    """What knows tasks of these names.

    Raises:
        UserError: there is no such task.
    """
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        check_local(file, "task")
        if not Path(file).is_file():
            raise UserError(f"task={file} does not exist")
    manager = TaskManager(include_defaults=len(files) < len(names))
    for name in names:
        if name not in files and name not in manager.all_tasks:
            raise UserError(
                f"task={name}: lm_eval has no such task{near_miss(name, manager.all_tasks)}"
            )
    return manager


def tasks(
    trained: TrainedModel,
    recipes: Sequence[NamedRecipe],
    names: Sequence[str],
    *,
    rows: int,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
) -> Iterator[Score]:
    """The scores on tasks.

    Args:
        names: names of tasks, groups or tags, or paths of YAML files, each with a task.
        limit: most documents of each task; None: all.
        shots: number of examples before each question; None: the task's own.
        chat: whether questions are asked in the model's chat template.

    Raises:
        UserError: there is no such task, or its data cannot be had.
    """
    trained.text_tokenizer()
    manager = task_manager(names)
    for named in recipes:
        model = HarnessModel(trained, named, rows, Dialogue.of(trained) if chat else None)
        try:
            results = simple_evaluate(
                model,
                tasks=list(names),
                task_manager=manager,
                bootstrap_iters=RESAMPLES,
                limit=limit,
                num_fewshot=shots,
                apply_chat_template=chat,
            )
        except UserError:
            raise
        except (OSError, ValueError, LookupError, TypeError, ConnectionError, YAMLError) as error:
            raise UserError(f"task={','.join(names)}: {type(error).__name__}: {error}") from error
        for task, values in results["results"].items():
            kept = {
                key.removesuffix(",none"): float(value)
                for key, value in values.items()
                if isinstance(value, float | int) and math.isfinite(value)
            }
            size = results.get("n-samples", {}).get(task, {}).get("effective")
            if size is not None:
                kept["documents"] = size
            yield Score(task=f"{task} (chat)" if chat else task, recipe=named.name, values=kept)
