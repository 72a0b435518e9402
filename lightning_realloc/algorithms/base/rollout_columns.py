"""Convert completions of an engine to the columns of a rollout, and back to text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.losses.functional import token_ages
from lightning_realloc.batch.json_column import json_values
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import (
    ANSWER_INPUTS,
    EXTRA_INPUT,
    OLDEST_AGES,
    PROMPT_KEY,
    TOKEN_AGES,
    Column,
    Ragged,
    Samples,
    answer_column,
    extra_inputs,
    model_inputs,
)
from lightning_realloc.data.chat import Message
from lightning_realloc.environments.columns import (
    CONVERSATION,
    FUNCTIONS,
    NUM_CALLS,
    OWN_METRICS,
    SECONDS,
    TOOL_METRICS,
    conversations,
)
from lightning_realloc.environments.message_environment import MessageEnvironment
from lightning_realloc.environments.transcript import transcript
from lightning_realloc.environments.turns.turn_parser import Part
from lightning_realloc.errors import ConfigError, GenerationError
from lightning_realloc.generation import Completion, Conversation, Engine, Environment, SamplingParams, Turn
from lightning_realloc.generation.core.sample import FinishReason
from lightning_realloc.generation.loop.asking import call
from lightning_realloc.generation.loop.environment import OnFailure
from lightning_realloc.rewards.functions import RewardFunctions, Rewards
from lightning_realloc.rewards.signatures import function_name

_log = logging.getLogger(__name__)
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "failure", "unfinished", "environment", "max_turns")
"""Meanings of the numbers in a rollout's column ``finish_reason``. Checkpoints keep the numbers: add at the end."""
_ENDS: tuple[FinishReason, ...] = ("stop", "length")
_TALK_ENDS: tuple[FinishReason, ...] = (*_ENDS, "environment", "max_turns", "failure")
"""Reasons whose shares are logged, of responses of one turn and of conversations."""
PART_LENGTHS: Mapping[Part, str] = {"thinking": "thinking_tokens", "calls": "call_tokens", "answer": "answer_tokens"}
"""Columns (B,) int64, and metrics, of the tokens in each part of a response."""
_FAILURES = "reward_failures/"
_LEARNED_FAILURES = "learned_failures"
"""Column (B,) bool: responses that are learned although their environment failed."""


