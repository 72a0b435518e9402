"""Tasks of lm-eval, EleutherAI's lm-evaluation-harness, as rows of prompts and a reward function for evaluation sets.

Prompts with few-shot examples, stop strings, filters and metrics are those of the task, and lm-eval's own code computes
the scores. Tasks that compare the likelihoods of choices are refused: they score no responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from lightning_realloc.environments.message_environment import Message
from lightning_realloc.errors import ConfigError, DataError, describe_error
from lightning_realloc.generation import SamplingParams
from lightning_realloc.remote_path import expand_home
from lightning_realloc.rewards.texts import completion_texts

COLUMN = "lm_eval"
"""Column of the rows with the number of the task's document."""


class LmEvalTask:
    """A task of lm-eval that generates: its rows, its sampling, and the reward function of responses.

    The reward is the task's first metric after one of its filters.

    Args:
        name: Name of the task or file of its YAML, such as ``"gsm8k"`` and ``"tasks/mine.yaml"``. A filter may follow,
            as in ``"gsm8k:flexible-extract"``; without one, it is the task's first.

    Raises:
        ConfigError: for a task or filter that there is not, and for tasks that score no single responses.
        DataError: if the task's data cannot be read.
    """

    def __init__(self, name: str) -> None:
        self._name, _, chosen = name.partition(":")
        self._task = _load(self._name)
        _refuse(self._name, self._task)
        filters = {one.name: one for one in self._task._filters}
        if chosen and chosen not in filters:
            raise ConfigError(
                f"the task {self._name!r} of lm-eval has no filter {chosen!r}; it has {', '.join(filters)}"
            )
        self._filter = filters[chosen] if chosen else next(iter(filters.values()))
        self._metric = next(iter(self._task._metric_fn_list))
        if not self._task.higher_is_better().get(self._metric, True):
            raise ConfigError(
                f"the metric {self._metric} of the task {self._name!r} is better if lower, and a right response has a "
                f"high reward; give the evaluation set reward= a function"
            )
        self._docs = self._task.eval_docs
        self([""], [0])

    def rows(self, limit: int | None, *, as_messages: bool) -> list[dict[str, Any]]:
        """Return rows for `PromptDataModule`, with the prompts that ``lm_eval.simple_evaluate`` would make.

        Args:
            limit: Number of rows, the first ones; None: all.
            as_messages: Whether a prompt is a list of messages for a chat template; else it is text.
        """
        self._task.set_fewshot_seed(DEFAULT_OTHER_SEED)
        context = partial(
            self._task.fewshot_context,
            num_fewshot=self._task.config.num_fewshot or 0,
            apply_chat_template=as_messages,
            fewshot_as_multiturn=as_messages,
            chat_template=_as_given if as_messages else None,
        )
        count = len(self._docs) if limit is None else min(limit, len(self._docs))
        docs = (self._docs[index] for index in range(count))
        return [
            {"prompt": context(doc, gen_prefix=self._task.doc_to_prefix(doc)), COLUMN: index}
            for index, doc in enumerate(docs)
        ]

    def sampling(self, given: SamplingParams | None) -> SamplingParams:
        """Return the task's sampling, or the given one with the task's stop strings."""
        settings = self._generation
        if given is None:
            others = {name: settings[name] for name in ("top_k", "top_p", "min_p") if name in settings}
            is_drawn = settings["do_sample"] and settings["temperature"] > 0
            given = SamplingParams(
                max_new_tokens=settings["max_gen_toks"],
                temperature=settings["temperature"] if is_drawn else 0.0,
                **(others if is_drawn else {}),
            )
        return replace(given, stop_strings=tuple(dict.fromkeys((*given.stop_strings, *self._stops))))

    def __call__(
        self, completions: Sequence[str | list[Message]], lm_eval: Sequence[int], **columns: object
    ) -> list[float]:
        """Return the metric of each completion, cut before the first of the task's stop strings.

        Raises:
            ConfigError: if the task's filter or metric cannot score single responses.
        """
        docs = [self._docs[index] for index in lm_eval]
        found = []
        for text, doc in zip(completion_texts(completions), docs, strict=True):
            for stop in self._stops:
                text = text.split(stop)[0]
            given = Instance("generate_until", doc, ("", {}), 0, (self._name, 0, 1), resps=[text])
            try:
                self._filter.apply([given])
                metrics = self._task.process_results(doc, [given.filtered_resps[self._filter.name]])
                found.append(float(metrics[self._metric]))
            except Exception as error:
                raise ConfigError(
                    f"the filter {self._filter.name!r} and the metric {self._metric!r} of the task {self._name!r} do "
                    f"not score single responses ({describe_error(error)}); name another filter of it, "
                    f"lm-eval:{self._name}:FILTER, or give the evaluation set reward= a function"
                ) from error
        return found

    @property
    def _generation(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = normalize_gen_kwargs(self._task.config.generation_kwargs or {})
        return settings

    @property
    def _stops(self) -> list[str]:
        return [stop for stop in self._generation["until"] if stop]


def _load(name: str) -> Task:
    """Return the task of a name or of a YAML file."""
    known, name = _known_tasks(), expand_home(name)
    if name not in known.task_index and not Path(name).is_file():
        raise ConfigError(
            f"lm-eval has no task {name!r}, and there is no such YAML file; `lm-eval ls tasks` lists the names"
        )
    try:
        tasks = known.load(name)["tasks"]
    except Exception as error:
        raise DataError(f"lm-eval cannot read the task {name!r} ({describe_error(error)})") from error
    if name in tasks or len(tasks) == 1:
        return tasks.get(name) or next(iter(tasks.values()))
    raise ConfigError(f"{name!r} names {len(tasks)} tasks of lm-eval; make a set of each: {', '.join(sorted(tasks))}")


@cache
def _known_tasks() -> TaskManager:
    """Return the index of lm-eval's own tasks; to make it takes seconds, because it reads thousands of files."""
    return TaskManager()


def _refuse(name: str, task: Task) -> None:
    """Raise ConfigError for a task whose score is not one of single responses in text."""
    reasons = {
        f"scores by likelihoods ({task.OUTPUT_TYPE}), not by responses": task.OUTPUT_TYPE != "generate_until",
        "runs the model's programs in this process, without a sandbox": getattr(task, "UNSAFE_CODE", False),
        "shows images or plays sound": getattr(task, "MULTIMODAL", False),
        "has metrics of its own class": not hasattr(task, "_metric_fn_list"),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"the task {name!r} of lm-eval {reason}, so no response has a reward; run it with lm-eval on the "
                f"exported model"
            )


def _as_given(messages: list[Message], *, add_generation_prompt: bool) -> list[Message]:
    """Return messages instead of their text: the data module renders them."""
    return messages
