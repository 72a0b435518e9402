"""Rewards from reward models, each a role with an inference call, and from functions on the host, summed by weight.

With several sources a call ``judge`` sums the rewards. Models score before it, on the ranks of the plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.loaded_weights import ModelSource, is_model_source
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import (
    FINISH_REASONS,
    environment_failed,
    judged_responses,
    response_texts,
)
from lightning_realloc.algorithms.base.vocabulary import (
    own_tokenizer,
    require_same_vocabulary,
    required_tokenizer,
    retokenized,
)
from lightning_realloc.algorithms.settings import check_positive, check_share
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Samples
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.environments.columns import REWARDS as ENVIRONMENT_REWARDS
from lightning_realloc.errors import ConfigError, RewardError, require_choice
from lightning_realloc.rewards.functions import (
    RewardFunction,
    RewardFunctions,
    Rewards,
    listed,
    refuse_infinite_sums,
)
from lightning_realloc.rewards.invoke import finite_number
from lightning_realloc.rewards.named import NAMED_REWARDS, refuse_misspelt, reward_function
from lightning_realloc.rewards.texts import shortened
from lightning_realloc.runtime.parallel.packed_forward import sequence_scores
from lightning_realloc.setting_hints import suggest_settings

# This order matters: jsonargparse would otherwise dump a list as a path.
RewardSource = str | Sequence[str | RewardFunction | ModelSource] | RewardFunction | ModelSource
"""Sequence classifiers of one label, as names, folders, configs or modules, and functions ``f(prompts, completions,
**columns) -> list[float]``, or their import paths: one, or a list of them."""
RewardTokenizer = Literal["actor", "retokenize"] | PreTrainedTokenizerBase
"""Input of reward models: the actor's tokens, or the texts encoded by their own or another tokenizer."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A reward model."""

    role: str
    weight: float

    @property
    def column(self) -> str:
        """Column of its scores."""
        return f"{self.role}_scores"

    @property
    def method(self) -> str:
        """Name of the method that scores with it."""
        return f"score_by_{self.role}"


def is_further(role: str) -> bool:
    """Return whether a role is a reward model after the first one."""
    return re.fullmatch(r"reward_\d+", role) is not None


