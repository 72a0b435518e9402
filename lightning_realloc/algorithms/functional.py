"""What is minimised? Formulas over packed tokens, without models, ranks or settings.

Losses come per token and are added up, never averaged, here: a caller divides by the totals of the whole mini-batch,
so the parts of micro-batches and data-parallel ranks sum to the same loss however the samples were split.
Shapes: N packed tokens, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, eq=False)
class ClippedLoss:
    """The clipped surrogate of each token."""

    values: Tensor
    """(N,): what is minimised."""
    clipped: Tensor
    """(N,) bool: True where the clip took the gradient away."""


def cross_entropy(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Return the (N,) negative log-likelihoods of the kept tokens, zero wherever ``response_mask`` is False."""
    return torch.where(response_mask, -logprobs, 0.0)


def group_advantages(rewards: Tensor, groups: Tensor, *, std_eps: float | None = 1e-4) -> Tensor:
    """Return how much better each of the (B,) rewards is than its group: ``(r - mean) / (std + std_eps)``.

    The standard deviation is the unbiased one, zero in a group of one. All samples of a group must be here.

    Args:
        groups: (B,) integers; samples with the same one answer the same prompt.
        std_eps: Added to the standard deviation; None leaves ``r - mean`` as it is.

    Source: Shao et al., arXiv:2402.03300, §4.1.2; without the deviation: Liu et al., arXiv:2503.20783, eq. 3.
    """
    members, index = torch.unique(groups.to(rewards.device), return_inverse=True)
    counts = rewards.new_zeros(members.shape[0]).index_add_(0, index, torch.ones_like(rewards))
    mean = rewards.new_zeros(members.shape[0]).index_add_(0, index, rewards) / counts
    centred = rewards - mean[index]
    if std_eps is None:
        return centred
    squares = rewards.new_zeros(members.shape[0]).index_add_(0, index, centred.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    return centred / (std[index] + std_eps)


def clipped_policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> ClippedLoss:
    """Return ``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` for each of the N tokens.

    ``ratio`` is the token's probability now over its probability when it was drawn.

    Source: Schulman et al., arXiv:1707.06347, eq. 7; two bounds: Yu et al., arXiv:2503.14476, eq. 10.
    """
    ratio = (logprobs - behaviour_logprobs).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return ClippedLoss(-torch.minimum(plain, bounded), (bounded < plain).detach())


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLEstimator = "k3") -> Tensor:
    """Return per token an estimate of KL(policy || reference) from the one token that the policy drew.

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
    """Return the sum of the ``values`` whose ``mask`` is True; what the others hold, even NaN, does not matter."""
    return torch.where(mask, values, 0.0).sum()


def sequence_mean_sum(values: Tensor, mask: Tensor, sample_index: Tensor, num_sequences: int) -> Tensor:
    """Return the sum over sequences of the mean of their kept values; a sequence that keeps none adds nothing.

    Args:
        values: (N,) one value per token.
        mask: (N,) bool, True = keep.
        sample_index: (N,) int64, the sequence in 0..num_sequences - 1 that a token belongs to.
    """
    kept = torch.where(mask, values, 0.0)
    sums = kept.new_zeros(num_sequences).index_add(0, sample_index, kept)
    counts = kept.new_zeros(num_sequences).index_add(0, sample_index, mask.to(kept.dtype))
    return (sums / counts.clamp(min=1.0)).sum()
