"""Group-relative policy optimisation.

Left out here, because it is the runtime's: micro-batches, backward, clipping of gradients, optimizer steps, layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.averages import LossAverage, averaged_loss
from lightning_realloc.algorithms.calls import compute, generate, infer, train
from lightning_realloc.algorithms.functional import (
    KLEstimator,
    clipped_policy_loss,
    group_advantages,
    kl_estimate,
    masked_sum,
)
from lightning_realloc.algorithms.module import MultiModelModule
from lightning_realloc.algorithms.role import ModelSource, Role
from lightning_realloc.algorithms.rollout import (
    judged_responses,
    response_summary,
    reward_columns,
    reward_summary,
    sample_responses,
)
from lightning_realloc.algorithms.settings import check_choice, check_minibatches, check_not_negative, check_sampling
from lightning_realloc.data.rewards import RewardFunction, RewardFunctions
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.runtime.packed_forward import token_logprobs
from lightning_realloc.runtime.packing import PackedBatch
from lightning_realloc.runtime.samples import Column, Samples
from lightning_realloc.runtime.training import Average, Loss, Totals


class GRPO(MultiModelModule):
    """Train an actor on rewards, each compared with those of other responses to the same prompt.

    Source: Shao et al., arXiv:2402.03300.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Functions ``f(prompts, completions, **columns) -> list[float]``, or their import paths.
        reward_weights: One per function; by default all count 1.
        reference: What the policy is kept close to; by default the actor as it was loaded, or without its adapters.
        tokenizer: By default the actor's.
        sampling: Of the rollout; ``n`` is the group size.
        evaluation_sampling: Of ``validate`` and ``test``; by default one greedy response per prompt.
        kl_coef: Weight of the divergence from the reference; 0 leaves the reference out altogether.
        kl_estimator: k1, k2 or k3.
        clip_low: How far a token's probability ratio may fall below 1 and still be pushed down.
        clip_high: How far it may rise above 1 and still be pushed up.
        normalize_by_std: Divide advantages by the group's standard deviation.
        loss_average: ``"sequence"`` means each response's tokens, then the responses; ``"token"`` means all tokens.
        settings: Of :class:`MultiModelModule`: learning rate, optimizer, schedule, training options, seed.
    """

    evaluation_calls = ("actor.generate", "judge")
    optional_roles = ("reference",)
    share_prompts = True

    def __init__(
        self,
        actor: ModelSource,
        reward: str | Sequence[str | RewardFunction] | RewardFunction,
        *,
        reward_weights: Sequence[float] | None = None,
        reference: ModelSource | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        sampling: SamplingParams | None = None,
        evaluation_sampling: SamplingParams | None = None,
        kl_coef: float = 0.04,
        kl_estimator: KLEstimator = "k3",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        normalize_by_std: bool = True,
        loss_average: LossAverage = "sequence",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_sampling(sampling, evaluation_sampling)
        self.sampling = sampling or SamplingParams(n=8)
        if self.sampling.n < 2:
            raise ConfigError(f"sampling.n={self.sampling.n}: a group needs 2 or more responses to compare; set n >= 2")
        if self.sampling.temperature == 0:
            raise ConfigError("sampling.temperature=0 gives every response of a group the same tokens; set it above 0")
        check_choice("kl_estimator", kl_estimator, get_args(KLEstimator))
        check_choice("loss_average", loss_average, get_args(LossAverage))
        check_not_negative(kl_coef=kl_coef, clip_low=clip_low, clip_high=clip_high)
        self.evaluation_sampling = evaluation_sampling or replace(self.sampling, n=1, temperature=0.0)
        self._rewards = RewardFunctions(reward, weights=reward_weights)
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.normalize_by_std = normalize_by_std
        self.loss_average = loss_average
        self.tokenizer = tokenizer
        self._actor_source = actor
        self._reference_source = reference

    def roles(self) -> tuple[Role, ...]:
        """Return the actor and, where its divergence counts, the reference."""
        actor = Role(name="actor", source=self._actor_source, trained=True, peft=self.peft_of("actor"))
        return (actor, self.reference_of(actor, self._reference_source)) if self.kl_coef else (actor,)

    @generate("actor", produces="rollout")
    def roll_out(self, actor: GenerationEngine, prompts: Samples) -> Samples:
        """Sample a group of responses to every prompt; of held-out prompts, one."""
        sampling = self.sampling if self.training_now else self.evaluation_sampling
        return sample_responses(actor, prompts, replace(sampling, seed=sampling.seed + self.seed))

    @infer("reference", needs="rollout", produces="ref_logprobs")
    def score_reference(self, reference: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the reference's log-probability of every response token."""
        return token_logprobs(reference, batch, temperature=self.sampling.temperature, only_responses=True).logprobs

    @compute(needs="rollout", produces=("rewards", "advantages"))
    def judge(self, samples: Samples) -> Mapping[str, Column]:
        """Reward every response and compare it with its group."""
        rewards = judged_responses(self._rewards, samples, self.tokenizer)
        eps = 1e-4 if self.normalize_by_std else None
        advantages = group_advantages(rewards.total, samples.tensor("prompt_id"), std_eps=eps)
        return {"rewards": rewards.total, "advantages": advantages, **reward_columns(rewards)}

    @train("actor", needs=("rollout", "advantages", "ref_logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return the clipped surrogate and the divergence penalty of one micro-batch."""
        temperature = self.sampling.temperature
        logprobs = token_logprobs(actor, batch, temperature=temperature, only_responses=True).logprobs
        advantages = batch.per_token(batch["advantages"])
        mask = batch.response_mask
        surrogate = clipped_policy_loss(
            logprobs, batch["behaviour_logprobs"], advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        values = surrogate.values
        metrics = {"clip_fraction": Average(masked_sum(surrogate.clipped.float(), mask), mask.sum())}
        if self.kl_coef:
            kl = kl_estimate(logprobs, batch["ref_logprobs"], estimator=self.kl_estimator)
            values = values + self.kl_coef * kl
            metrics["kl"] = Average(masked_sum(kl, mask), mask.sum())
        return Loss(averaged_loss(values, batch, totals, average=self.loss_average), metrics)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return mean rewards, mean response length, and the share of responses that ended by themselves."""
        return {"reward": samples.tensor("rewards").mean(), **reward_summary(samples), **response_summary(samples)}

    def check_batch(self, batch: Samples) -> None:
        """Refuse data without a column that a reward function asks for, and fewer samples than mini-batches."""
        if self.training_now:
            check_minibatches(len(batch) * self.sampling.n, self.train_options_of("actor"))
        self._rewards.check_columns([name for name, column in batch.columns.items() if isinstance(column, tuple)])

    @property
    def training_now(self) -> bool:
        """Whether a rollout is made to learn from."""
        return bool(self.trainer.training)
