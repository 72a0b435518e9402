"""Group-relative policy optimisation.

Left out here, because it is the runtime's: micro-batches, backward, clipping of gradients, optimizer steps, layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.averages import LossAverage, averaged_loss
from lightning_realloc.algorithms.calls import compute, train
from lightning_realloc.algorithms.functional import (
    KLEstimator,
    clipped_policy_loss,
    group_advantages,
    kl_estimate,
    masked_sum,
)
from lightning_realloc.algorithms.policy import PolicyModule
from lightning_realloc.algorithms.proximal import (
    RatioTo,
    learns_in_one_step,
    old_logprobs,
    refuse_stale,
    with_proximal_call,
)
from lightning_realloc.algorithms.role import ModelSource, Role
from lightning_realloc.algorithms.rollout import (
    judged_responses,
    response_summary,
    reward_columns,
    reward_summary,
)
from lightning_realloc.algorithms.settings import check_choice, check_minibatches, check_not_negative
from lightning_realloc.algorithms.unjudged import judged_only
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.rewards.functions import RewardFunction, RewardFunctions
from lightning_realloc.runtime.packing import PackedBatch
from lightning_realloc.runtime.samples import Column, Samples
from lightning_realloc.runtime.training import Average, Loss, Totals
from lightning_realloc.tuning.dataflow import ModelFunctionCall


class GRPO(PolicyModule):
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
        ratio_to: ``"behaviour"``: that probability is over the one with which the token was drawn; ``"proximal"``:
            over the trained model's own before the iteration's first step, in one more inference call
            (``actor.infer``) where there are several steps. How the engine rounds then makes no difference.
        normalize_by_std: Divide advantages by the group's standard deviation.
        loss_average: ``"sequence"`` means each response's tokens, then the responses; ``"token"`` means all tokens.
        settings: Of :class:`PolicyModule`: environment, conversation, rollout budget; of :class:`MultiModelModule`:
            learning rate, optimizer, schedule, training options, seed.
    """

    evaluation_calls = ("actor.generate", "judge")
    learns_whole_groups = True
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
        ratio_to: RatioTo = "behaviour",
        normalize_by_std: bool = True,
        loss_average: LossAverage = "sequence",
        **settings: Any,
    ) -> None:
        super().__init__(sampling=sampling or SamplingParams(n=8), evaluation_sampling=evaluation_sampling, **settings)
        if self.sampling.n < 2:
            raise ConfigError(f"sampling.n={self.sampling.n}: a group needs 2 or more responses to compare; set n >= 2")
        if self.sampling.temperature == 0:
            raise ConfigError("sampling.temperature=0 gives every response of a group the same tokens; set it above 0")
        check_choice("kl_estimator", kl_estimator, get_args(KLEstimator))
        check_choice("loss_average", loss_average, get_args(LossAverage))
        check_choice("ratio_to", ratio_to, get_args(RatioTo))
        check_not_negative(kl_coef=kl_coef, clip_low=clip_low, clip_high=clip_high)
        self._rewards = RewardFunctions(reward, weights=reward_weights)
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.ratio_to = ratio_to
        refuse_stale(ratio_to, 0 if self.rollout_budget is None else self.rollout_budget.max_staleness)
        self.normalize_by_std = normalize_by_std
        self.loss_average = loss_average
        self.tokenizer = tokenizer
        self._actor_source = actor
        self._reference_source = reference

    def roles(self) -> tuple[Role, ...]:
        """Return the actor and, where its divergence counts, the reference."""
        actor = Role(name="actor", source=self._actor_source, trained=True, peft=self.peft_of("actor"))
        return (actor, self.reference_of(actor, self._reference_source)) if self.kl_coef else (actor,)

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Score the actor's own tokens before it learns, where ratios need that."""
        calls = super().calls()
        scores = self.ratio_to == "proximal" and not learns_in_one_step(self.train_options_of("actor"))
        return with_proximal_call(calls, method="score_actor") if scores else calls

    def score_actor(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the actor's own, before it learns; a call where ``ratio_to="proximal"`` needs one."""
        return self._logprobs(actor, batch)

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
        logprobs = self._logprobs(actor, batch)
        one_step = learns_in_one_step(self.train_options_of("actor"))
        before = old_logprobs(logprobs, batch, ratio_to=self.ratio_to, one_step=one_step)
        batch = judged_only(batch, "advantages")
        advantages = batch.per_token(batch["advantages"])
        mask = batch.response_mask
        surrogate = clipped_policy_loss(logprobs, before, advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        values = surrogate.values
        metrics = {"clip_fraction": Average(masked_sum(surrogate.clipped.float(), mask), mask.sum())}
        if self.kl_coef:
            kl = kl_estimate(logprobs, batch["ref_logprobs"], estimator=self.kl_estimator)
            values = values + self.kl_coef * kl
            metrics["kl"] = Average(masked_sum(kl, mask), mask.sum())
        return Loss(averaged_loss(values, batch, totals, average=self.loss_average), metrics)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return mean rewards, mean response length, and the share of responses that ended by themselves."""
        return {"reward": samples.tensor("rewards").nanmean(), **reward_summary(samples), **response_summary(samples)}

    def check_batch(self, batch: Samples) -> None:
        """Refuse data without a column that a reward function asks for, and fewer samples than mini-batches."""
        if self.training_now:
            check_minibatches(len(batch) * self.sampling.n, self.train_options_of("actor"))
            refuse_stale(self.ratio_to, self._strategy.max_staleness)
        self._rewards.check_columns([name for name, column in batch.columns.items() if isinstance(column, tuple)])
