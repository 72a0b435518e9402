"""Formulas over packed tokens, without models, ranks or settings.

Losses are per token. A caller sums them and divides by the totals of the whole mini-batch, so that micro-batches and
data-parallel ranks sum to the same loss for every split of the samples.
Shapes: N packed tokens, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_realloc.batch.samples import Ragged

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, eq=False)
class ClippedLoss:
    """The clipped loss of each token."""

    values: Tensor
    """(N,) losses."""
    clipped: Tensor
    """(N,) bool: True where clipping removed the gradient, or bounded the weight of a token with a positive advantage.
    All False for a smooth loss."""


def cross_entropy(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Return the (N,) negative log-likelihoods of tokens, zero where ``response_mask`` is False."""
    return torch.where(response_mask, -logprobs, 0.0)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = 0.2) -> ClippedLoss:
    """Return ``max((v - R)^2, (clamp(v, old - clip, old + clip) - R)^2) / 2`` for each of the N tokens.

    A value that moved by more than ``clip`` since the rollout has no gradient away from its old value; None never
    clips. A value within these bounds stays as it is: ``old + clamp(v - old)`` would round it, and count as clipped.

    Source: Schulman et al., arXiv:1707.06347, as in the authors' code, https://github.com/openai/baselines (ppo2);
    Engstrom et al., arXiv:2005.12729, §3.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return ClippedLoss(plain, torch.zeros_like(plain, dtype=torch.bool))
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    return ClippedLoss(torch.maximum(plain, bounded), (bounded > plain).detach())


def generalized_advantages(rewards: Ragged, values: Ragged, *, discount: float, gae_lambda: float) -> Ragged:
    """Return ``A_t = sum_k (discount * gae_lambda)^k * (r_{t+k} + discount * V_{t+k+1} - V_{t+k})`` for each token.

    ``V_t`` is the value of the state before token t. After the last token it is zero: a response is an episode that
    ends. Doubling computes the sums of all sequences in log2(longest) steps: with A_t over the next 2^j tokens,
    ``A_t + factor^(2^j) * A_{t + 2^j}`` covers the next 2^(j+1).

    Source: Schulman et al., arXiv:1506.02438, eq. 16.
    """
    device = rewards.values.device
    ends = torch.repeat_interleave(rewards.offsets[1:], rewards.lengths).to(device)
    remaining = ends - torch.arange(rewards.num_tokens, device=device)  # tokens up to the sequence's end, this included
    advantages = rewards.values + discount * _shifted(values.values, 1, remaining) - values.values
    step, longest = 1, int(rewards.lengths.max()) if len(rewards) else 0
    while step < longest:
        advantages = advantages + (discount * gae_lambda) ** step * _shifted(advantages, step, remaining)
        step *= 2
    return Ragged(advantages, rewards.lengths)


def _shifted(values: Tensor, step: int, remaining: Tensor) -> Tensor:
    """Return the value ``step`` tokens later in the same sequence, zero past its end."""
    later = torch.cat([values[step:], values.new_zeros(min(step, values.shape[0]))])
    return torch.where(remaining > step, later, 0.0)


def shaped_scores(scores: Tensor, *, scale: float = 1.0, clip: float | None = None) -> Tensor:
    """Return ``clamp(scores * scale, -clip, clip)``; None does not clip."""
    scaled = scores * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def token_rewards(scores: Tensor, penalties: Ragged) -> Ragged:
    """Return each token's reward: minus its penalty, plus the (B,) score at each sequence's last token.

    Source: Ziegler et al., arXiv:1909.08593, eq. 2, with the divergence token by token.
    """
    rewards = -penalties.values
    spoken = penalties.lengths > 0
    last = (penalties.offsets[1:] - 1)[spoken].to(rewards.device)
    added = scores.to(rewards)[spoken.to(scores.device)]
    return Ragged(rewards.index_add(0, last, added), penalties.lengths)


def whiten(values: Tensor, mask: Tensor | None = None, *, eps: float = 1e-8) -> Tensor:
    """Return ``(v - mean) / (std + eps)`` over the values whose ``mask`` is True, zero for the others.

    The standard deviation is the population's: zero where all values are equal, and so for a single one.
    """
    kept = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    count = kept.sum().clamp(min=1)
    mean = masked_sum(values, kept) / count
    centred = torch.where(kept, values - mean, 0.0)
    std = (centred.double().square().sum() / count).sqrt()  # in float32 squares of values beyond 1e19 overflow
    return (centred / (std + eps)).to(values)


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return ``1 - Var(returns - values) / Var(returns)``: 1 for a perfect critic, 0 for a constant one.

    It is zero if the returns do not vary, and NaN for empty or NaN values or returns.
    """
    if returns.numel() == 0:  # torch would warn of a variance without degrees of freedom
        return returns.new_full((), torch.nan)
    total = returns.var(correction=0)
    left = (returns - values).var(correction=0)
    explained = 1 - left / total.clamp(min=torch.finfo(total.dtype).tiny)
    return torch.where(total == 0, 0.0, explained)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLEstimator = "k3") -> Tensor:
    """Return per token an estimate of KL(policy || reference) from the token that the policy sampled.

    With ``d = log policy - log reference``: k1 is ``d`` (unbiased, may be negative), k2 is ``d^2 / 2`` (biased, low
    variance), k3 is ``exp(-d) - 1 + d`` (unbiased, never negative).

    Source: Schulman, "Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the ``values`` whose ``mask`` is True. The others may be NaN."""
    return torch.where(mask, values, 0.0).sum()


