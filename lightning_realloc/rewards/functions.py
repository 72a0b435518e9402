"""Weighted sum of reward functions with TRL's signature.

A function is called with whole batches, ``f(prompts=..., completions=..., completion_ids=..., **columns)``, and returns
one number per completion, or None if it does not apply. Functions written for TRL's ``GRPOTrainer`` work unchanged.
Source: https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from lightning_realloc.data.chat import Message, answer_message, is_conversation, partial_answer
from lightning_realloc.data.images.row_images import PillowImages
from lightning_realloc.errors import RewardError
from lightning_realloc.rewards.failure_rule import GIVE_UP_AFTER, Failed, FailureRule, Outcome
from lightning_realloc.rewards.invoke import MAX_REWARD, call_reward, call_reward_async, finite_number, masks_failures
from lightning_realloc.rewards.named import reward_function
from lightning_realloc.rewards.signatures import (
    ENVIRONMENTS,
    is_async,
    mentioned,
    reads_environments,
    require_values,
    required_columns,
    requires_environments,
    unique_names,
)
from lightning_realloc.rewards.signatures import RewardFunction as RewardFunction
from lightning_realloc.rewards.texts import describe_completion, shortened
from lightning_realloc.runtime.event_loop import EventLoop

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """Rewards of a batch of B completions.

    Example:
        >>> from lightning_realloc.rewards import exact_match
        >>> functions = RewardFunctions(exact_match)
        >>> functions(["2 + 2 ="], ["4"], [[19]], {"answer": ["4"]}).total.tolist()
        [1.0]
    """

    total: Tensor
    """Weighted sum over the functions that apply, (B,) float32; NaN if one of them failed, or it is ignored."""
    by_function: Mapping[str, Tensor]
    """Function name -> unweighted rewards, (B,) float32; NaN if the function did not apply or failed."""
    failed: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of a function with ``on_failure="mask"`` -> (B,) bool, True where it failed."""


