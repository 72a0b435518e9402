"""Base of algorithms whose actor learns by probability ratios: GRPO and its relatives, and PPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.missing_rewards import drop_unscored, of_tokens
from lightning_realloc.algorithms.base.rollout_columns import model_mask, num_model_tokens
from lightning_realloc.algorithms.losses.advantages import require_shape
from lightning_realloc.algorithms.losses.correction import (
    Correction,
    CorrectionName,
    corrected_loss,
    refuse_stale,
    resolve_ratios,
)
from lightning_realloc.algorithms.losses.entropy import (
    AdaptiveEntropy,
    EntropyName,
    EntropyRule,
    EntropyWeight,
    MarkingRule,
    resolve_entropy,
)
from lightning_realloc.algorithms.losses.functional import ClippedLoss, kept_tokens, sequence_sums
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage, token_metrics
from lightning_realloc.algorithms.losses.policy_losses import PolicyLoss, PolicyLossName, resolve_policy_loss
from lightning_realloc.algorithms.losses.proximal import (
    PROXIMAL_LOGPROBS,
    RatioTo,
    learns_in_one_step,
    old_logprobs,
)
from lightning_realloc.algorithms.rollout.response_parts import checked_parts
from lightning_realloc.algorithms.rollout.reward_sources import RewardSource
from lightning_realloc.algorithms.rollout.rewarded import RewardedModule, RewardedSettings
from lightning_realloc.algorithms.settings import Unpack
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.batch.training import Average
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.environments.turns.turn_parser import Part
from lightning_realloc.errors import PlanError, require_choice
from lightning_realloc.generation import SamplingParams
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

MARKED_TOKENS = "marked_tokens"
ENTROPIES = "entropies"
NATS = "drawn_nats"
"""Column (B,) of minus the log-probabilities of the tokens that the model drew, summed."""


class SurrogateSettings(RewardedSettings, total=False):
    """Types of the settings that subclasses pass on to :class:`SurrogateModule`, where they are documented."""

    ratio_to: RatioTo | None
    correction: Correction | CorrectionName | None
    entropy: EntropyRule | EntropyName | None


class SurrogateModule(RewardedModule):
    """A RewardedModule whose actor learns from advantages times probability ratios.

    A subclass has calls that produce ``advantages`` and a loss that begins with :meth:`surrogate`.

    Args:
        actor: The policy.
        reward: Reward functions, reward models, or a list of either.
        sampling: Sampling of the rollout.
        policy_loss: Loss of tokens: a value or a name.
        loss_average: Average of token losses.
        learned_parts: Parts of responses that are learned.
        entropy_coef: Weight of the entropy; with an adaptive rule that of the first iteration.
        ratio_to: Denominator of ratios: ``"behaviour"``: the probability at the rollout; ``"proximal"``: the trained
            model's before its first step, by a call ``actor.infer`` if there are several steps. None: the first; with
            a ``correction`` the second.
        correction: Weights and exclusion of tokens for what proximal ratios leave out: a name from the table in
            docs/policy-loss.md, such as ``"token-truncate"``, or a value. None: none.
        entropy: Rule that keeps the entropy up: a name from the table in docs/policy-loss.md, or a value.
        settings: Settings of :class:`RewardedModule`.
    """

    corrects_engines: ClassVar[bool] = True
    """Whether ratios are proximal, with a correction, by default for an engine with kernels of its own."""

    def __init__(
        self,
        actor: ModelSource,
        reward: RewardSource | None,
        *,
        sampling: SamplingParams,
        policy_loss: PolicyLoss | PolicyLossName,
        loss_average: LossAverage,
        learned_parts: Sequence[Part],
        entropy_coef: float,
        ratio_to: RatioTo | None = None,
        correction: Correction | CorrectionName | None = None,
        entropy: EntropyRule | EntropyName | None = None,
        **settings: Unpack[RewardedSettings],
    ) -> None:
        super().__init__(actor, reward, sampling=sampling, **settings)
        self.policy_loss = resolve_policy_loss(policy_loss)
        require_choice("loss_average", loss_average, get_args(LossAverage))
        self.loss_average = loss_average
        self.learned_parts = checked_parts(learned_parts)
        is_other_engine = self.corrects_engines and "same_logprobs" not in CAPABILITIES[self.engine]
        self.ratio_to, self.correction = resolve_ratios(
            ratio_to, correction, self.policy_loss, is_other_engine=is_other_engine
        )
        if (budget := self.generation_options.rollout_budget) is not None:
            refuse_stale(self.ratio_to, self.correction, f"{budget} goes on with responses of older weights")
        self.entropy = resolve_entropy(entropy, entropy_coef)
        self.entropy_coef = entropy_coef
        adaptive = self.entropy if isinstance(self.entropy, AdaptiveEntropy) else None
        self.entropy_weight = None if adaptive is None else EntropyWeight(entropy_coef, adaptive)
        """The weight of the entropy where it changes, in checkpoints; None: it is ``entropy_coef``."""

    # ---- calls
    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return also the call ``actor.infer`` for proximal ratios and entropies, and that of the rule for entropy."""
        scores, read = self._scores, [name for name in self._scores if name != ENTROPIES]
        added = []
        if scores:
            added.append(ModelFunctionCall("actor.infer", "infer", "actor", "score_actor", ("rollout",), scores))
        if isinstance(self.entropy, MarkingRule):
            read.append(MARKED_TOKENS)
            needs = ("rollout", "advantages", *(name for name in scores if name == ENTROPIES))
            added.append(_computation("mark_tokens", needs, MARKED_TOKENS, whole_batch=True))
        elif self.entropy is not None:
            read.append(NATS)  # so that it is measured before the step
            added.append(_computation("measure_entropy", ("rollout",), NATS))
        calls = (
            replace(call, needs=(*call.needs, *read)) if call.name == "actor.train" else call
            for call in super().calls()
        )
        return (*calls, *added)

    @property
    def _scores(self) -> tuple[str, ...]:
        """Columns that ``actor.infer`` makes."""
        is_needed = {
            PROXIMAL_LOGPROBS: self.ratio_to == "proximal" and not self._one_step,
            ENTROPIES: self.entropy is not None and self.entropy.reads_entropies,
        }
        return tuple(name for name, needed in is_needed.items() if needed)

    @property
    def _one_step(self) -> bool:
        return learns_in_one_step(self.train_options_of("actor"))

    def score_actor(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the actor's (N,) log-probabilities before its first step, its (N,) entropies, or both as (N, 2)."""
        found = token_logprobs(
            actor,
            batch,
            temperature=self.sampling.temperature,
            with_entropy=ENTROPIES in self._scores,
            only_responses=True,
        )
        by_name = {PROXIMAL_LOGPROBS: found.logprobs, ENTROPIES: found.entropy}
        columns = [value for name in self._scores if (value := by_name[name]) is not None]
        return columns[0] if len(columns) == 1 else torch.stack(columns, dim=-1)

    def measure_entropy(self, samples: Samples) -> Mapping[str, Column]:
        """Return minus the sum of the log-probabilities of each response's drawn tokens, to estimate the entropy by."""
        return {NATS: -sequence_sums(kept_tokens(samples.ragged("behaviour_logprobs"), model_mask(samples)))}

    def mark_tokens(self, samples: Samples) -> Mapping[str, Column]:
        """Return the tokens that the rule for the entropy marks, of those that are learned."""
        assert isinstance(self.entropy, MarkingRule), "other rules have no such call"
        drawn, mask, advantages = samples.ragged("behaviour_logprobs"), model_mask(samples), samples["advantages"]
        values = samples.ragged(ENTROPIES) if self.entropy.reads_entropies else drawn
        assert not isinstance(advantages, tuple), "advantages are numbers"
        if isinstance(advantages, Tensor):
            advantages = Ragged(torch.repeat_interleave(advantages, drawn.lengths.to(advantages.device)), drawn.lengths)
        learned = advantages.values.isfinite().cpu()
        if mask is not None:
            learned &= mask.values.cpu()
        marked = torch.zeros_like(learned)
        if bool(learned.any()):
            generator = torch.Generator().manual_seed((self.seed + int(samples.ids.min())) % (1 << 63))
            read, gained = (column.values.cpu()[learned].float() for column in (values, advantages))
            marked[learned] = self.entropy.mark(read, gained, generator)
        return {MARKED_TOKENS: Ragged(marked, drawn.lengths)}

    # ---- loss
    def token_losses(self, logprobs: Tensor, before: Tensor, advantages: Tensor, batch: PackedBatch) -> ClippedLoss:
        """Return the (N,) losses of tokens. A subclass overrides this for a formula of its own.

        Args:
            logprobs: (N,) current log-probabilities.
            before: (N,) log-probabilities in the denominator of ratios.
            advantages: (N,) advantage of each token.
            batch: The micro-batch; values outside its ``response_mask`` are ignored.
        """
        return self.policy_loss(logprobs, logprobs - before, advantages, batch)

    def surrogate(self, actor: nn.Module, batch: PackedBatch, *, with_entropy: bool) -> tuple[PackedBatch, Surrogate]:
        """Return the batch without responses that are not learned, and the tokens' losses with their entropy bonus.

        Args:
            actor: The trained model.
            batch: The micro-batch.
            with_entropy: Whether to compute entropies even if the loss has none.
        """
        weight = self.entropy_coef if self.entropy_weight is None else self.entropy_weight.current
        statistics = token_logprobs(
            actor,
            batch,
            temperature=self.sampling.temperature,
            with_entropy=with_entropy or weight > 0,
            only_responses=True,
        )
        logprobs = statistics.logprobs
        before = old_logprobs(logprobs, batch, ratio_to=self.ratio_to, one_step=self._one_step)
        batch = drop_unscored(batch, "advantages")
        loss = self.token_losses(logprobs, before, of_tokens(batch["advantages"], batch), batch)
        if not isinstance(loss, ClippedLoss):
            raise PlanError(
                f"token_losses() must return a ClippedLoss of losses and a mask of clipped tokens; it returned a "
                f"{type(loss).__name__}: write ClippedLoss(losses, torch.zeros_like(losses, dtype=torch.bool)) if "
                f"nothing is clipped"
            )
        values = require_shape("token_losses()", loss.values, logprobs, "token")
        measured, metrics = {"clip_fraction": loss.clipped.float()}, dict[str, Average]()
        if isinstance(self.entropy, MarkingRule):
            marked = batch[MARKED_TOKENS].bool()
            values = self.entropy.losses(values, marked, logprobs - before)
            measured["marked_tokens"] = marked.float()
        if self.ratio_to == "proximal":
            values, metrics = corrected_loss(values, before, batch, self.correction)
        measured["entropy"] = -logprobs.detach()  # its mean over sampled tokens estimates the entropy at no cost
        if statistics.entropy is not None:
            measured["entropy"] = statistics.entropy.detach()
            values = values - weight * statistics.entropy
        return batch, Surrogate(logprobs, values, {**metrics, **token_metrics(measured, batch.response_mask)})

    # ---- an iteration
    def check_batch(self, batch: Samples) -> None:
        """Raise also for proximal ratios of responses from older weights."""
        super().check_batch(batch)
        if self.training_now and (most := self._strategy.max_staleness):
            refuse_stale(self.ratio_to, self.correction, f"max_staleness={most} draws responses from older weights")

    def summarize(self, samples: Samples) -> dict[str, Tensor]:
        """Return also the weight of the entropy, where it changes."""
        weight = {} if self.entropy_weight is None else {"entropy_coef": torch.tensor(self.entropy_weight.current)}
        return super().summarize(samples) | weight

    def on_iteration_end(self, samples: Samples) -> None:
        """Update also the weight of the entropy."""
        super().on_iteration_end(samples)
        if self.entropy_weight is not None:
            self.entropy_weight.update(samples.tensor(NATS).sum() / num_model_tokens(samples).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """The losses of N packed tokens."""

    logprobs: Tensor
    """(N,) current log-probabilities."""
    values: Tensor
    """(N,) losses."""
    metrics: Mapping[str, Average]
    """Metrics of the loss."""


def _computation(method: str, needs: Sequence[str], column: str, *, whole_batch: bool = False) -> ModelFunctionCall:
    return ModelFunctionCall(method, "compute", None, method, tuple(needs), (column,), whole_batch)