def kept_tokens(values: Ragged, mask: Ragged | None) -> Ragged:
    """Drop the values of each sequence whose ``mask`` is False; None keeps all."""
    if mask is None:
        return values
    counts = sequence_sums(Ragged(mask.values.long(), mask.lengths)).cpu()
    return Ragged(values.values[mask.values.to(values.values.device)], counts)


def turn_ends(mask: Ragged) -> Ragged:
    """Return the places of the turns' last tokens among all tokens whose ``mask`` is True, in order: (B, turns) ragged.

    A turn is a run of such tokens.
    """
    chosen = mask.values.bool().cpu()
    goes_on = torch.cat([chosen[1:], chosen.new_zeros(1)])
    goes_on[(mask.offsets[1:] - 1)[mask.lengths > 0]] = False
    ends = chosen & ~goes_on
    return Ragged((chosen.cumsum(0) - 1)[ends], sequence_sums(Ragged(ends.long(), mask.lengths)).long())


def spread_tokens(values: Ragged, mask: Ragged | None) -> Ragged:
    """Invert :func:`kept_tokens`, with zeros where the ``mask`` is False."""
    if mask is None:
        return values
    whole = values.values.new_zeros(mask.num_tokens)
    whole[mask.values.to(whole.device)] = values.values
    return Ragged(whole, mask.lengths)


def sequence_sums(values: Ragged) -> Tensor:
    """Return the (B,) sums of the sequences' values, zero for an empty one."""
    owner = torch.repeat_interleave(torch.arange(len(values)), values.lengths).to(values.values.device)
    return values.values.new_zeros(len(values)).index_add(0, owner, values.values)


def token_ages(versions: Ragged, mask: Ragged | None, iteration: int) -> tuple[Tensor, Tensor]:
    """Return (B,) the sum and the largest of the ages of each response's tokens in the ``mask``; None: of all tokens.

    An age is ``iteration`` less the token's version.
    """
    ages = iteration - versions.values
    counted = Ragged(ages if mask is None else ages * mask.values, versions.lengths)
    largest = [max(row.tolist(), default=0) for row in counted.split()]
    return sequence_sums(counted), torch.tensor(largest, dtype=torch.int64)


def sequence_mean_sum(values: Tensor, mask: Tensor, sample_index: Tensor, num_sequences: int) -> Tensor:
    """Return the sum over sequences of the mean of their kept values; a sequence without any counts 0.

    Args:
        values: (N,) one value per token.
        mask: (N,) bool, True = keep.
        sample_index: (N,) int64, the sequence in 0..num_sequences - 1 that a token belongs to.
    """
    kept = torch.where(mask, values, 0.0)
    sums = kept.new_zeros(num_sequences).index_add(0, sample_index, kept)
    counts = kept.new_zeros(num_sequences).index_add(0, sample_index, mask.to(kept.dtype))
    return (sums / counts.clamp(min=1.0)).sum()