class RowEnvironment:
    """An environment that also gets the data's row of a sample.

    Args:
        environment: Environment to call.
        prompts: Prompts of this rank's samples.
        num_responses: Responses per prompt, as ``prompts.repeat`` numbers them.
    """

    def __init__(self, environment: Environment, prompts: Samples, num_responses: int) -> None:
        self._environment = environment
        self._columns = prompts.data
        self._place = {prompt: place for place, prompt in enumerate(prompts.ids.tolist())}
        self._num_responses = num_responses

    async def __call__(self, turn: Turn) -> Sequence[int] | None:
        """Return the environment's answer."""
        place = self._place[turn.sample_id // self._num_responses]
        columns = {name: column[place] for name, column in self._columns.items()}
        answer: Any = await call(self._environment, replace(turn, columns=columns))
        if isinstance(answer, MessageEnvironment):
            raise ConfigError(
                f"environment={function_name(self._environment)} takes an argument, so it answers turns in tokens, and "
                f"made a {type(answer).__name__}, which answers in messages; a function that makes environments has no "
                f"arguments, and rows reach reset(row)"
            )
        return cast("Sequence[int] | None", answer)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Environment of the responses of a call, and its limits."""

    environment: Environment
    conversation: Conversation

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for an engine."""
        return {"environment": self.environment, "conversation": self.conversation}

    def begin(
        self, prompts: Samples, samples: Samples, sampling: SamplingParams
    ) -> tuple[Sequence[ModelInput], SamplingParams]:
        """Return the prompts to generate from, and their sampling.

        Args:
            prompts: Prompts of the call.
            samples: One row per new response to them, those of a prompt adjacent.
            sampling: Sampling of ``n`` responses per prompt.
        """
        return model_inputs(prompts), sampling

    def resume(self, samples: Samples, completions: Sequence[Completion]) -> None:
        """Prepare for unfinished responses of an earlier call."""

    def finish(self, completions: Sequence[Completion]) -> tuple[Sequence[Completion], Mapping[str, Column]]:
        """Return the final completions, and the columns of their conversations."""
        return completions, dialogue_columns(completions)

    def close(self) -> None:
        """Give up what unfinished responses hold, after an error."""


def sample_responses(
    engine: Engine,
    prompts: Samples,
    sampling: SamplingParams,
    *,
    dialogue: Dialogue | None = None,
    iteration: int | None = None,
    add_columns: Callable[[Samples], Samples] | None = None,
) -> Samples:
    """Return ``sampling.n`` responses per prompt, with the columns of a rollout.

    Columns: ``prompt_id`` (B,), ``prompt_key`` (B,), ``prompt_ids`` and ``response_ids`` ragged, the prompts'
    ``input/...``, ``behaviour_logprobs`` ragged float32 of the response tokens, ``finish_reason`` (B,) an index into
    ``FINISH_REASONS``; with a ``dialogue`` also those of :func:`dialogue_columns`; with the batch's ``iteration`` also
    those of :func:`age_columns`; and those that ``add_columns`` adds. Sample ids are those of
    ``prompts.repeat(sampling.n)``, so that randomness follows the sample on any rank.

    Finished samples are sent on early to calls that wait for them on other ranks.
    """
    samples = prompts.with_columns(prompt_id=prompts.ids).repeat(sampling.n)
    ids = samples.ids.tolist()

    def responses(completions: Sequence[Completion]) -> Samples:
        made = rollout_of(samples.by_ids([c.sample_id for c in completions]), completions, dialogue)
        made = engine.with_experts(made, completions)
        made = made if iteration is None else made.with_columns(**age_columns(completions, iteration))
        return made if add_columns is None else add_columns(made)

    on_finished = None if engine.partial_results is None else engine.partial_results.collect(len(samples), responses)
    if dialogue is None:
        return responses(engine.generate(model_inputs(prompts), sampling, sample_ids=ids, on_finished=on_finished))
    try:
        inputs, params = dialogue.begin(prompts, samples, sampling)
        return responses(engine.generate(inputs, params, sample_ids=ids, on_finished=on_finished, **dialogue.settings))
    finally:
        dialogue.close()


def rollout_of(prompts: Samples, completions: Sequence[Completion], dialogue: Dialogue | None) -> Samples:
    """Return the columns of a rollout, one row per row of ``prompts``."""
    talked: Mapping[str, Column] = {}
    if dialogue is not None:
        completions, talked = dialogue.finish(completions)
        _warn_of_failures(completions)
        completions, failures = _settled_failures(completions, dialogue.conversation.on_failure)
        talked = {**talked, **failures}
    return Samples(
        prompts.ids,
        {
            "prompt_id": prompts.tensor("prompt_id"),
            "prompt_ids": prompts.ragged("prompt_ids"),
            **{f"{EXTRA_INPUT}{name}": column for name, column in extra_inputs(prompts).items()},
            PROMPT_KEY: torch.tensor([c.input.prompt_key for c in completions], dtype=torch.int64),
            "response_ids": Ragged.from_list([c.token_ids for c in completions], dtype=torch.int64),
            "behaviour_logprobs": Ragged.from_list([c.logprobs for c in completions], dtype=torch.float32),
            "finish_reason": torch.tensor(
                [FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=torch.int64
            ),
            **talked,
        },
    )


def _warn_of_failures(completions: Sequence[Completion]) -> None:
    errors = [completion.error for completion in completions if completion.error is not None]
    if errors:
        _log.warning(
            "%d of %d responses have failed with their environment; the first one: %s",
            len(errors),
            len(completions),
            errors[0],
        )


def _settled_failures(
    completions: Sequence[Completion], on_failure: OnFailure
) -> tuple[Sequence[Completion], dict[str, Column]]:
    """Return the completions with failures of environments as the setting has them; learned ones are in a column.

    Raises:
        GenerationError: for a failure that ends the run.
    """
    if on_failure == "drop":
        return completions, {}
    failed = [completion.finish_reason == "failure" for completion in completions]
    if on_failure == "raise" and any(failed):
        first = completions[failed.index(True)]
        raise GenerationError(
            f"the environment of sample {first.sample_id} failed, and on_failure='raise' ends the run: {first.error}"
        )
    learned = [replace(c, finish_reason="stop") if f else c for c, f in zip(completions, failed, strict=True)]
    return learned, {_LEARNED_FAILURES: torch.tensor(failed, dtype=torch.bool)}


def age_columns(completions: Sequence[Completion], iteration: int) -> Mapping[str, Column]:
    """Return the columns of B responses whose tokens may come from several versions of the weights.

    ``versions`` ragged int64 of the response tokens: iterations of training; ``token_ages`` (B,) int64: the sum of the
    ages of the tokens that the model sampled, in iterations before ``iteration``; ``oldest_ages`` (B,): the largest.
    """
    versions = Ragged.from_list([c.versions for c in completions], dtype=torch.int64)
    mask = Ragged.from_list([c.model_mask for c in completions], dtype=torch.bool)
    sums, oldest = token_ages(versions, mask, iteration)
    return {
        "versions": versions,
        TOKEN_AGES: sums,
        OLDEST_AGES: oldest,
    }


def dialogue_columns(completions: Sequence[Completion]) -> Mapping[str, Column]:
    """Return the columns of B conversations.

    ``model_mask`` ragged bool: True for tokens that the model sampled; ``num_model_tokens`` and ``num_turns`` (B,)
    int64 of the model; images of the environment's answers.
    """
    return {
        ANSWER_INPUTS: answer_column(completion.answers for completion in completions),
        "model_mask": Ragged.from_list([c.model_mask for c in completions], dtype=torch.bool),
        "num_model_tokens": torch.tensor([sum(c.model_mask) for c in completions], dtype=torch.int64),
        "num_turns": torch.tensor([_num_turns(c.model_mask) for c in completions], dtype=torch.int64),
    }


def _num_turns(model_mask: Sequence[bool]) -> int:
    return sum(chosen and not before for before, chosen in pairwise((False, *model_mask)))


def model_mask(samples: Samples) -> Ragged | None:
    """Return the mask of response tokens that the model sampled; None if it sampled all."""
    return samples.ragged("model_mask") if "model_mask" in samples else None


def num_model_tokens(samples: Samples) -> Tensor:
    """Return (B,) int64: the number of tokens of each response that the model sampled."""
    return (
        samples.tensor("num_model_tokens") if "num_model_tokens" in samples else samples.ragged("response_ids").lengths
    )


def environment_failed(samples: Samples) -> Tensor:
    """Return (B,) bool: True for responses that an environment's failure ended. The model did not cause it."""
    if "finish_reason" not in samples:
        return torch.zeros(len(samples), dtype=torch.bool)
    return samples.tensor("finish_reason") == FINISH_REASONS.index("failure")


def without_failed(samples: Samples, column: str) -> Samples:
    """Return the samples with NaN in a (B,) column of rewards where an environment failed."""
    rewards = samples.tensor(column).float()
    failed = environment_failed(samples).to(rewards.device)
    return samples.with_columns(**{column: rewards.masked_fill(failed, math.nan)})


def judged_responses(
    functions: RewardFunctions,
    samples: Samples,
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int] | None = None,
) -> Rewards:
    """Return the rewards of responses, NaN where an environment failed.

    Functions get the data's columns as Python objects, and conversations with an environment as messages. See
    :func:`response_texts` for ``ends``.
    """
    prompts: Sequence[object]
    texts: Sequence[str | list[Message]]
    if CONVERSATION in samples:
        talks = conversations(samples)
        prompts, texts = [talk["prompt"] for talk in talks], [talk["messages"] for talk in talks]
    else:
        prompts, texts = samples.objects("prompt"), response_texts(samples, tokenizer, ends=ends)
    others = {name: column for name, column in samples.data.items() if name != "prompt"}
    ids, failed = samples.ragged("response_ids").to_lists(), environment_failed(samples).cpu()
    known = {name: samples.tensor(f"{FUNCTIONS}{name}").cpu() for name in functions.reading_environments}
    return functions(prompts, texts, ids, others, ignored=failed, known=known)


def reward_columns(rewards: Rewards) -> dict[str, Tensor]:
    """Return each function's rewards as a column, if there are several, and failures, if they are masked."""
    several = rewards.by_function if len(rewards.by_function) > 1 else {}
    failures = {f"{_FAILURES}{name}": failed.float() for name, failed in rewards.failed.items()}
    return {f"reward/{name}": values for name, values in several.items()} | failures


def reward_summary(samples: Samples) -> dict[str, Tensor]:
    """Return the mean of each function's rewards, where it applied, and its number of failures."""
    means = {name: samples.tensor(name).nanmean() for name in samples.columns if name.startswith("reward/")}
    return means | {name: samples.tensor(name).sum() for name in samples.columns if name.startswith(_FAILURES)}


def response_summary(samples: Samples) -> dict[str, Tensor]:
    """Return mean, least and largest response length in tokens of the model, and the shares by what ended responses.

    Responses with several parts add the mean length of each. Conversations add the mean number of turns; those with
    tools the mean calls, failures and seconds per response. Carried responses add the mean age of tokens in iterations.
    """
    reasons, lengths = samples.tensor("finish_reason"), num_model_tokens(samples).float()
    if _LEARNED_FAILURES in samples:
        reasons = reasons.masked_fill(samples.tensor(_LEARNED_FAILURES), FINISH_REASONS.index("failure"))
    summary = {"response_length": lengths.mean()}
    for reason in _TALK_ENDS if "num_turns" in samples else _ENDS:
        share = (reasons == FINISH_REASONS.index(reason)).float().mean()
        summary[f"stopped/{'model' if reason == 'stop' else reason}"] = share
    if len(lengths):
        summary |= {"response_length/min": lengths.min(), "response_length/max": lengths.max()}
    summary |= {name: samples.tensor(name).float().mean() for name in PART_LENGTHS.values() if name in samples}
    if "num_turns" in samples:
        summary["turns"] = samples.tensor("num_turns").float().mean()
    if NUM_CALLS in samples:
        summary["tool_calls"] = samples.tensor(NUM_CALLS).float().mean()
        summary["environment_s"] = samples.tensor(SECONDS).mean()
        of_tools = (name for name in samples.columns if name.partition("/")[0] in TOOL_METRICS)
        summary |= {name: samples.tensor(name).mean() for name in of_tools}
        own = (name for name in samples.columns if name.startswith(OWN_METRICS))
        summary |= {name: samples.tensor(name).nanmean() for name in own}
    if "stale_tokens" in samples:
        summary["staleness"] = samples.tensor("stale_tokens").sum() / num_model_tokens(samples).sum()
    return summary


def response_texts(
    samples: Samples, tokenizer: PreTrainedTokenizerBase, *, ends: Collection[int] | None = None
) -> list[str]:
    """Return the responses as text.

    Special tokens are left out; with the tokens that may end a response, ``ends``, only one of these at its end.
    """
    ids = samples.ragged("response_ids").to_lists()
    if ends is None:
        return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in ids]
    kept = (row[:-1] if row and row[-1] in ends else row for row in ids)
    return [str(tokenizer.decode(row, skip_special_tokens=False)) for row in kept]