class RewardFunctions:
    """One or more reward functions and their weights.

    Coroutine functions run concurrently with each other and with the remaining functions, which run in sequence.

    Args:
        functions: Callables, or import paths of callables: ``package.module:name`` or ``package.module.name``.
        weights: One factor per function; all 1 by default.
        alone: Whether these functions are the only source of rewards, so that at least one must apply to every
            completion.

    Raises:
        RewardError: for an import path that cannot be resolved, no functions, or weights that do not match.

    Example:
        >>> from lightning_realloc.rewards import Length, exact_match
        >>> functions = RewardFunctions([exact_match, Length(maximum=8)], weights=[1.0, 0.5])
        >>> functions(["2 + 2 ="], ["4"], [[19]], {"answer": ["4"]}).total.tolist()
        [1.5]
    """

    def __init__(
        self,
        functions: RewardFunction | str | Sequence[RewardFunction | str],
        *,
        weights: Sequence[float] | None = None,
        alone: bool = True,
    ) -> None:
        given = listed(functions)
        if not given:
            raise RewardError("at least one reward function is needed; got none")
        _refuse_models(given)
        self.functions = tuple(reward_function(item) for item in given)
        self.weights = tuple(float(weight) for weight in weights) if weights is not None else (1.0,) * len(given)
        if len(self.weights) != len(self.functions) or None in map(finite_number, self.weights):
            raise RewardError(
                f"each reward function needs a finite weight: {len(self.functions)} expected; got {list(self.weights)}"
            )
        self._alone = alone
        self.names = unique_names(self.functions)
        self.reading_environments = tuple(name for name, function in self._named() if reads_environments(function))
        """Names of the functions that get the objects of environments, if there are any; see `judge_environments`."""
        self.trainer_state: Callable[[], TrainerState] = TrainerState
        """Factory of the ``trainer_state`` that functions receive."""
        self._loop = EventLoop("rewards")
        self._rules: dict[str, FailureRule] = {}
        """Name of a function with ``on_failure="mask"`` -> its rule, from its first call on."""

    def start(self) -> None:
        """Call ``start`` of every function that has it, before a run begins.

        Raises:
            RewardError: if a function cannot work.
        """
        for function in self.functions:
            getattr(function, "start", _do_nothing)()

    def close(self) -> None:
        """Call ``close`` of every function that has it; a later call of the functions starts them again."""
        for function in self.functions:
            getattr(function, "close", _do_nothing)()
        self._loop.close()

    def do_without_environments(self) -> None:
        """Call every function as the others, since there are no environments of messages.

        Raises:
            RewardError: for a function that requires them.
        """
        self.reading_environments = ()
        for name, function in self._named():
            if requires_environments(function):
                raise RewardError(
                    f"reward function {name!r} has an argument 'environments', and there are no environments of "
                    f"messages; give environment= a class of them, or rename the argument"
                )

    def check_lengths(self, max_new_tokens: int) -> None:
        """Call ``check_length`` of every function that has it, with the tokens of the longest response.

        Raises:
            RewardError: for a function that no response is long enough for.
        """
        for function in self.functions:
            getattr(function, "check_length", _ignore_length)(max_new_tokens)

    def check_columns(self, columns: Collection[str], source: str = "data") -> None:
        """Check before the first step that the data, or another ``source``, has every column that functions require.

        Raises:
            RewardError: for missing columns, or rows whose values are missing; the message names the function.
        """
        for name, missing in self.missing_columns(columns).items():
            raise RewardError(
                f"reward function {name!r} needs the columns {missing}, the {source} has {sorted(columns)}; "
                f"add them to the {source} or give the function's parameters defaults"
            )
        if self._alone and isinstance(columns, Mapping):
            require_values(self.functions, columns, source)

    def check_tokens(self, removed: Callable[[], Collection[str]]) -> None:
        """Check that no function looks for a special token that completions are decoded without.

        Args:
            removed: Returns the special tokens; called if a function says what it looks for.

        Raises:
            RewardError: for such a token; the message names the function.
        """
        for name, function in self._named():
            found = mentioned(function, removed()) if hasattr(function, "mentioned") else []
            if found:
                raise RewardError(
                    f"reward function {name!r} looks for {', '.join(map(repr, found))}, special tokens of the "
                    f"tokenizer that completions are decoded without, so it never finds them; set "
                    f"keep_special_tokens=True, or add them to the tokenizer as tokens that are not special"
                )

    def check_prompt(self, prompt: object, end: Callable[[], str]) -> None:
        """Check that no function requires the tag that a prompt opens, after which completions begin.

        Args:
            prompt: Text or conversation.
            end: Returns the end of the text to generate from; called if a function begins with a tag.

        Raises:
            RewardError: for such a function.
        """
        for name, function in self._named():
            while hasattr(function, "function"):  # of a wrapper
                function = function.function
            tag = getattr(function, "first_tag", "")
            if tag and partial_answer(prompt) is None and end().rstrip().endswith(tag):
                raise RewardError(
                    f"reward function {name!r} requires {tag}, which the prompts end with, so that completions begin "
                    f"after it; give {type(function).__name__}(prompt_opens=True)"
                )

    def missing_columns(self, columns: Collection[str]) -> dict[str, list[str]]:
        """Return function name -> missing columns, for functions that miss any."""
        missing = {name: sorted(required_columns(function) - set(columns)) for name, function in self._named()}
        return {name: names for name, names in missing.items() if names}

    def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[str | list[Message]],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[object]],
        *,
        ignored: Tensor | None = None,
        known: Mapping[str, Tensor] | None = None,
    ) -> Rewards:
        """Return the rewards of a batch of B completions.

        Args:
            prompts: B texts or conversations. For a conversation, functions receive the completion as a conversation as
                well; a final assistant message of the prompt becomes part of the completion.
            completions: B texts, or conversations of the model with its environment.
            completion_ids: B lists of token ids.
            columns: Further columns of the data, B values each.
            ignored: (B,) bool, True for completions whose rewards are discarded; None: there are none.
            known: (B,) rewards, NaN for none, by the names of functions that are not called again.

        Raises:
            RewardError: if a function fails or returns anything but one finite number (or None) per completion, or if
                no function applies to a completion. The message names function, prompt and completion.
        """
        given = self._arguments(prompts, completions, completion_ids, columns)
        outcomes = {name: _as_outcomes(values) for name, values in (known or {}).items()}
        asked = {name: function for name, function in self._named() if name not in outcomes}
        nothing = torch.zeros(len(completions), dtype=torch.bool)
        outcomes |= self._call_all(asked, given)
        return self._weighted(outcomes, given, nothing if ignored is None else ignored)

    def judge_environments(
        self,
        prompts: Sequence[object],
        completions: Sequence[str | list[Message]],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[object]],
        environments: Sequence[object],
    ) -> dict[str, list[Outcome]]:
        """Return the results of the functions that read environments, by name; arguments as of a call, and B objects.

        Raises:
            RewardError: as a call.
        """
        given = self._arguments(prompts, completions, completion_ids, columns) | {ENVIRONMENTS: list(environments)}
        asked = {name: function for name, function in self._named() if name in self.reading_environments}
        return self._call_all(asked, given)

    def _arguments(
        self,
        prompts: Sequence[object],
        completions: Sequence[str | list[Message]],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[object]],
    ) -> dict[str, Any]:
        images = PillowImages()
        return {
            **{name: list(values) for name, values in columns.items()},
            "prompts": [images.put_in(_without_partial_answer(prompt)) for prompt in prompts],
            "completions": list(map(images.put_in, map(_completion, prompts, completions))),
            "completion_ids": [list(ids) for ids in completion_ids],
            "trainer_state": self.trainer_state(),
            "log_extra": _do_nothing,
            "log_metric": _do_nothing,
        }

    def _call_all(self, asked: Mapping[str, RewardFunction], given: Mapping[str, Any]) -> dict[str, list[Outcome]]:
        waiting = {
            name: self._loop.submit(call_reward_async(name, function, given))
            for name, function in asked.items()
            if is_async(function)
        }
        try:
            results = {
                name: call_reward(name, function, given) for name, function in asked.items() if name not in waiting
            }
            return results | {name: future.result() for name, future in waiting.items()}
        finally:  # after an exception, the other results are not needed
            for future in waiting.values():
                future.cancel()

    def _weighted(
        self, outcomes: Mapping[str, Sequence[Outcome]], given: Mapping[str, Any], ignored: Tensor
    ) -> Rewards:
        by_function = {name: _as_tensor(outcomes[name]).masked_fill(ignored, math.nan) for name in self.names}
        failed = {
            name: torch.tensor([isinstance(outcome, Failed) for outcome in outcomes[name]], dtype=torch.bool)
            for name, function in self._named()
            if masks_failures(function)
        }
        self._apply_failure_rules(outcomes, failed)
        values = torch.stack(list(by_function.values()))
        masked = torch.stack([*failed.values(), ignored]).any(dim=0)
        if self._alone:
            self._require_a_reward(values.isnan().all(dim=0) & ~masked, given)
        total = (values * torch.tensor(self.weights)[:, None]).nansum(dim=0)
        refuse_infinite_sums(total, masked, lambda index: describe_completion(index, given))
        return Rewards(total.masked_fill(masked, math.nan), by_function, failed)

    def _apply_failure_rules(self, outcomes: Mapping[str, Sequence[Outcome]], failed: Mapping[str, Tensor]) -> None:
        for name, function in self._named():
            reasons = [outcome.reason for outcome in outcomes[name] if isinstance(outcome, Failed)]
            if reasons and name not in failed:
                raise RewardError(
                    f"reward function {name!r} could not judge {len(reasons)} of {len(outcomes[name])} completions; "
                    f"{reasons[0]}; set the function's attribute on_failure = 'mask' to leave such samples out"
                )
            if name in failed:
                limit = getattr(function, "give_up_after", GIVE_UP_AFTER)
                self._rules.setdefault(name, FailureRule(name, "mask", limit)).apply(outcomes[name])
            if reasons:
                log.warning(
                    "%s: %d of %d samples are left out of this iteration; %s",
                    name,
                    len(reasons),
                    len(outcomes[name]),
                    reasons[0],
                )

    def _require_a_reward(self, without_reward: Tensor, given: Mapping[str, Any]) -> None:
        if bool(without_reward.any()):
            index = int(without_reward.nonzero()[0])
            read = sorted(
                {column for function in self.functions for column in required_columns(function)} & given.keys()
            )
            row = ", ".join(f"{column}={shortened(given[column][index])}" for column in read)
            way_out = f"; its row has {row}: correct that, or leave the row out" if row else ""
            raise RewardError(
                f"at least one reward function must apply to every completion; all of {list(self.names)} returned "
                f"None for {describe_completion(index, given)}{way_out}"
            )

    def _named(self) -> Iterator[tuple[str, RewardFunction]]:
        return zip(self.names, self.functions, strict=True)