def calls_of_further(roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
    """Return the calls of the reward models among ``roles`` after the first, which an algorithm declares."""
    models = [_Model(role, 1.0) for role in roles if is_further(role)]
    return tuple(
        ModelFunctionCall(f"{model.role}.infer", "infer", model.role, model.method, ("rollout",), (model.column,))
        for model in models
    )


def with_further(
    calls: Sequence[ModelFunctionCall], further: Sequence[ModelFunctionCall]
) -> tuple[ModelFunctionCall, ...]:
    """Return ``calls`` and those of further reward models, with ``judge`` needing their scores."""
    columns = [column for call in further for column in call.produces]
    added = [replace(call, needs=(*call.needs, *columns)) if call.name == "judge" else call for call in calls]
    return (*added, *further)


class RewardSources:
    """Reward models and reward functions, each with a weight.

    Args:
        reward: One of them, or a list.
        sources: The algorithm's sources by role; the models are added.
        weights: One per model or function, in the order of the list; None: all 1.
        tokenizer: Input of the models.
        has_environment: Whether environments may give rewards too, which are added.

    Raises:
        ConfigError: for a tokenizer without a model.
        RewardError: for an import path that cannot be resolved, no source, or weights that do not match.
    """

    def __init__(
        self,
        reward: RewardSource | None,
        sources: dict[str, ModelSource],
        *,
        weights: Sequence[float] | None = None,
        tokenizer: RewardTokenizer = "actor",
        has_environment: bool = False,
    ) -> None:
        if reward is None and not has_environment:
            raise ConfigError(
                "reward=None leaves every reward to an environment, and there is none that gives rewards; give reward= "
                "a function or a model, or environment= a class with step() or get_reward()"
            )
        self._has_environment = has_environment
        # Check for a model first, because a configuration is iterable.
        several: list[Any] = [reward] if is_model_source(reward) else [] if reward is None else listed(reward)
        if not several and not has_environment:
            raise ConfigError(
                f"reward={reward!r} names no reward; give a function or a model, or one of {', '.join(NAMED_REWARDS)}"
            )
        for item in several:
            refuse_misspelt(item, "reward")
            if isinstance(item, StopProperly):
                raise RewardError(f"{item} is no reward function; write it as missing_eos_penalty={item}")
        given: list[Any] = [item if is_model_source(item) else reward_function(item) for item in several]
        factors = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
        if len(factors) != len(given) or None in map(finite_number, factors):
            raise RewardError(f"each reward needs a finite weight: {len(given)} expected; got {factors}")
        if not has_environment and not any(factors):
            raise RewardError(
                f"reward_weights={factors} leave every reward 0; give one of them another weight, such as 1"
            )
        pairs = list(zip(given, factors, strict=True))
        of_models = [(source, weight) for source, weight in pairs if is_model_source(source)]
        roles = ["reward" if number == 1 else f"reward_{number}" for number in range(1, len(of_models) + 1)]
        self.models = tuple(_Model(role, weight) for role, (_, weight) in zip(roles, of_models, strict=True))
        sources.update({role: source for role, (source, _) in zip(roles, of_models, strict=True)})
        others = [(function, weight) for function, weight in pairs if not is_model_source(function)]
        are_alone = not self.models and not has_environment
        self.functions = None if others == [] and not are_alone else RewardFunctions(
            [function for function, _ in others], weights=[weight for _, weight in others], alone=are_alone
        )  # fmt: skip
        if isinstance(tokenizer, str):
            require_choice("reward_tokenizer", tokenizer, ("actor", "retokenize"))
        if not self.models and tokenizer != "actor":
            raise ConfigError(f"reward_tokenizer={tokenizer!r} is for a reward model; reward={reward!r} is none")
        self._tokenizer = tokenizer
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        """Role -> tokenizer, for models that do not read the actor's tokens; filled before models are built."""

    @property
    def reads_actor_tokens(self) -> bool:
        """Whether there are reward models, and they read the actor's tokens."""
        return bool(self.models) and self._tokenizer == "actor"

    @property
    def weights(self) -> dict[str, float]:
        """Name of each reward in columns ``reward/...`` -> its weight."""
        of_functions = (
            {} if self.functions is None else dict(zip(self.functions.names, self.functions.weights, strict=True))
        )
        return {self._name_of(model, of_functions): model.weight for model in self.models} | of_functions

    @property
    def is_one_model(self) -> bool:
        """Whether the rewards are the scores of a single model, so that nothing has to be added up."""
        return not self._has_environment and self.functions is None and [m.weight for m in self.models] == [1.0]

    @property
    def evaluation_calls(self) -> tuple[str, ...]:
        """Calls from responses to rewards."""
        return (*[f"{model.role}.infer" for model in self.models], "judge")

    def further_calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls of all models after the first, which an algorithm declares."""
        return calls_of_further([model.role for model in self.models])

    def check_vocabularies(self, roles: Sequence[Role], tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise for a reward model that reads other text from the actor's tokens; the actor is the first of ``roles``.

        Raises:
            ConfigError: with the difference, and the setting that encodes texts again.
        """
        actor, names = roles[0], [model.role for model in self.models]
        for role in (role for role in roles if role.name in names):
            if self._tokenizer == "actor":
                way_out = (
                    f"give {role.name}= a model with the actor's tokenizer, or set reward_tokenizer='retokenize' to "
                    f"have it read the texts"
                )
                require_same_vocabulary(role, actor, tokenizer, way_out=way_out)
                _warn_of_other_template(role, tokenizer)
            else:
                own = required_tokenizer(role) if isinstance(self._tokenizer, str) else self._tokenizer
                self._tokenizers[role.name] = own

    def score(
        self,
        role: str,
        model: nn.Module,
        batch: PackedBatch,
        tokenizer: PreTrainedTokenizerBase,
        *,
        makes_messages: bool = False,
    ) -> Tensor:
        """Return the (B,) scores of a reward model, for sequences of the actor's ``tokenizer``.

        ``makes_messages`` says whether the actor read prompts that are text as a user message.

        Raises:
            RewardError: for a score that is not finite; the message names role, sample and response.
        """
        own = self._tokenizers.get(role)
        read = batch if own is None else retokenized(batch, tokenizer, own, makes_messages=makes_messages)
        scores = sequence_scores(model, read).float()
        bad = ~scores.isfinite()
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            end, length = int(batch.cu_seqlens[row + 1]), batch.response_lengths[row]
            text = tokenizer.decode(batch.input_ids[0, end - length : end], skip_special_tokens=True)
            raise RewardError(
                f"the reward model of role {role!r} must give finite scores; it gave {float(scores[row])} for the "
                f"completion {shortened(text)} of sample {int(batch.ids[row])}; look at its weights and precision"
            )
        return scores

    def judge(
        self, samples: Samples, tokenizer: PreTrainedTokenizerBase, *, ends: Collection[int] | None = None
    ) -> Rewards:
        """Return the sum of weighted scores and rewards, and of the environments' rewards; NaN where one failed.

        Functions read responses without special tokens; with the tokens that may end a response, ``ends``, they read
        all others.
        """
        failed = environment_failed(samples).cpu()
        scores = {model: samples.tensor(model.column).float().cpu() for model in self.models}
        scores = {model: values.masked_fill(failed, torch.nan) for model, values in scores.items()}
        of_models = torch.zeros(len(samples)) + sum(model.weight * values for model, values in scores.items())
        found = None if self.functions is None else judged_responses(self.functions, samples, tokenizer, ends=ends)
        total = of_models if found is None else found.total + of_models
        missing = failed if found is None else found.total.isnan()
        if self._has_environment:
            own = samples.tensor(ENVIRONMENT_REWARDS).cpu().masked_fill(failed, torch.nan)
            self._require_rewards(own, found, failed)
            total = (total + own.nan_to_num()).masked_fill(failed, torch.nan)
        refuse_infinite_sums(
            total, missing, lambda index: f"the completion {shortened(response_texts(samples, tokenizer)[index])}"
        )
        functions: Mapping[str, Tensor] = {} if found is None else found.by_function
        by_name = {**self._named(scores, functions), **functions}
        if self._has_environment:
            by_name["environment"] = own
        return Rewards(total, by_name, {} if found is None else found.failed)

    def _require_rewards(self, own: Tensor, found: Rewards | None, failed: Tensor) -> None:
        """Raise RewardError for a response that neither its environment nor a function or model rewards."""
        if self.models:
            return
        without = own.isnan() & ~failed
        if found is not None:
            without &= torch.stack(list(found.by_function.values())).isnan().all(dim=0) & ~found.total.isnan()
        if bool(without.any()):
            raise RewardError(
                f"{int(without.sum())} of {len(own)} responses have no reward: their environments gave none, and no "
                f"function applies; return StepResult(reward=...) from step(), define get_reward(), or give reward= a "
                f"function"
            )

    def _named(self, scores: Mapping[_Model, Tensor], taken: Collection[str]) -> dict[str, Tensor]:
        return {self._name_of(model, taken): values for model, values in scores.items()}

    @staticmethod
    def _name_of(model: _Model, taken: Collection[str]) -> str:
        return f"{model.role}_model" if model.role in taken else model.role


def _warn_of_other_template(role: Role, tokenizer: PreTrainedTokenizerBase) -> None:
    ours, theirs = tokenizer.chat_template, getattr(own_tokenizer(role), "chat_template", None)
    if None not in (ours, theirs) and ours != theirs:
        rank_zero_warn(
            f"{role.name} has another chat template than the actor, and reads messages as the actor's template renders "
            f"them; set reward_tokenizer='retokenize' to render them by its own"
        )


@suggest_settings({})
@dataclass(frozen=True, kw_only=True)
class StopProperly:
    """Reward of responses that are cut off: a share of their own, or a fixed one.

    Example:
        ``GRPO(actor, reward, missing_eos_penalty=StopProperly(scale=0.5))``
    """

    scale: float = 0.0
    """Factor of the reward, from 0 to 1."""
    reward: float | None = None
    """Reward in place of theirs; None: theirs, scaled."""

    def __post_init__(self) -> None:
        check_share(scale=self.scale)
        if self.reward is not None and self.scale:
            raise ConfigError(f"scale={self.scale} has no effect next to reward={self.reward}; leave one of them out")
        if self.reward is not None and finite_number(self.reward) is None:
            raise ConfigError(f"reward={self.reward!r} must be a finite number, or None for scale= times their own")


def checked_penalty(penalty: float | StopProperly | None) -> float | StopProperly | None:
    """Return the penalty for truncated responses; ConfigError for one that is not positive."""
    if not isinstance(penalty, StopProperly):
        check_positive(missing_eos_penalty=penalty)
    return penalty


def penalize_truncated(scores: Tensor, samples: Samples, penalty: float | StopProperly | None) -> Tensor:
    """Return the (B,) scores with the penalty for truncated responses; a missing score stays missing."""
    if penalty is None:
        return scores
    cut_off = (samples.tensor("finish_reason") == FINISH_REASONS.index("length")).to(scores.device)
    if not isinstance(penalty, StopProperly):
        return scores - penalty * cut_off.to(scores)
    fixed = scores * penalty.scale if penalty.reward is None else torch.full_like(scores, penalty.reward)
    return torch.where(cut_off & ~scores.isnan(), fixed, scores)
