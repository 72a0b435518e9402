"""Advantages and returns of tokens, from scores of responses, divergences and, in PPO, a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from lightning_realloc.algorithms.base.rollout_columns import model_mask
from lightning_realloc.algorithms.losses.controllers import RunningMoments
from lightning_realloc.algorithms.losses.functional import (
    explained_variance,
    generalized_advantages,
    kept_tokens,
    kl_estimate,
    sequence_sums,
    shaped_scores,
    spread_tokens,
    token_rewards,
    turn_ends,
)
from lightning_realloc.algorithms.rollout.response_parts import whiten_learned
from lightning_realloc.algorithms.settings import check_positive, check_share, check_type
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.environments.columns import TURN_REWARDS
from lightning_realloc.setting_hints import GAE_HINTS, suggest_settings


@suggest_settings(GAE_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    """Generalized advantages of tokens over a critic's values, from scores of responses.

    Source: Schulman et al., arXiv:1506.02438.

    Example:
        ``PPO(actor, reward, advantages=GAE(gae_lambda=0.9, normalize_values=True))``
    """

    discount: float = 1.0
    """Discount of a reward per token."""
    gae_lambda: float = 0.95
    """Weight of later rewards over the values: 0 uses one token, 1 the whole response."""
    normalize_advantages: bool = True
    """Whether advantages get mean 0 and deviation 1 over all learned tokens of an iteration."""
    normalize_values: bool = False
    """Whether the critic learns returns less their running mean, over their running deviation."""
    reward_scale: float = 1.0
    """Factor of every score."""
    reward_clip: float | None = None
    """Largest absolute score after scaling; None does not clip."""

    def __post_init__(self) -> None:
        check_type(bool, normalize_advantages=self.normalize_advantages, normalize_values=self.normalize_values)
        check_type(Real, reward_scale=self.reward_scale)
        check_positive(reward_clip=self.reward_clip)
        check_share(discount=self.discount, gae_lambda=self.gae_lambda)

    def estimate(
        self, samples: Samples, *, moments: RunningMoments, has_reference: bool, penalty: Tensor | None
    ) -> dict[str, Column]:
        """Return every token's advantage and return, and every sample's reward, divergence and sums of returns.

        Tokens of an environment are part of the next state, not steps of their own. What it rewards in a turn is
        credited to that turn's last token.

        Args:
            samples: A whole iteration, each sample with a score.
            moments: Moments of earlier returns.
            has_reference: Whether there are log-probabilities of a reference.
            penalty: Reduction of a token's reward per nat of divergence; None: no reduction.
        """
        mask = model_mask(samples)
        behaviour = kept_tokens(samples.ragged("behaviour_logprobs"), mask)
        columns: dict[str, Column] = {}
        penalties = torch.zeros_like(behaviour.values)
        if has_reference:
            reference = kept_tokens(samples.ragged("ref_logprobs"), mask).values.to(behaviour.values)
            k1 = kl_estimate(behaviour.values, reference, estimator="k1")
            k3 = kl_estimate(behaviour.values, reference, estimator="k3")
            columns["kl_k1"] = sequence_sums(Ragged(k1, behaviour.lengths))
            columns["kl_k3"] = sequence_sums(Ragged(k3, behaviour.lengths))
            if penalty is not None:
                penalties = penalty.to(k1) * k1
        scores = shaped_scores(samples.tensor("scores"), scale=self.reward_scale, clip=self.reward_clip)
        rewards = placed_rewards(samples, scores, Ragged(penalties, behaviour.lengths), scale=self.reward_scale)
        estimates = kept_tokens(samples.ragged("values"), mask).to(penalties.device)
        # Without normalize_values the moments are empty, and change nothing.
        values = Ragged(moments.denormalize(estimates.values), estimates.lengths)
        return columns | {"rewards": sequence_sums(rewards)} | self._learnt(rewards, values, samples, moments)

    def _learnt(self, rewards: Ragged, values: Ragged, samples: Samples, moments: RunningMoments) -> dict[str, Column]:
        mask = model_mask(samples)
        advantages = generalized_advantages(rewards, values, discount=self.discount, gae_lambda=self.gae_lambda)
        returns = Ragged(advantages.values + values.values, values.lengths)
        exact = returns.values.double()
        if self.normalize_advantages:
            advantages = Ragged(whiten_learned(advantages.values, samples), values.lengths)
        return {
            "advantages": spread_tokens(advantages, mask),
            "returns": spread_tokens(self._in_critic_units(returns, moments), mask),
            "return_sums": sequence_sums(Ragged(exact, returns.lengths)),
            "return_square_sums": sequence_sums(Ragged(exact.square(), returns.lengths)),
            "explained_variance": explained_variance(values.values, returns.values).expand(len(values)).clone(),
        }

    def _in_critic_units(self, returns: Ragged, moments: RunningMoments) -> Ragged:
        """Return normalized returns; the running moments include these returns."""
        if not self.normalize_values:
            return returns
        exact = returns.values.double()
        merged = moments.merged(returns.num_tokens, exact.sum(), exact.square().sum())
        return Ragged(merged.normalize(returns.values), returns.lengths)


def token_returns(
    samples: Samples, compared: Tensor, *, discount: float, penalty: float | None
) -> tuple[Ragged, dict[str, Column]]:
    """Return the return of each token that the model sampled without a critic, and each response's divergence.

    A token is not credited with the divergence of earlier tokens, which it cannot affect.

    Args:
        samples: Responses.
        compared: (B,) a reward at the last token, but for the part that an environment gave in earlier turns.
        discount: Discount of a reward per token.
        penalty: Reduction of a token's reward per nat of divergence; None: no reduction, and no column.
    """
    kept = kept_tokens(samples.ragged("behaviour_logprobs"), model_mask(samples))
    penalties = Ragged(torch.zeros_like(kept.values), kept.lengths)
    columns: dict[str, Column] = {}
    if penalty is not None:
        penalties = divergences(samples)
        columns["kl_k1"] = sequence_sums(penalties)
        penalties = Ragged(penalty * penalties.values, penalties.lengths)
    rewards = placed_rewards(samples, compared, penalties)
    # Without a critic, values are zero and advantages are the returns.
    nothing = Ragged(torch.zeros_like(rewards.values), rewards.lengths)
    return generalized_advantages(rewards, nothing, discount=discount, gae_lambda=1.0), columns


def placed_rewards(samples: Samples, scores: Tensor, penalties: Ragged, *, scale: float = 1.0) -> Ragged:
    """Return each token's reward: minus its penalty, plus what its environment gave where it ends a turn.

    The rest of the (B,) scores is at each response's last token, all of it without such rewards.

    Args:
        samples: Responses.
        scores: (B,) scores, those of turns included.
        penalties: Of each token that the model sampled.
        scale: Factor of turns' rewards, which the scores have already.
    """
    mask = model_mask(samples)
    if TURN_REWARDS not in samples or mask is None:
        return token_rewards(scores, penalties)
    pairs = list(zip(turn_ends(mask).split(), samples.ragged(TURN_REWARDS).split(), strict=True))
    given = [scale * rewards[: len(ends)].to(penalties.values) for ends, rewards in pairs]
    places = torch.cat([ends[: len(rewards)] for ends, rewards in pairs]).to(penalties.values.device)
    rest = scores - torch.stack([rewards.sum() for rewards in given]).to(scores)
    made = token_rewards(rest, penalties)
    return Ragged(made.values.index_add(0, places, torch.cat(given)), made.lengths)


def divergences(samples: Samples) -> Ragged:
    """Return k1 from the sampling policy to the reference, for each token that the model sampled."""
    mask = model_mask(samples)
    behaviour = kept_tokens(samples.ragged("behaviour_logprobs"), mask)
    reference = kept_tokens(samples.ragged("ref_logprobs"), mask).values.to(behaviour.values)
    return Ragged(kl_estimate(behaviour.values, reference, estimator="k1"), behaviour.lengths)