def refuse_infinite_sums(total: Tensor, missing: Tensor, describe: Callable[[int], str]) -> None:
    """Raise RewardError for a weighted sum of rewards above `MAX_REWARD`, whose square is infinite.

    Args:
        total: (B,) sums.
        missing: (B,) bool, True where there is no sum.
        describe: Returns a description of the completion at an index.

    Raises:
        RewardError: for the first such sum.
    """
    bad = ~(total.abs() <= MAX_REWARD) & ~missing  # NaN too
    if bool(bad.any()):
        index = int(bad.nonzero()[0])
        raise RewardError(
            f"a weighted sum of rewards must be at most {MAX_REWARD:g}; it is {float(total[index]):g} for "
            f"{describe(index)}; lower reward_weights or the rewards"
        )


def listed(functions: object) -> list[Any]:
    """Return one reward source as a list of one, and several as a list."""
    if isinstance(functions, Iterable) and not isinstance(functions, str) and not callable(functions):
        return list(functions)
    return [functions]


def _ignore_length(max_new_tokens: int) -> None:
    """Functions without the method apply to responses of any length."""


def _refuse_models(given: Sequence[object]) -> None:
    for item in given:
        if isinstance(item, torch.nn.Module):
            raise RewardError(
                f"a reward function takes prompts and completions, but a {type(item).__name__} takes tokens; give a "
                f"reward model to an algorithm as its reward=, or call it from a function"
            )


def _as_tensor(outcomes: Sequence[Outcome]) -> Tensor:
    missing = (Failed, type(None))
    return torch.tensor([math.nan if isinstance(o, missing) else o for o in outcomes], dtype=torch.float32)


def _as_outcomes(values: Tensor) -> list[Outcome]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _do_nothing(*arguments: object) -> None:
    """Stand-in for TRL's logging functions, whose tables do not exist here."""


def _completion(prompt: object, given: str | list[Message]) -> str | list[Message]:
    return [answer_message(prompt, given)] if is_conversation(prompt) and isinstance(given, str) else given


def _without_partial_answer(prompt: Any) -> object:
    return prompt if partial_answer(prompt) is None else prompt[:-1]
