"""A named set of prompts with the rule for right responses: as a user gives it, and loaded for a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any

from lightning.pytorch import Trainer

from lightning_realloc.algorithms.base.loaded_weights import is_model_source
from lightning_realloc.algorithms.base.module import MultiModelModule
from lightning_realloc.algorithms.base.rollout_columns import (
    judged_responses,
    response_summary,
    reward_columns,
    reward_summary,
    sample_responses,
    without_failed,
)
from lightning_realloc.algorithms.rollout.accuracy import Accuracy
from lightning_realloc.algorithms.rollout.final_answers import adding_answers
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.settings import check_type
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.prompts import PromptDataModule
from lightning_realloc.data.rows import RowSource, lasting
from lightning_realloc.data.sources import DatasetSource, is_stream
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.generation import Engine, SamplingParams
from lightning_realloc.generation.core.params import is_of_kind
from lightning_realloc.rewards.functions import RewardFunctions, listed
from lightning_realloc.rewards.named import refuse_misspelt
from lightning_realloc.scores.bootstrap import intervals
from lightning_realloc.scores.question_scores import EVALUATION, NUM_QUESTIONS, QuestionScores, Response, interval_names

MAX_NEW_TOKENS = 512
"""Tokens of a response by algorithms that sample none. More are seldom needed for a final answer without a thought."""
REASONING_GYM = "reasoning-gym:"
"""Beginning of the names of data sets of reasoning-gym."""
REASONING_GYM_ROWS, REASONING_GYM_SEED = 200, 1_000_003
"""Rows of such a set without a limit, and their seed, which differs from those that runs are likely to train with."""
LM_EVAL = "lm-eval:"
"""Beginning of the names of tasks of lm-eval."""
LIBRARIES = (REASONING_GYM, LM_EVAL)
"""Beginnings of the names of sets that bring their own rule for right responses."""
_COLUMN = "rewards"


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Prompts, and the rule for right responses to them."""

    # This order matters: jsonargparse takes the first that fits, and would dump a data module as the text of a path.
    data: str | DatasetSource | PromptDataModule | RowSource
    """Rows, see `PromptDataModule`; or such a data module, whose held-out rows are used if it has any; or a data set of
    reasoning-gym by name, such as ``"reasoning-gym:chain_sum"``, with 200 rows unless ``limit`` is given; or a task of
    lm-eval that generates, with one of its filters or without: ``"lm-eval:gsm8k:flexible-extract"``."""
    _: KW_ONLY
    reward: RewardSource | None = None
    """Function whose reward of a right response is at least ``accuracy.threshold``, or its import path; or a list of
    functions, whose rewards are added up. None: the rewards of the algorithm; for reasoning-gym and lm-eval, their own
    scores."""
    sampling: SamplingParams | None = None
    """Sampling of the responses; its seed does not depend on the run's. None: ``evaluation_sampling`` of the algorithm,
    else one greedy response of at most 512 tokens; for lm-eval, that of the task. Its stop strings are always added."""
    accuracy: Accuracy | None = None
    """Rule for right responses, and the values of k in ``pass@k`` and ``maj@k``; None: ``Accuracy()``."""
    prompt_column: str = "prompt"
    """Column with text, or with a list of messages for the chat template."""
    limit: int | None = None
    """Number of rows to use, the first ones; None: all."""
    every: int | None = None
    """Iterations between evaluations; None: those of `Evaluation`."""

    def __post_init__(self) -> None:
        check_type(SamplingParams, sampling=self.sampling)
        check_type(Accuracy, accuracy=self.accuracy)
        if not (several := self._rewards()):
            raise ConfigError(f"reward={self.reward!r} names no function; give one, or None for those of the algorithm")
        for one in several:
            refuse_misspelt(one, "reward")
        check_count("limit", self.limit, "rows; None uses all")
        check_count("every", self.every, "iterations; None takes that of Evaluation")
        data = self.data.data if isinstance(self.data, PromptDataModule) else self.data
        if is_stream(data):
            raise DataError(
                "an evaluation set is read whole, and this one is a stream; give a part of it without streaming, such "
                "as DatasetSource(..., split='test[:500]')"
            )
        if not isinstance(self.data, PromptDataModule):
            object.__setattr__(self, "data", lasting(self.data))

    def _rewards(self) -> list[Any]:
        return [self.reward] if is_model_source(self.reward) else listed(self.reward)

    @property
    def rule(self) -> Accuracy:
        """Rule for right responses."""
        return self.accuracy or Accuracy()

    def load(self, name: str, module: MultiModelModule) -> LoadedSet:
        """Read and tokenize the rows for a module with a Trainer, and check settings.

        Raises:
            ConfigError: for an algorithm without rewards, for ``k`` above the number of responses, and for several
                greedy responses.
            DataError: for rows that cannot be used.
            RewardError: for rows without a column that a reward function needs.
        """
        if isinstance(self.data, str) and self.data.startswith(LIBRARIES):
            return self._of_library(self.data, module).load(name, module)
        sampling = self._sampling_of(module)
        self._check(name, module, sampling)
        functions = None if self.reward is None else self._own_functions(name)
        try:
            table = self._table(module.trainer)
        except DataError as error:
            raise DataError(f"evaluation set {name!r}: {error}") from error
        for own in module.kept_reward_functions() if functions is None else (functions,):
            own.check_columns(table.data, f"evaluation set {name!r}")
        return LoadedSet(name=name, given=self, table=table, sampling=sampling, functions=functions)

    def _of_library(self, data: str, module: MultiModelModule) -> EvaluationSet:
        """Return the set with the rows of reasoning-gym or lm-eval, and their scores."""
        library, _, name = data.partition(":")
        try:
            if data.startswith(LM_EVAL):
                return self._of_lm_eval(name, module)
            from lightning_realloc.environments.adapters.reasoning_gym import reasoning_gym_rows, reasoning_gym_score
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the evaluation set {data!r} needs {library} ({error}); pip install 'lightning-realloc[{library}]'"
            ) from None
        rows = reasoning_gym_rows(name, self.limit or REASONING_GYM_ROWS, REASONING_GYM_SEED)
        return replace(self, data=rows, reward=reasoning_gym_score if self.reward is None else self.reward)

    def _of_lm_eval(self, name: str, module: MultiModelModule) -> EvaluationSet:
        from lightning_realloc.environments.adapters.lm_eval import LmEvalTask

        task = LmEvalTask(name)
        rows = task.rows(self.limit, as_messages=self._reader(module.trainer, []).makes_messages(module.tokenizer))
        reward = task if self.reward is None else self.reward
        return replace(self, data=rows, reward=reward, sampling=task.sampling(self.sampling))

    def _own_functions(self, name: str) -> RewardFunctions:
        several = self._rewards()
        if any(map(is_model_source, several)):
            raise ConfigError(
                f"the evaluation set {name!r} has a reward model, and rewards of a set are functions; give the model "
                f"to an algorithm as its reward=, and leave that of the set out"
            )
        functions = RewardFunctions(several)
        functions.do_without_environments()
        return functions

    def _sampling_of(self, module: MultiModelModule) -> SamplingParams:
        default = getattr(module, "evaluation_sampling", SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0))
        return self.sampling or default

    def _check(self, name: str, module: MultiModelModule, sampling: SamplingParams) -> None:
        kind, way_out = type(module).__name__, f"give the evaluation set {name!r} reward= a function"
        if self.reward is None and getattr(module, "reward_column", None) is None:
            raise ConfigError(f"{kind} has no rewards that could tell which responses are right; {way_out}")
        self.rule.check(kind, sampling.n, has_rewards=True, setting=f"sampling.n of the evaluation set {name!r}")
        if sampling.n > 1 and sampling.greedy:
            raise ConfigError(
                f"the evaluation set {name!r} samples n={sampling.n} responses at temperature=0, which are all the "
                f"same; set temperature above 0, or n=1"
            )

    def _table(self, trainer: Trainer) -> Samples:
        """Return the rows as samples. Prompts are rendered as those of the run's own data."""
        data = self.data
        if isinstance(data, PromptDataModule):
            data.trainer = trainer
            if data.val_fraction:
                data.setup("validate")
                table = data.tables["val"]
                return table.select(range(min(len(table), self.limit or len(table))))
            return data.table(data.data if data.val_data is None else data.val_data, limit=self.limit)
        return self._reader(trainer, data).table(data, limit=self.limit)

    def _reader(self, trainer: Trainer, data: Any) -> PromptDataModule:
        """Return a data module that renders prompts as the run's own does."""
        settings: dict[str, Any] = {"text_prompts": "auto"}
        own = getattr(trainer, "datamodule", None)
        if isinstance(own, RowDataModule):
            settings["chat_template_kwargs"] = own.chat_template_kwargs
        if isinstance(own, PromptDataModule):
            settings["text_prompts"] = own.text_prompts
        reader = PromptDataModule(data, batch_size=1, prompt_column=self.prompt_column, **settings)
        reader.trainer = trainer
        return reader


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSet:
    """An evaluation set whose rows are read, for one module. The module's calls ask it what to do."""

    name: str
    """Name in metrics."""
    given: EvaluationSet
    """Settings."""
    table: Samples
    """Prompts, the same on every rank."""
    sampling: SamplingParams
    """Sampling of the responses."""
    functions: RewardFunctions | None
    """Functions of its own; None: the rewards of the algorithm."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of its metrics."""
        return f"{EVALUATION}{self.name}"

    def calls(self, module: MultiModelModule) -> tuple[ModelFunctionCall, ...]:
        """Return the calls from prompts to rewards, in running order; a generating one is that of the actor."""
        generating = replace(module.dataflow.call("actor.generate"), method="evaluation_rollout")
        if self.functions is not None:
            judging = ModelFunctionCall(
                "evaluation_rewards", "compute", None, "evaluation_rewards", ("batch", "rollout"), (_COLUMN,)
            )
            return generating, judging
        others = [name for name in module.evaluation_calls if name != generating.name]
        return generating, *(call for call in module.dataflow.calls if call.name in others)

    def respond(self, module: MultiModelModule, engine: Engine, prompts: Samples) -> Samples:
        """Return responses to prompts, with their final answers if those are read."""
        dialogue = module.held_out_dialogue(engine, prompts, self.sampling)
        reader = self.given.rule.reader(self._functions(module))
        add = None if reader is None else adding_answers(None, prompts, module.tokenizer, reader)
        return sample_responses(engine, prompts, self.sampling, dialogue=dialogue, add_columns=add)

    def judge(self, module: MultiModelModule, samples: Samples) -> Mapping[str, Column]:
        """Return the rewards of responses by the set's own functions."""
        assert self.functions is not None, "else the algorithm's own calls judge"
        rewards = judged_responses(self.functions, samples, module.tokenizer, ends=module.response_ends())
        return {_COLUMN: rewards.total, **reward_columns(rewards)}

    def scores(self, module: MultiModelModule, samples: Samples) -> QuestionScores:
        """Return the scores of all responses."""
        column = self._column(module)
        return self.given.rule.scores(without_failed(samples, column), column)

    def metrics(self, module: MultiModelModule, samples: Samples, scores: QuestionScores) -> dict[str, float]:
        """Return all metrics by their full names."""
        found = {"reward": float(samples.tensor(self._column(module)).nanmean())}
        for summary in (reward_summary(samples), response_summary(samples)):
            found |= {name: float(value) for name, value in summary.items()}
        for name, score in intervals(scores).items():
            low, high = interval_names(name)
            found |= {name: score.value, low: score.low, high: score.high}
        return {f"{self.prefix}/{name}": value for name, value in found.items()} | {
            f"{self.prefix}/{NUM_QUESTIONS}": float(len(scores.questions))
        }

    def score_names(self, module: MultiModelModule) -> set[str]:
        """Return the names of the scores that it will have."""
        reader = self.given.rule.reader(self._functions(module))
        right = {"": [Response(is_right=True)] * self.sampling.n}
        names = QuestionScores.from_responses(right, self.given.rule.ks, reads_answers=reader is not None).names
        return {f"{self.prefix}/{each}" for name in names for each in (name, *interval_names(name))}

    def _functions(self, module: MultiModelModule) -> list[RewardFunctions]:
        return module.kept_reward_functions() if self.functions is None else [self.functions]

    def _column(self, module: MultiModelModule) -> str:
        return _COLUMN if self.functions is not None else str(module.reward_column)


def check_count(name: str, given: int | None, unit: str) -> None:
    """Raise ConfigError unless a setting is None or a whole number of at least 1."""
    if given is not None and not (is_of_kind(given, Integral) and given >= 1):
        raise ConfigError(f"{name}={given!r} must be a whole number of at least 1 {unit}")
