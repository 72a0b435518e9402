"""Base of GRPO, RLOO, REINFORCE++ and ReMax, with the settings of all."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.missing_rewards import estimate_scored
from lightning_realloc.algorithms.base.rollout_columns import FINISH_REASONS, model_mask
from lightning_realloc.algorithms.losses.advantages import (
    ADVANTAGES,
    AdvantageRule,
    each_reward_advantages,
    require_shape,
    resolve_advantages,
)
from lightning_realloc.algorithms.losses.correction import Correction, CorrectionName, too_old
from lightning_realloc.algorithms.losses.entropy import EntropyName, EntropyRule
from lightning_realloc.algorithms.losses.functional import ClippedLoss, sequence_sums, spread_tokens
from lightning_realloc.algorithms.losses.kl import KL, fixed_kl, resolve_kl
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage, token_metrics
from lightning_realloc.algorithms.losses.policy_losses import (
    PolicyLoss,
    PolicyLossName,
    RatioLevel,
    log_ratios,
)
from lightning_realloc.algorithms.losses.proximal import RatioTo
from lightning_realloc.algorithms.rollout.dynamic_sampling import DynamicSampling, Refill, differing
from lightning_realloc.algorithms.rollout.learning_signal import SignalWatch, signal_summary
from lightning_realloc.algorithms.rollout.response_parts import whiten_learned, without_unlearned
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import RewardedSettings, check_group
from lightning_realloc.algorithms.rollout.surrogate import SurrogateModule
from lightning_realloc.algorithms.rollout.token_advantages import divergences, token_returns
from lightning_realloc.algorithms.settings import Unpack, check_type, given
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Loss, Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.environments.turns.turn_parser import PARTS, Part
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.generation import SamplingParams
from lightning_realloc.rewards.signatures import function_name

_CHECKPOINT_KEY = "dynamic_sampling"
_OR_TOKENS = ", or a Ragged of one per response token"


class PolicyGradientSettings(RewardedSettings, total=False):
    """Types of the settings that subclasses pass on to :class:`PolicyGradient`, where they are documented."""

    sampling: SamplingParams | None
    advantages: str | AdvantageRule | None
    kl_coef: float | None
    kl: KL | None
    policy_loss: PolicyLoss | PolicyLossName
    ratio_level: RatioLevel | None
    ratio_to: RatioTo | None
    correction: Correction | CorrectionName | None
    loss_average: LossAverage | None
    entropy_coef: float
    entropy: EntropyRule | EntropyName | None
    learn_truncated: bool
    learned_parts: Sequence[Part]
    dynamic_sampling: DynamicSampling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDefaults:
    """Values of settings of :class:`PolicyGradient` that are None; they differ between algorithms."""

    kl: KL
    """With weight, estimator and place."""
    sampling: SamplingParams
    advantages: str | None = None
    """Name of the rule; None: a subclass's method."""
    ratio_level: RatioLevel = "token"
    loss_average: LossAverage = "sequence"


