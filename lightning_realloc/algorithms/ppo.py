"""Proximal policy optimization with a critic: an actor, a critic, a reference and a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import compute, infer, train
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.missing_rewards import drop_unscored, estimate_scored
from lightning_realloc.algorithms.base.optimizers import with_learning_rate
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import (
    num_model_tokens,
    response_summary,
    reward_columns,
    reward_summary,
    without_failed,
)
from lightning_realloc.algorithms.losses.controllers import KLController, RunningMoments
from lightning_realloc.algorithms.losses.correction import too_old
from lightning_realloc.algorithms.losses.functional import clipped_value_loss, kl_estimate
from lightning_realloc.algorithms.losses.kl import KL, resolve_kl
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage, token_metrics
from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss, PolicyLossName
from lightning_realloc.algorithms.rollout.learning_signal import SignalWatch, signal_summary
from lightning_realloc.algorithms.rollout.response_parts import without_unlearned
from lightning_realloc.algorithms.rollout.reward_sources import (
    RewardSource,
    calls_of_further,
    penalize_truncated,
)
from lightning_realloc.algorithms.rollout.surrogate import SurrogateModule, SurrogateSettings
from lightning_realloc.algorithms.rollout.token_advantages import GAE
from lightning_realloc.algorithms.settings import (
    Unpack,
    check_not_negative,
    check_positive,
    check_type,
    given,
)
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Samples
from lightning_realloc.batch.training import Loss, Totals, TrainOptions
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.environments.turns.turn_parser import PARTS, Part
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation import SamplingParams
from lightning_realloc.runtime.parallel.packed_forward import packed_logits

_DEFAULT_KL = KL(0.05, estimator="k3", place="reward")


class PPO(SurrogateModule):
    """Train an actor on rewards, by each token's advantage over a critic's estimate.

    Source: Schulman et al., arXiv:1707.06347; for language models: Ziegler et al., arXiv:1909.08593.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reward: Models that score sequences, functions ``f(prompts, completions, **columns) -> list[float]``, their
            import paths (``package.module:name``), or a list of any of them.
        critic: Token classifier of one label. None: the first reward model with a score for every token; without one
            that reads the actor's tokens, the actor's layers with a new head.
        sampling: Sampling of the rollout.
        kl_coef: Weight of the divergence from the reference; 0 leaves the reference out. None: 0.05.
        kl: Divergence from the reference, with ``place="reward"`` by default; its weight can be steered to a target.
        policy_loss: Loss of the actor's tokens: a value, such as ``Clip(low=0.2, high=0.28)``, or a name.
        value_clip: Distance from the value at the rollout at which a value is clipped; None never clips.
        advantages: From scores to advantages and returns of tokens: discounts, normalization and bounds.
        learned_parts: Parts of responses that the actor learns, of ``"thinking"``, ``"calls"`` (of tools) and
            ``"answer"``; the critic learns all.
        entropy_coef: Weight of the entropy; with ``entropy="adaptive"`` that of the first iteration.
        loss_average: Mean over each ``"sequence"`` and then over these, or over every ``"token"``; ``"constant"``:
            sums over ``sampling.max_new_tokens``; ``"sum"``: sums of responses.
        critic_warmup: Iterations in which the critic learns alone.
        critic_learning_rate: Learning rate of the critic; None: the actor's. See ``optimizers`` for other settings.
        critic_train_options: Epochs, mini-batches, clipping and limits of the critic; None: the actor's without
            ``stop_above``, whose limits are on metrics of the actor's loss.
        settings: Settings of :class:`SurrogateModule` (``ratio_to``, ``correction``, ``entropy``),
            :class:`RewardedModule` (reward weights, reference), :class:`PolicyModule` (evaluation, environment,
            conversation) and :class:`MultiModelModule` (learning rate,
            optimizer, schedule, training options, seed).
    """

    corrects_engines = False
    reward_column = "scores"
    excluded_by = ("advantages", "returns")

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None = None,
        *,
        critic: ModelSource | None = None,
        sampling: SamplingParams | None = None,
        kl_coef: float | None = None,
        kl: KL | None = None,
        policy_loss: PolicyLoss | PolicyLossName = "clip",
        value_clip: float | None = 0.2,
        advantages: GAE | None = None,
        learned_parts: Sequence[Part] = PARTS,
        entropy_coef: float = 0.0,
        loss_average: LossAverage = "token",
        critic_warmup: int = 0,
        critic_learning_rate: float | None = None,
        critic_train_options: TrainOptions | None = None,
        **settings: Unpack[SurrogateSettings],
    ) -> None:
        super().__init__(
            actor,
            reward,
            sampling=sampling or SamplingParams(),
            policy_loss=policy_loss,
            loss_average=loss_average,
            learned_parts=learned_parts,
            entropy_coef=entropy_coef,
            **settings,
        )
        self.role_optimizers = with_learning_rate(self.role_optimizers, "critic", critic_learning_rate)
        self.value_clip = value_clip
        check_type(GAE, advantages=advantages)
        self.advantages = given(advantages, GAE())
        self.critic_warmup = critic_warmup
        self.critic_train_options = critic_train_options or replace(self.train_options, stop_above={})
        self.return_moments = RunningMoments()
        self._signal = SignalWatch()
        self._check_loss()
        self.kl = resolve_kl(kl, kl_coef, _DEFAULT_KL)
        self.kl_controller = KLController(self.kl.weight, target=self.kl.target, gain=self.kl.gain)
        self.sources["critic"] = critic or (self.sources["reward"] if self._judges.reads_actor_tokens else actor)
        if self._judges.is_one_model:
            self.evaluation_calls = ("actor.generate", "reward.infer")

    def _check_loss(self) -> None:
        check_not_negative(critic_warmup=self.critic_warmup)
        check_type(Integral, critic_warmup=self.critic_warmup)
        check_positive(value_clip=self.value_clip)

    @property
    def has_reference(self) -> bool:
        """Whether the algorithm uses a reference."""
        return self.kl.weight > 0

    # ---- models and calls
    def roles(self) -> tuple[Role, ...]:
        """Return the actor and the critic, and the reference and reward models that are in use."""
        actor, *others = super().roles()
        return (actor, self.make_role("critic", trained=True, task="token_classification"), *others)

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls without ``judge`` for a single reward model, and without unused needs of the actor."""
        calls = super().calls()
        if self._judges.is_one_model:
            calls = _scored_by_one_model(calls)
        if self.kl.place == "loss":
            return calls
        return tuple(
            replace(call, needs=tuple(name for name in call.needs if name != "ref_logprobs"))
            if call.name == "actor.train"
            else call
            for call in calls
        )

    @classmethod
    def calls_for(cls, roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls, without ``judge`` for a single reward model."""
        calls = super().calls_for(roles)
        return _scored_by_one_model(calls) if "reward" in roles and not calls_of_further(roles) else calls

    def runs(self, call: str, iteration: int) -> bool:
        """Leave out the actor in the first ``critic_warmup`` iterations."""
        return call != "actor.train" or iteration >= self.critic_warmup

    def train_options_of(self, role: str) -> TrainOptions:
        """Return the critic's options, or the actor's."""
        return self.critic_train_options if role == "critic" else self.train_options

    # ---- the calls
    @compute(needs=("rollout", "reward_scores"), produces="scores")
    def judge(self, samples: Samples) -> Mapping[str, Column]:
        """Return the weighted sum of all rewards of every response."""
        rewards = self._judges.judge(samples, self.tokenizer, ends=self.response_ends())
        return {"scores": rewards.total, **reward_columns(rewards)}

    @infer("critic", needs="rollout", produces="values")
    def expect(self, critic: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the critic's value before every response token."""
        return self._values(critic, batch)

    @compute(
        needs=("rollout", "scores", "values", "ref_logprobs"), produces=("advantages", "returns"), whole_batch=True
    )
    def estimate_advantages(self, samples: Samples) -> Mapping[str, Column]:
        """Return every token's advantage and return, and every sample's reward, divergence and sums of returns.

        With ``normalize_values``, returns are normalized by running moments that include them. All columns are NaN for
        a response without a score.
        """
        penalty = self.kl_controller.coefficient if self.kl.place == "reward" else None
        estimate = partial(
            self.advantages.estimate, moments=self.return_moments, has_reference=self.has_reference,
            penalty=penalty,
        )  # fmt: skip
        known = without_failed(samples, "scores").tensor("scores")  # a single reward model scores all responses
        scores = penalize_truncated(known, samples, self.missing_eos_penalty)
        scores = scores.masked_fill(too_old(samples, self.correction).to(scores.device), torch.nan)
        return without_unlearned(estimate_scored(samples.with_columns(scores=scores), scores, estimate), samples)

    @train("actor", needs=("rollout", "advantages", "ref_logprobs"))
    def actor_loss(self, actor: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return the policy loss, the entropy bonus and, with ``place="loss"``, the divergence penalty."""
        batch, found = self.surrogate(actor, batch, with_entropy=True)
        values = found.values
        if self.has_reference and self.kl.place == "loss":
            kl = self.kl.estimate(found.logprobs, batch["ref_logprobs"])
            values = values + self.kl_controller.coefficient.to(kl) * kl
        now, behaviour = found.logprobs.detach(), batch["behaviour_logprobs"]
        measured = {
            "ratio": (now - behaviour).exp(),
            # From the sampling policy to the trained one: k3 with exchanged arguments.
            "behaviour_kl": kl_estimate(behaviour, now, estimator="k3"),
        }
        metrics = {**found.metrics, **token_metrics(measured, batch.response_mask)}
        return Loss(self.average_loss(values, batch, totals), metrics)

    @train("critic", needs=("rollout", "values", "returns"))
    def critic_loss(self, critic: nn.Module, batch: PackedBatch, totals: Totals) -> Loss:
        """Return the clipped squared error of the values."""
        values = self._values(critic, batch)
        batch = drop_unscored(batch, "returns")
        error = clipped_value_loss(values, batch["values"], batch["returns"], clip=self.value_clip)
        metrics = token_metrics({"clip_fraction": error.clipped.float()}, batch.response_mask)
        return Loss(self.average_loss(error.values, batch, totals), metrics)

    # ---- after an iteration
    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return mean scores, rewards, divergences (nats per response), lengths, and explained variance."""
        scores = without_failed(samples, "scores").tensor("scores")
        summary = {"score": scores.nanmean(), **reward_summary(samples)}
        summary |= signal_summary(scores, None, name="score")
        names = {"reward": "rewards", "kl_k1": "kl_k1", "kl_k3": "kl_k3", "explained_variance": "explained_variance"}
        summary |= {name: samples.tensor(column).nanmean() for name, column in names.items() if column in samples}
        if "kl_k1" in samples:
            summary["kl_coef"] = self.kl_controller.coefficient.float().clone()
        return summary | response_summary(samples)

    def summarize_evaluation(self, samples: Samples) -> dict[str, Tensor]:
        """Return also the mean score as ``reward``, without responses whose environment failed."""
        summary = super().summarize_evaluation(without_failed(samples, "scores"))
        return {"reward": summary["score"], **summary}

    def on_iteration_end(self, samples: Samples) -> None:
        """Update the weight of the divergence, and the running moments of returns; warn of scores without a signal."""
        super().on_iteration_end(samples)
        scores = without_failed(samples, "scores").tensor("scores").cpu()
        judged = ~scores.isnan()
        self._signal.record(samples, scores, has_signal=len(scores[judged].unique()) > 1)
        if not bool(judged.any()):
            return
        if self.has_reference:
            self.kl_controller.update(samples.tensor("kl_k1").nanmean())
        if self.advantages.normalize_values:
            sums = (samples.tensor(name)[judged].sum() for name in ("return_sums", "return_square_sums"))
            self.return_moments.update(num_model_tokens(samples)[judged].sum(), *sums)

    # ---- helpers
    def _values(self, critic: nn.Module, batch: PackedBatch) -> Tensor:
        """Return (N,) the value of the state before each token: the critic's output at the previous token."""
        values = packed_logits(critic, batch)
        if values.shape[1] != 1:
            raise ConfigError(f"critic gives {values.shape[1]} labels for each token; give one with num_labels=1")
        return values[batch.predecessors, 0].float()


def _scored_by_one_model(calls: Sequence[ModelFunctionCall]) -> tuple[ModelFunctionCall, ...]:
    """Return the calls without ``judge``, with the model's scores as the scores."""
    kept = (call for call in calls if call.name != "judge")
    return tuple(replace(call, produces=("scores",)) if call.name == "reward.infer" else call for call in kept)