_ROW_NAMES = {"rewards": "reward", "scores": "score"}
"""Column of samples -> its name in a row."""
_HIDDEN = "data."
"""Prefix of a data column whose name a row needs otherwise."""


def sample_rows(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """Return one row per sample, in the samples' order.

    A row holds ``prompt`` as in the data, ``response`` (text, without special tokens) with ``num_response_tokens``, the
    ``conversation`` with an environment of messages as text,
    every column of one number per sample, such as ``reward``, and the data's other columns. ``finish_reason`` is a
    word; numbers that are not finite are None. A data column with the name of one of these is called ``data.<name>``.
    """
    given = dict(samples.data)
    prompts = {"prompt": given.pop("prompt")} if "prompt" in given else {}
    made: dict[str, Sequence[object]] = {}
    if "response_ids" in samples:
        made["response"] = response_texts(samples, tokenizer)
        made["num_response_tokens"] = samples.ragged("response_ids").lengths.tolist()
    if CONVERSATION in samples:
        made["conversation"] = list(map(transcript, json_values(samples.ragged(CONVERSATION))))
    for name, column in samples.columns.items():
        if isinstance(column, Tensor) and column.dim() == 1:
            made[_ROW_NAMES.get(name, name)] = _values(name, column)
    others = {f"{_HIDDEN}{name}" if name in made else name: column for name, column in given.items()}
    columns = {**prompts, **made, **others}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(name: str, column: Tensor) -> list[object]:
    values: list[float] = column.tolist()
    if name == "finish_reason":
        return [FINISH_REASONS[int(code)] for code in values]
    return [value if math.isfinite(value) else None for value in values]