class PolicyGradient(SurrogateModule):
    """A SurrogateModule whose actor learns from the advantage of each response over a baseline.

    The advantages are those of the setting ``advantages``, or of a subclass's method :meth:`advantages`.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout; ``n`` is the size of a group. None: the algorithm's default, as for
            ``advantages``, ``kl_coef``, ``kl``, ``ratio_level`` and ``loss_average``.
        advantages: From rewards to advantages: a name, such as ``"group"``, from the table in
            docs/online-algorithms.md; or a function ``f(samples)`` that returns (B,) numbers, or one per response token
            as ``Ragged``; or its import path.
        kl_coef: Weight of the divergence from the reference; 0 leaves the reference out.
        kl: Divergence from the reference: weight, estimator, and whether the loss or the rewards have it.
        policy_loss: Loss of tokens: a value, such as ``Clip(low=0.2, high=0.28)``, or the name of one with its default
            constants, from the table in docs/policy-loss.md.
        ratio_level: Probability ratio of a ``"token"``, a ``"sequence"`` (geometric mean), or their ``"product"``.
        ratio_to: Denominator of ratios: ``"behaviour"``: the probability at the rollout; ``"proximal"``: the trained
            model's before its first step, by a call ``actor.infer`` if there are several steps. None: the first; with
            a ``correction`` or ``engine="vllm"`` the second.
        correction: Weights and exclusion of tokens for what proximal ratios leave out: a name from the table in
            docs/policy-loss.md, such as ``"token-truncate"``, or a value, such as ``Correction(cap=3.0)``. None: none;
            with ``engine="vllm"`` ``"token-truncate"``.
        loss_average: Mean over each ``"sequence"`` and then over these, or over every ``"token"``; ``"constant"``:
            sums over ``sampling.max_new_tokens``; ``"sum"``: sums of responses.
        entropy_coef: Weight of the entropy; with ``entropy="adaptive"`` that of the first iteration.
        entropy: Rule that keeps the entropy up: a name from the table in docs/policy-loss.md, such as ``"adaptive"``,
            or a value, such as ``TopShare(share=0.2)``.
        learn_truncated: Whether to learn from responses that were cut off.
        learned_parts: Parts of responses that are learned, of ``"thinking"``, ``"calls"`` (of tools) and ``"answer"``.
        dynamic_sampling: Replace groups of equal rewards by further prompts.
        settings: Settings of :class:`RewardedModule` (reward weights, reference), :class:`PolicyModule` (evaluation,
            environment, conversation) and :class:`MultiModelModule` (learning rate, optimizer, schedule, tokenizer,
            training options, seed).
    """

    excluded_by = ("advantages",)
    defaults = PolicyDefaults(kl=KL(0.04, estimator="k3", place="loss"), sampling=SamplingParams())

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None = None,
        *,
        sampling: SamplingParams | None = None,
        advantages: str | AdvantageRule | None = None,
        kl_coef: float | None = None,
        kl: KL | None = None,
        policy_loss: PolicyLoss | PolicyLossName = "clip",
        ratio_level: RatioLevel | None = None,
        ratio_to: RatioTo | None = None,
        correction: Correction | CorrectionName | None = None,
        loss_average: LossAverage | None = None,
        entropy_coef: float = 0.0,
        entropy: EntropyRule | EntropyName | None = None,
        learn_truncated: bool = True,
        learned_parts: Sequence[Part] = PARTS,
        dynamic_sampling: DynamicSampling | None = None,
        **settings: Unpack[RewardedSettings],
    ) -> None:
        defaults = self.defaults
        super().__init__(
            actor,
            reward,
            sampling=given(sampling, defaults.sampling),
            policy_loss=policy_loss,
            loss_average=given(loss_average, defaults.loss_average),
            learned_parts=learned_parts,
            ratio_to=ratio_to,
            correction=correction,
            entropy_coef=entropy_coef,
            entropy=entropy,
            **settings,
        )
        self.kl = resolve_kl(fixed_kl(kl), kl_coef, defaults.kl)
        self.ratio_level = given(ratio_level, defaults.ratio_level)
        check_type(bool, learn_truncated=learn_truncated)
        check_type(DynamicSampling, dynamic_sampling=dynamic_sampling)
        self.learn_truncated = learn_truncated
        self._refill = None if dynamic_sampling is None else Refill(dynamic_sampling, group_size=self.sampling.n)
        self._signal = SignalWatch()
        self._standardizes_batch = given(advantages, defaults.advantages) == "group_each"
        """Whether advantages are standardized over the batch, and so need all of it."""
        self._rule = self._advantage_rule(advantages)
        self._check_loss()

    def _advantage_rule(self, setting: str | AdvantageRule | None) -> AdvantageRule | None:
        """Return the rule of the setting ``advantages``, or of the defaults."""
        if setting is not None and type(self).advantages is not PolicyGradient.advantages:
            raise ConfigError(
                f"advantages={setting!r} would replace the rule of {type(self).__name__}; leave it out, or use "
                f"PolicyGradient(..., advantages=...)"
            )
        chosen = given(setting, self.defaults.advantages)
        if isinstance(chosen, str) and chosen in ADVANTAGES:
            check_group(self.sampling.n)
        if self._standardizes_batch:
            return partial(each_reward_advantages, weights=self._judges.weights)
        return None if chosen is None else resolve_advantages(chosen)

    def _check_loss(self) -> None:
        require_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        if self.policy_loss.weighs_responses and self.ratio_level != "token":
            raise ConfigError(
                f"policy_loss={self.policy_loss} weighs whole responses by itself; set ratio_level='token' in place of "
                f"{self.ratio_level!r}"
            )

    def setup(self, stage: str) -> None:
        """Discard groups that wait since an earlier fit."""
        super().setup(stage)
        if stage == "fit" and self._refill is not None:
            self._refill.forget()

    @property
    def has_reference(self) -> bool:
        """Whether the algorithm uses a reference."""
        return self.kl_coef > 0

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference."""
        return self.kl.weight

    @property
    def learns_whole_groups(self) -> bool:
        """Whether advantages compare the responses to a prompt."""
        return self._rule is not None

    @property
    def chooses(self) -> bool:
        """Whether dynamic sampling replaces groups."""
        return self._refill is not None

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls without unused needs; advantages that are standardized over the batch need all of it."""
        unneeded = "compare" if self.kl.place == "loss" else "actor.train"
        return tuple(
            replace(
                call,
                needs=tuple(name for name in call.needs if call.name != unneeded or name != "ref_logprobs"),
                whole_batch=call.whole_batch or (self._standardizes_batch and call.name == "compare"),
            )
            for call in super().calls()
        )

    # ---- from rewards to advantages
    @property
    def _penalty(self) -> float | None:
        """Reduction of rewards per nat of divergence; None if they have none."""
        return self.kl_coef if self.has_reference and self.kl.place == "reward" else None

    @compute(needs=("rollout", "rewards", "ref_logprobs"), produces="advantages")
    def compare(self, samples: Samples) -> Mapping[str, Column]:
        """Return the advantage of every response."""
        rewards, columns = samples.tensor("rewards"), {}
        if self._penalty is not None:
            columns["kl_k1"] = sequence_sums(divergences(samples))
            rewards = rewards - self._penalty * columns["kl_k1"].to(rewards)
        advantages = self.advantages(rewards, samples)
        # A divergence that is not finite must not look like a missing reward; see never_missing.
        broken = ~rewards.isfinite() & ~samples.tensor("rewards").isnan()
        left_out = self.left_out(samples)
        if isinstance(advantages, Ragged):
            lengths = samples.ragged("response_ids").lengths
            values = require_shape(self._rule_name, advantages.values, rewards.new_empty(int(lengths.sum())), "token")
            left_out, broken = (torch.repeat_interleave(mask, lengths) for mask in (left_out, broken))
        else:
            values = require_shape(self._rule_name, advantages, rewards, "response", _OR_TOKENS)
        values = values.masked_fill(left_out, torch.nan).masked_fill(broken, torch.inf)
        found = Ragged(values, lengths) if isinstance(advantages, Ragged) else values
        return without_unlearned({"advantages": found, **columns}, samples)

    @property
    def _rule_name(self) -> str:
        """Method or function that makes advantages, for messages."""
        own = type(self).advantages is not PolicyGradient.advantages
        return "advantages()" if own or self._rule is None else f"advantages={function_name(self._rule)}"

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor | Ragged:
        """Return the (B,) advantages of the (B,) rewards, or one per response token; NaN excludes a response."""
        if self._rule is None:
            raise NotImplementedError(
                f"{type(self).__name__} must define advantages(rewards, samples), or get a rule as advantages="
            )
        found: Tensor | Ragged = self._rule(samples.with_columns(rewards=rewards))
        return found

    def token_advantages(
        self, samples: Samples, compared: Tensor, *, discount: float = 1.0, normalize: bool = False
    ) -> dict[str, Column]:
        """Return the columns of :func:`token_returns`, as ``advantages`` of every response token.

        Responses with NaN in ``compared`` (B,) and truncated ones that are not trained on get NaN. ``normalize`` gives
        the others mean 0 and deviation 1 over all tokens.
        """
        compared = compared.masked_fill(self.left_out(samples), torch.nan)

        def estimate(scored: Samples) -> dict[str, Column]:
            given = scored.tensor("compared")
            returns, columns = token_returns(scored, given, discount=discount, penalty=self._penalty)
            values = whiten_learned(returns.values, scored) if normalize else returns.values
            return {"advantages": spread_tokens(Ragged(values, returns.lengths), model_mask(scored)), **columns}

        return without_unlearned(estimate_scored(samples.with_columns(compared=compared), compared, estimate), samples)

    def left_out(self, samples: Samples) -> Tensor:
        """Return (B,) bool: True for responses that are not trained on: truncated ones, and too old ones."""
        reasons = samples.tensor("finish_reason") if "finish_reason" in samples else torch.zeros(len(samples))
        truncated = (reasons == FINISH_REASONS.index("length")) & (not self.learn_truncated)
        return truncated | too_old(samples, self.correction)

    def choose(self, samples: Samples) -> Samples | None:
        """Return groups with different rewards, once there are enough."""
        assert self._refill is not None, "nothing is chosen without dynamic_sampling"
        chosen = self._refill.add(samples, num_minibatches=self.train_options_of("actor").num_minibatches)
        self.log_dict(self._refill.metrics, batch_size=1)
        return chosen

    # ---- loss
    @train("actor", needs=("rollout", "advantages", "ref_logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return one micro-batch's policy loss, divergence penalty and entropy bonus."""
        batch, found = self.surrogate(actor, batch, with_entropy=False)
        values, metrics = found.values, found.metrics
        if self.has_reference and self.kl.place == "loss":
            kl = self.kl.estimate(found.logprobs, batch["ref_logprobs"])
            values = values + self.kl_coef * kl
            metrics = {**metrics, **token_metrics({"kl": kl, **self.start_metrics(batch)}, batch.response_mask)}
        return Loss(self.average_loss(values, batch, totals), metrics)

    def token_losses(self, logprobs: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the (N,) losses of tokens, with ratios at ``ratio_level``; see :class:`SurrogateModule`."""
        ratios = log_ratios(logprobs - before, batch, level=self.ratio_level)
        return self.policy_loss(logprobs, ratios, advantages, batch)

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return also the spread of rewards, and the divergence in nats per response, if it is a penalty."""
        spread = signal_summary(samples.tensor("rewards"), samples.tensor("prompt_id"), name="reward")
        divergence = {"kl_k1": samples.tensor("kl_k1").nanmean()} if "kl_k1" in samples else {}
        return super().summarize(samples) | spread | divergence

    def has_signal(self, samples: Samples) -> bool:
        """Return whether rewards differ where the algorithm compares them: in a group, or in the batch."""
        groups = samples.tensor("prompt_id")
        whole = groups if self.learns_whole_groups else torch.zeros_like(groups)
        return bool(differing(samples.tensor("rewards"), whole).any())

    def on_iteration_end(self, samples: Samples) -> None:
        """Warn also if rewards give no signal for several iterations."""
        super().on_iteration_end(samples)
        self._signal.record(samples, samples.tensor("rewards"), has_signal=self.has_signal(samples))

    def on_save_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Save also groups that wait for others."""
        super().on_save_checkpoint(checkpoint)
        if self._refill is not None:
            checkpoint[_CHECKPOINT_KEY] = self._refill.state()

    def on_load_checkpoint(self, checkpoint: MutableMapping[str, Any]) -> None:
        """Restore also groups that wait for others."""
        super().on_load_checkpoint(checkpoint)
        if self._refill is not None and _CHECKPOINT_KEY in checkpoint:
            self._refill.load(checkpoint[_CHECKPOINT_KEY])
