"""Base of GRPO, RLOO, REINFORCE++ and ReMax: everything but the step from rewards to advantages."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.missing_rewards import drop_unscored, estimate_scored
from lightning_realloc.algorithms.base.rollout_columns import FINISH_REASONS, model_mask
from lightning_realloc.algorithms.losses.correction import EngineCorrection, engine_defaults, mismatch_metrics
from lightning_realloc.algorithms.losses.functional import (
    ClippedLoss,
    KLEstimator,
    generalized_advantages,
    kept_tokens,
    kl_estimate,
    sequence_sums,
    spread_tokens,
    token_rewards,
    whiten,
)
from lightning_realloc.algorithms.losses.loss_options import KLOptions, KLPlace
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage, token_metrics
from lightning_realloc.algorithms.losses.policy_losses import (
    PolicyLoss,
    PolicyLossName,
    RatioLevel,
    log_ratios,
    resolve_policy_loss,
)
from lightning_realloc.algorithms.losses.proximal import (
    RatioTo,
    learns_in_one_step,
    old_logprobs,
    refuse_stale,
    with_proximal_call,
)
from lightning_realloc.algorithms.rollout.dynamic_sampling import DynamicSampling, Refill, differing
from lightning_realloc.algorithms.rollout.learning_signal import SignalWatch, signal_summary
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import RewardedModule, RewardedSettings
from lightning_realloc.algorithms.settings import Unpack, check_choice, check_not_negative, check_type, given
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Average, Loss, Totals
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

_CHECKPOINT_KEY = "dynamic_sampling"


class PolicyGradientSettings(RewardedSettings, total=False):
    """Types of the settings that subclasses pass on to :class:`PolicyGradient`, where they are documented.

    Each algorithm declares ``sampling``, ``kl_coef``, ``kl_estimator``, ``kl_place``, ``ratio_level`` and
    ``loss_average`` itself, with its own defaults. All other settings of :class:`PolicyGradient` belong here.
    """

    policy_loss: PolicyLoss | PolicyLossName
    ratio_to: RatioTo | None
    engine_correction: EngineCorrection | None
    entropy_coef: float
    learn_truncated: bool
    dynamic_sampling: DynamicSampling | None
    kl: KLOptions | None


class PolicyGradient(RewardedModule):
    """A RewardedModule whose actor learns from the advantage of each response over a baseline.

    A subclass computes the advantages in :meth:`advantages`.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Reward functions, reward models, or a list of either; see :class:`RewardedModule`.
        sampling: Sampling of the rollout.
        kl_coef: Weight of the divergence; 0 leaves the reference out.
        kl_estimator: k1, k2 or k3, in the loss.
        kl_place: ``"loss"`` adds the divergence to every token's loss; ``"reward"`` subtracts it (k1) from rewards.
        policy_loss: Loss of tokens: a value, such as ``Clip(low=0.2, high=0.28)``, or the name of one with its default
            constants, from the table in docs/policy-loss.md.
        ratio_level: Probability ratio of a ``"token"``, a ``"sequence"`` (geometric mean), or their ``"product"``.
        ratio_to: Denominator of ratios: ``"behaviour"``: the probability at the rollout; ``"proximal"``: the trained
            model's before its first step, by a call ``actor.infer`` if there are several steps. None: the first; with
            ``engine="vllm"`` the second.
        engine_correction: Importance weights for the engine, with ``ratio_to="proximal"``. None: no weights; with
            ``engine="vllm"`` those of ``EngineCorrection()``.
        loss_average: Mean over each ``"sequence"`` and then over these, or over every ``"token"``; ``"constant"``:
            sums over ``sampling.max_new_tokens``; ``"sum"``: sums of responses.
        entropy_coef: Weight of the entropy.
        learn_truncated: Whether to learn from responses that were cut off.
        dynamic_sampling: Replace groups of equal rewards by further prompts.
        kl: Group of the settings ``kl_*``; its fields take precedence.
        settings: Settings of :class:`RewardedModule` (reward weights, reference), :class:`PolicyModule` (evaluation,
            environment, rollout budget) and :class:`MultiModelModule` (learning rate, optimizer, schedule, tokenizer,
            training options, seed).
    """

    excluded_by = ("advantages",)

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource,
        *,
        sampling: SamplingParams,
        kl_coef: float = 0.04,
        kl_estimator: KLEstimator = "k3",
        kl_place: KLPlace = "loss",
        policy_loss: PolicyLoss | PolicyLossName = "clip",
        ratio_level: RatioLevel = "token",
        ratio_to: RatioTo | None = None,
        engine_correction: EngineCorrection | None = None,
        loss_average: LossAverage = "sequence",
        entropy_coef: float = 0.0,
        learn_truncated: bool = True,
        dynamic_sampling: DynamicSampling | None = None,
        kl: KLOptions | None = None,
        **settings: Unpack[RewardedSettings],
    ) -> None:
        super().__init__(actor, reward, sampling=sampling, **settings)
        check_type(KLOptions, kl=kl)
        divergence = kl or KLOptions()
        self.kl_coef = given(divergence.coef, kl_coef)
        self.kl_estimator = given(divergence.estimator, kl_estimator)
        self.kl_place = given(divergence.place, kl_place)
        self.policy_loss = resolve_policy_loss(policy_loss)
        self.ratio_level = ratio_level
        self.ratio_to, self.engine_correction = engine_defaults(
            ratio_to,
            engine_correction,
            is_other_engine="same_logprobs" not in CAPABILITIES[self.engine] and not self.policy_loss.weighs_responses,
        )
        self.loss_average = loss_average
        self.entropy_coef = entropy_coef
        check_type(bool, learn_truncated=learn_truncated)
        self.learn_truncated = learn_truncated
        self._refill = None if dynamic_sampling is None else Refill(dynamic_sampling, group_size=self.sampling.n)
        self._signal = SignalWatch()
        self._check_divergence(divergence)
        self._check_loss()

    def _check_divergence(self, given_options: KLOptions) -> None:
        check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        check_choice("kl_place", self.kl_place, get_args(KLPlace))
        check_not_negative(kl_coef=self.kl_coef)
        for name in ("target", "gain"):
            if (value := getattr(given_options, name)) is not None:
                raise ConfigError(
                    f"kl=KLOptions({name}={value}) steers the coefficient of PPO; {type(self).__name__} keeps "
                    f"kl_coef={self.kl_coef}: leave {name} out"
                )

    def _check_loss(self) -> None:
        check_choice("loss_average", self.loss_average, get_args(LossAverage))
        check_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        check_choice("ratio_to", self.ratio_to, get_args(RatioTo))
        check_not_negative(entropy_coef=self.entropy_coef)
        if self.ratio_to == "proximal" and self.rollout_budget is not None:
            raise ConfigError(
                f"ratio_to='proximal' leaves out what was learnt since a token was drawn, and {self.rollout_budget} "
                f"goes on with responses of older weights; use ratio_to='behaviour', or leave rollout_budget out"
            )
        loss = self.policy_loss
        if self.engine_correction is not None and (self.ratio_to == "behaviour" or loss.weighs_responses):
            raise ConfigError(
                f"engine_correction with ratio_to={self.ratio_to!r} and policy_loss={loss}: ratios to the behaviour "
                f"hold what it corrects already, and Vespo's weights take them; use ratio_to='proximal' and another "
                f"loss, or leave engine_correction out"
            )
        if loss.weighs_responses and self.ratio_level != "token":
            raise ConfigError(
                f"policy_loss={loss} weighs whole responses by itself; set ratio_level='token' in place of "
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
    def chooses(self) -> bool:
        """Whether dynamic sampling replaces groups."""
        return self._refill is not None

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, with ``actor.infer`` for proximal ratios, and without unused needs."""
        unneeded = "compare" if self.kl_place == "loss" else "actor.train"
        calls = tuple(
            replace(call, needs=tuple(name for name in call.needs if name != "ref_logprobs"))
            if call.name == unneeded
            else call
            for call in super().calls()
        )
        scores = self.ratio_to == "proximal" and not self._one_step
        return with_proximal_call(calls, method="score_actor") if scores else calls

    def score_actor(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the actor's log-probabilities before its first step, for ``ratio_to="proximal"``."""
        return self._logprobs(actor, batch)

    # ---- from rewards to advantages
    @compute(needs=("rollout", "rewards", "ref_logprobs"), produces="advantages")
    def compare(self, samples: Samples) -> Mapping[str, Column]:
        """Return the advantage of every response."""
        rewards, columns = samples.tensor("rewards"), {}
        if self.has_reference and self.kl_place == "reward":
            columns["kl_k1"] = sequence_sums(self.divergences(samples))
            rewards = rewards - self.kl_coef * columns["kl_k1"].to(rewards)
        advantages = require_shape("advantages()", self.advantages(rewards, samples), rewards, "response")
        advantages = advantages.masked_fill(self.left_out(samples), torch.nan)
        # A divergence that is not finite must not look like a missing reward; see never_missing.
        broken = ~rewards.isfinite() & ~samples.tensor("rewards").isnan()
        return {"advantages": advantages.masked_fill(broken, torch.inf), **columns}

    def advantages(self, rewards: Tensor, samples: Samples) -> Tensor:
        """Return the (B,) advantages of the (B,) rewards; NaN excludes a response."""
        raise NotImplementedError(f"{type(self).__name__} must define advantages(rewards, samples)")

    def token_returns(self, samples: Samples, compared: Tensor, *, discount: float) -> tuple[Ragged, dict[str, Column]]:
        """Return the return of each token that the model sampled, and each response's divergence as a penalty.

        ``compared`` (B,) is a reward at the last token; with ``kl_place="reward"`` the divergence is a penalty at every
        token. A token is not credited with the divergence of earlier tokens, which it cannot affect.
        """
        kept = kept_tokens(samples.ragged("behaviour_logprobs"), model_mask(samples))
        penalties = Ragged(torch.zeros_like(kept.values), kept.lengths)
        columns: dict[str, Column] = {}
        if self.has_reference and self.kl_place == "reward":
            penalties = self.divergences(samples)
            columns["kl_k1"] = sequence_sums(penalties)
            penalties = Ragged(self.kl_coef * penalties.values, penalties.lengths)
        rewards = token_rewards(compared, penalties)
        # Without a critic, values are zero and advantages are the returns.
        nothing = Ragged(torch.zeros_like(rewards.values), rewards.lengths)
        return generalized_advantages(rewards, nothing, discount=discount, gae_lambda=1.0), columns

    def token_advantages(
        self, samples: Samples, compared: Tensor, *, discount: float = 1.0, normalize: bool = False
    ) -> dict[str, Column]:
        """Return the columns of :meth:`token_returns`, as ``advantages`` of every response token.

        Responses with NaN in ``compared`` (B,) and truncated ones that are not trained on get NaN. ``normalize`` gives
        the others mean 0 and deviation 1 over all tokens.
        """
        compared = compared.masked_fill(self.left_out(samples), torch.nan)

        def estimate(scored: Samples) -> dict[str, Column]:
            returns, columns = self.token_returns(scored, scored.tensor("compared"), discount=discount)
            values = whiten(returns.values) if normalize else returns.values
            return {"advantages": spread_tokens(Ragged(values, returns.lengths), model_mask(scored)), **columns}

        return estimate_scored(samples.with_columns(compared=compared), compared, estimate)

    def divergences(self, samples: Samples) -> Ragged:
        """Return k1 from the sampling policy to the reference, for each token that the model sampled."""
        mask = model_mask(samples)
        behaviour = kept_tokens(samples.ragged("behaviour_logprobs"), mask)
        reference = kept_tokens(samples.ragged("ref_logprobs"), mask).values.to(behaviour.values)
        return Ragged(kl_estimate(behaviour.values, reference, estimator="k1"), behaviour.lengths)

    def left_out(self, samples: Samples) -> Tensor:
        """Return (B,) bool: True for truncated responses that are not trained on."""
        reasons = samples.tensor("finish_reason") if "finish_reason" in samples else torch.zeros(len(samples))
        return (reasons == FINISH_REASONS.index("length")) & (not self.learn_truncated)

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
        statistics = token_logprobs(
            actor, batch, temperature=self.sampling.temperature, with_entropy=self.entropy_coef > 0, only_responses=True
        )
        logprobs = statistics.logprobs
        before = old_logprobs(logprobs, batch, ratio_to=self.ratio_to, one_step=self._one_step)
        batch = drop_unscored(batch, "advantages")
        advantages, mask = of_tokens(batch["advantages"], batch), batch.response_mask
        loss = self.token_losses(logprobs, before, advantages, batch)
        if not isinstance(loss, ClippedLoss):
            raise PlanError(
                f"token_losses() must return a ClippedLoss of losses and a mask of clipped tokens; it returned a "
                f"{type(loss).__name__}: write ClippedLoss(losses, torch.zeros_like(losses, dtype=torch.bool)) if "
                f"nothing is clipped"
            )
        values = require_shape("token_losses()", loss.values, logprobs, "token")
        measured = {"clip_fraction": loss.clipped.float()}
        metrics: dict[str, Average] = {}
        if self.ratio_to == "proximal":
            metrics = mismatch_metrics(before, batch["behaviour_logprobs"], batch)
        if self.engine_correction is not None:
            weights = self.engine_correction.weights(before, batch["behaviour_logprobs"], batch)
            values, measured["engine_weight"] = values * weights, weights
        if self.has_reference and self.kl_place == "loss":
            measured["kl"] = kl_estimate(logprobs, batch["ref_logprobs"], estimator=self.kl_estimator)
            values = values + self.kl_coef * measured["kl"]
            measured |= self.start_metrics(batch)
        measured["entropy"] = -logprobs.detach()  # its mean over sampled tokens estimates the entropy at no cost
        if statistics.entropy is not None:
            measured["entropy"] = statistics.entropy
            values = values - self.entropy_coef * statistics.entropy
        return Loss(self.average_loss(values, batch, totals), metrics | token_metrics(measured, mask))

    def token_losses(self, logprobs: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the (N,) losses of tokens. A subclass overrides this for a formula of its own.

        Args:
            logprobs: (N,) current log-probabilities.
            before: (N,) log-probabilities in the denominator of ratios.
            advantages: (N,) advantage of each token.
            batch: The micro-batch; values outside its ``response_mask`` are ignored.
        """
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

    def check_batch(self, batch: Samples) -> None:
        """Raise also for proximal ratios of responses from older weights."""
        super().check_batch(batch)
        if self.training_now:
            is_corrected = self.engine_correction is not None
            refuse_stale(self.ratio_to, self._strategy.max_staleness, is_corrected=is_corrected)

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

    @property
    def _one_step(self) -> bool:
        return learns_in_one_step(self.train_options_of("actor"))


def of_tokens(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the (N,) values of tokens, from values per token or per response."""
    return values if values.shape[0] == batch.num_tokens else batch.per_token(values)


def require_shape(method: str, made: object, like: Tensor, unit: str) -> Tensor:
    """Return the values that a subclass's method made; PlanError unless there is one for each of ``like``."""
    if not isinstance(made, Tensor) or made.shape != like.shape:
        found = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise PlanError(f"{method} must return one value per {unit}, of shape {tuple(like.shape)}; it returned {found}")
    return made
