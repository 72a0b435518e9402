"""Losses of preference pairs and labelled responses: formulas over sequences, without models or settings.

Losses are per pair or per sequence. Callers sum them and divide by the totals of a mini-batch.
Shapes: P pairs of a chosen and a rejected response to the same prompt, B sequences. A log-ratio is the log-probability
of a whole response, less the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
PairLossName = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop",
]  # fmt: skip
OF_DIFFERENCES: frozenset[PairLossName] = frozenset(
    {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"}
)
"""Losses of the difference of a pair's scores. A divergence's unknown normalizer cancels in it."""
OF_WHOLE_BATCH: frozenset[PairLossName] = frozenset({"aot", "aot_unpaired"})
"""Losses that compare values of equal rank in the whole mini-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Log-probabilities of P pairs under a model and its reference."""

    chosen: Tensor
    """(P,) log-probabilities of the chosen responses."""
    rejected: Tensor
    """(P,) log-probabilities of the rejected responses."""
    ref_chosen: Tensor
    """(P,) the reference's log-probabilities of the chosen responses."""
    ref_rejected: Tensor
    """(P,) the reference's log-probabilities of the rejected responses."""
    chosen_lengths: Tensor
    """(P,) numbers of tokens of the chosen responses."""
    rejected_lengths: Tensor
    """(P,) numbers of tokens of the rejected responses."""
    matches: tuple[Tensor, Tensor] | None = None
    """Two (P,), for losses of the whole mini-batch: see :func:`rank_matches`."""

    @property
    def chosen_ratios(self) -> Tensor:
        """(P,) log-ratios of the chosen responses."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> Tensor:
        """(P,) log-ratios of the rejected responses."""
        return self.rejected - self.ref_rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLossSettings:
    """Constants of the pair losses."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    divergence: Divergence = "reverse_kl"
    alpha: float = 0.5
    discopop_tau: float = 0.05


def divergence_scores(ratios: Tensor, divergence: Divergence, *, alpha: float = 0.5) -> Tensor:
    """Return the (P,) rewards that an f-divergence implies: ``f'(exp(ratio))`` up to a constant.

    For ``alpha`` this is ``(exp((alpha - 1) * ratio) - 1) / (alpha - 1)``; in the limit 1 it is the reverse KL's.

    Source: Wang et al., arXiv:2309.16240.
    """
    match divergence:
        case "reverse_kl":
            return ratios
        case "forward_kl":
            return -torch.expm1(-ratios)
        case "js":
            return math.log(2) + logsigmoid(ratios)
        case "alpha":
            if math.isclose(alpha, 1.0, abs_tol=1e-6):  # the limit
                return ratios
            # exp(80) is still a float32. Larger exponents overflow, and their gradient is useless.
            return torch.expm1(((alpha - 1.0) * ratios).clamp(max=80.0)) / (alpha - 1.0)


def pair_loss(name: PairLossName, pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Return the (P,) losses of a name."""
    return _PAIR_LOSSES[name](pairs, settings)


def _difference(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Return (P,) beta times the chosen less the rejected scores."""
    chosen, rejected = _scores(pairs, settings)
    return settings.beta * (chosen - rejected)


def _scores(pairs: Pairs, settings: PairLossSettings) -> tuple[Tensor, Tensor]:
    chosen, rejected = pairs.chosen_ratios, pairs.rejected_ratios
    return (
        divergence_scores(chosen, settings.divergence, alpha=settings.alpha),
        divergence_scores(rejected, settings.divergence, alpha=settings.alpha),
    )


def _mean_difference(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Return (P,) the chosen less the rejected scores, each per token."""
    chosen, rejected = _scores(pairs, settings)
    return chosen / pairs.chosen_lengths.clamp(min=1) - rejected / pairs.rejected_lengths.clamp(min=1)


def policy_weights(aligned_means: Tensor) -> Tensor:
    """Return the (P,) weights of pairs by the policy's probability of their responses.

    Args:
        aligned_means: (2P,) chosen and rejected responses in turn: mean over tokens of
            ``log p(token) - log(sum(p^2))``, a token's probability relative to the expected one of a sample.

    Source: Zhou et al., arXiv:2406.11827 (WPO), eq. 2 and §3.2, sampled alignment.
    """
    weights = aligned_means.detach().exp()
    return weights[0::2] * weights[1::2]


def smoothed_logistic(logits: Tensor, smoothing: float) -> Tensor:
    """Return ``-(1 - e) * log s(x) - e * log s(-x)``: the logistic loss for a share e of wrong labels."""
    return -(1.0 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _sigmoid(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """``-log s(beta * difference)``. Source: Rafailov et al., arXiv:2305.18290, eq. 7.

    Label smoothing makes it conservative DPO: Mitchell, "A note on DPO with noisy preferences", 2023, https://ericmitchell.ai/cdpo.pdf
    """
    return smoothed_logistic(_difference(pairs, settings), settings.label_smoothing)


def _sigmoid_norm(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """``sigmoid`` of means per token. Source: Lambert et al., arXiv:2411.15124, §5."""
    return smoothed_logistic(settings.beta * _mean_difference(pairs, settings), settings.label_smoothing)


def _hinge(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """``max(0, 1 - beta * difference)``. Source: Zhao et al., arXiv:2305.10425, as in Liu et al., arXiv:2309.06657."""
    return torch.relu(1.0 - _difference(pairs, settings))


def _ipo(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """``(difference - 1 / (2 * beta))^2``. Source: Azar et al., arXiv:2310.12036, eq. 17.

    Means per token, as in the authors' results: with sums, the loss would grow with the square of the length.
    """
    return (_mean_difference(pairs, settings) - 1.0 / (2.0 * settings.beta)).square()


def _exo_pair(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Reverse KL from (1 - e, e) to the model's own preference. Source: Ji et al., arXiv:2402.00856, eq. 16."""
    logits, smoothing = _difference(pairs, settings), settings.label_smoothing
    right, wrong = logsigmoid(logits), logsigmoid(-logits)
    return right.exp() * (right - math.log1p(-smoothing)) + wrong.exp() * (wrong - math.log(smoothing))


def _nca_pair(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Noise contrastive alignment, which also learns likelihoods themselves. Source: Chen et al., arXiv:2402.05369."""
    chosen, rejected = settings.beta * pairs.chosen_ratios, settings.beta * pairs.rejected_ratios
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def _robust(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Unbiased for a share e < 1/2 of flipped labels. Source: Chowdhury et al., arXiv:2403.00409."""
    logits, flipped = _difference(pairs, settings), settings.label_smoothing
    return (-(1.0 - flipped) * logsigmoid(logits) + flipped * logsigmoid(-logits)) / (1.0 - 2.0 * flipped)


def _bco_pair(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Binary classifier loss of both sides. Source: Jung et al., arXiv:2404.04656, without the shift of rewards."""
    return -logsigmoid(settings.beta * pairs.chosen_ratios) - logsigmoid(-settings.beta * pairs.rejected_ratios)


def _sppo_hard(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Log-ratios towards +-1 / (2 * beta). Source: Wu et al., arXiv:2405.00675, eq. 4.7, the winner's P being 1."""
    target = 0.5 / settings.beta
    return (pairs.chosen_ratios - target).square() + (pairs.rejected_ratios + target).square()


def _aot(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Dominance of the model's margins over the reference's. Source: Melnyk et al., arXiv:2406.05882, paired."""
    assert pairs.matches is not None, "aot needs the reference's margins of equal rank"
    margins = pairs.chosen - pairs.rejected
    return smoothed_logistic(settings.beta * (margins - pairs.matches[0]), settings.label_smoothing)


def _aot_unpaired(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Dominance of the chosen log-ratios over the rejected ones, by rank.

    The two sides of a comparison may lie in different micro-batches. Each is compared with the other's value before
    the step. The second term has a gradient but no value, so that no comparison counts twice.

    Source: Melnyk et al., arXiv:2406.05882, unpaired.
    """
    assert pairs.matches is not None, "aot_unpaired needs the log-ratios of equal rank"
    of_rejected, of_chosen = pairs.matches
    smoothing, beta = settings.label_smoothing, settings.beta
    upper = smoothed_logistic(beta * (pairs.chosen_ratios - of_rejected), smoothing)
    lower = smoothed_logistic(beta * (of_chosen - pairs.rejected_ratios), smoothing)
    return upper + (lower - lower.detach())


def _apo_zero(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Raise chosen, lower rejected. Source: D'Oosterlinck et al., arXiv:2408.06266, eq. 7."""
    return torch.sigmoid(-settings.beta * pairs.chosen_ratios) + torch.sigmoid(settings.beta * pairs.rejected_ratios)


def _apo_down(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Lower both, rejected more. Source: D'Oosterlinck et al., arXiv:2408.06266, eq. 8."""
    chosen, rejected = settings.beta * pairs.chosen_ratios, settings.beta * pairs.rejected_ratios
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def _discopop(pairs: Pairs, settings: PairLossSettings) -> Tensor:
    """Logistic and exponential loss, mixed by the difference itself. Source: Lu et al., arXiv:2406.08414, eq. 5."""
    logits = _difference(pairs, settings)
    share = torch.sigmoid(logits / settings.discopop_tau)
    return (1.0 - share) * -logsigmoid(logits) + share * torch.exp(-logits)


_PAIR_LOSSES: Mapping[PairLossName, Callable[[Pairs, PairLossSettings], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}


def rank_matches(name: PairLossName, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return two (P,) of values of equal rank, to compare each pair of a mini-batch with.

    For ``aot`` both are reference margins, by the rank of the pair's margin. For ``aot_unpaired`` they are rejected
    log-ratios by the rank of the chosen one, and chosen log-ratios by the rank of the rejected one.
    """
    if name == "aot":
        margins = of_equal_rank(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected)
        return margins, margins
    return (
        of_equal_rank(pairs.chosen_ratios, pairs.rejected_ratios),
        of_equal_rank(pairs.rejected_ratios, pairs.chosen_ratios),
    )


def of_equal_rank(values: Tensor, others: Tensor) -> Tensor:
    """Return the (P,) ``others`` in the order of the ranks of the (P,) ``values``, detached."""
    matched = torch.empty_like(others)
    matched[values.detach().argsort(stable=True)] = others.detach().sort(stable=True).values
    return matched


def kto_loss(
    ratios: Tensor, desirable: Tensor, kl: Tensor | float, *, beta: float, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return the (B,) losses ``w * (1 - s(beta * (ratio - kl)))``, with ``kl - ratio`` for undesirable responses.

    Args:
        ratios: (B,) log-ratios.
        desirable: (B,) bool.
        kl: Reference point of gains and losses: the divergence from the reference, at least 0.

    Source: Ethayarajh et al., arXiv:2402.01306, eq. 7. With ``kl=0`` it is the unpaired form of APO-zero:
    D'Oosterlinck et al., arXiv:2408.06266, eq. 7.
    """
    gain = torch.where(desirable, ratios - kl, kl - ratios)
    weights = torch.where(desirable, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-beta * gain)


def odds_ratio_loss(chosen_means: Tensor, rejected_means: Tensor) -> Tensor:
    """Return ``-log s(log odds(chosen) - log odds(rejected))`` for each of the P pairs.

    The odds of a response are p / (1 - p) of the geometric mean p of its tokens' probabilities.

    Args:
        chosen_means: (P,) mean log-probability per token; below 0.

    Source: Hong et al., arXiv:2403.07691, eq. 7.
    """
    log_odds = (chosen_means - rejected_means) - (_log1mexp(chosen_means) - _log1mexp(rejected_means))
    return -logsigmoid(log_odds)


def _log1mexp(values: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` of x < 0 without cancellation. Source: Mächler, vignette of R's Rmpfr, 2012."""
    # The unused branch gets a harmless value: its infinite gradient times 0 would be NaN.
    near = values > -math.log(2)
    for_near, for_far = torch.where(near, values, -0.5), torch.where(near, -1.0, values)
    return torch.where(near, torch.log(-torch.expm1(for_near)), torch.log1p(-torch.exp(for_far)))


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, margins: Tensor | float = 0.0, *, centre_coef: float = 0.0
) -> Tensor:
    """Return ``-log s(chosen - rejected - margin) + centre_coef * (chosen + rejected)^2`` for each of the P pairs.

    Pairs determine scores up to a constant per prompt; centring fixes it.

    Source: Ouyang et al., arXiv:2203.02155, eq. 1; margins: Touvron et al., arXiv:2307.09288, eq. 2; centring:
    Eisenstein et al., arXiv:2312.09244.
    """
    loss = -logsigmoid(chosen_scores - rejected_scores - margins)
    return loss + centre_coef * (chosen_scores + rejected_scores).square() if centre_coef else loss


def step_loss(scores: Tensor, labels: Tensor, ends: Tensor) -> Tensor:
    """Return the (N,) cross-entropies of the labels (1: right) at the tokens that end a step, zero elsewhere.

    Source: Lightman et al., arXiv:2305.20050; Uesato et al., arXiv:2211.14275.
    """
    losses = binary_cross_entropy_with_logits(scores, labels.to(scores), reduction="none")
    return torch.where(ends, losses, 0.0)


def shared_length_sums(logprobs: Tensor, places: Tensor, shared: Tensor, *, tail_weight: float) -> Tensor:
    """Return the (N,) log-probabilities, with ``tail_weight`` after the length of the pair's shorter response.

    Args:
        places: (N,) position of the token in its response, from 0.
        shared: (N,) length of the shorter response of the token's pair.

    Source: Liu et al., arXiv:2409.06411 (LD-DPO).
    """
    return torch.where(places < shared, logprobs, tail_weight * logprobs)
