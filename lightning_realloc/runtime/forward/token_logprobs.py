"""What log-probability do logits give to chosen tokens? Without a second copy of the logits in fp32.

A softmax over the whole vocabulary costs tokens x V x 4 bytes, and three times that in the backward pass of the
plain formula. Here tokens are taken a chunk at a time, in both directions, and only two numbers per token are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabularyShare, share_of

CHUNK_ELEMENTS = 1 << 23
"""Logits that are held in fp32 at a time: 32 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenStatistics:
    """What a model says about the tokens of a pack."""

    logprobs: Tensor
    """(N,) fp32."""
    entropy: Tensor | None = None
    """(N,) fp32, in nats, of the distribution each token was drawn from."""
    collision: Tensor | None = None
    """(N,) fp32, no gradient: ``log(sum(p^2))``, of the probability that two tokens drawn from it are the same."""


def selected_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> TokenStatistics:
    """Return for each row of ``logits`` (N, V) the log-probability of its entry in ``tokens`` (N,).

    Computed in fp32 from ``log p = z[token] - logsumexp(z)`` with ``z = logits / temperature``; the entropy is
    ``-sum(p * log p)``, where 0 * log 0 is 0. Both are differentiable, once. Of `SharedLogits` every rank looks at its
    own columns; ranks exchange three numbers per row, and in the backward pass none.
    """
    values, share = share_of(logits)
    logprobs, entropy = _SelectedLogprobs.apply(values, tokens, share, temperature, with_entropy)  # type: ignore[no-untyped-call]
    return TokenStatistics(logprobs, entropy if with_entropy else None)


@torch.no_grad()
def collision_logprobs(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return (N,) ``log(sum(p^2)) = logsumexp(2z) - 2 logsumexp(z)`` of every row of (N, V) logits, in fp32."""
    values, share = share_of(logits)
    sums = torch.empty(2, values.shape[0], dtype=torch.float32, device=values.device)
    for rows in chunks(values):
        scaled = values[rows].float() / temperature
        sums[0, rows], sums[1, rows] = scaled.logsumexp(-1), (2.0 * scaled).logsumexp(-1)
    once, twice = of_all_ranks(sums, share).logsumexp(0)
    collision: Tensor = twice - 2.0 * once
    return collision


def of_all_ranks(numbers: Tensor, share: VocabularyShare | None) -> Tensor:
    """Return what all ranks know, stacked along a new first dim; without a share one knows all."""
    return numbers[None] if share is None else share.gather(numbers)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, share: VocabularyShare | None, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        known = torch.zeros(3, logits.shape[0], dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            _find(known[:, rows], logits[rows].float() / temperature, tokens[rows], share, with_entropy=with_entropy)
        normaliser, chosen, entropy = _joined(of_all_ranks(known, share))
        ctx.save_for_backward(logits, tokens, normaliser, entropy)
        ctx.share, ctx.temperature, ctx.with_entropy = share, temperature, with_entropy
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, normaliser, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in chunks(logits):
            p = (logits[rows].float() / ctx.temperature).sub_(normaliser[rows, None]).exp_()
            of_entropy = (entropy[rows], grad_entropy[rows]) if ctx.with_entropy else None
            gradient[rows] = _slope(p, tokens[rows], grad_logprobs[rows], of_entropy, ctx.share).div_(ctx.temperature)
            del p  # before the next chunk's
        return gradient, None, None, None, None


def _find(known: Tensor, scaled: Tensor, tokens: Tensor, share: VocabularyShare | None, *, with_entropy: bool) -> None:
    """Fill (3, n) ``known`` with what (n, v) ``scaled`` logits say: normaliser, chosen logit, entropy. Reuses them."""
    known[0] = normaliser = scaled.logsumexp(-1)
    known[1] = _entries(scaled, tokens, share)
    if with_entropy:
        # A share without a finite logit has the entropy 0 of nothing; minus infinity from itself would be NaN.
        base = torch.where(normaliser == -torch.inf, 0.0, normaliser)
        p = scaled.sub_(base[:, None]).exp_()
        known[2] = torch.special.entr(p, out=p).sum(-1)


def _slope(
    p: Tensor, tokens: Tensor, grad_logprobs: Tensor, of_entropy: tuple[Tensor, Tensor] | None,
    share: VocabularyShare | None,
) -> Tensor:  # fmt: skip
    """Return the gradient by scaled logits, of which (n, v) ``p`` are the probabilities. Reuses them.

    It is ``onehot - p`` for log p[token] and ``-p * (log p + entropy)`` for the entropy, given with its own gradient.
    """
    weights = grad_logprobs
    if of_entropy is not None:
        entropy, grad_entropy = of_entropy
        weights = grad_logprobs + grad_entropy * entropy
    slope = p * -weights[:, None]
    if of_entropy is not None:
        slope.addcmul_(torch.special.entr(p, out=p), grad_entropy[:, None])
    _add_to_entries(slope, tokens, grad_logprobs, share)
    return slope


def _joined(known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return normaliser, chosen logit and entropy (N,) of distributions of which (R, 3, N) are those of each part.

    The entropy of all is the parts' as often as they are drawn from, and that of which part it is: nothing cancels.
    """
    parts, chosen, entropies = known.unbind(1)
    normaliser = parts.logsumexp(0)
    weights = (parts - normaliser).exp()
    return normaliser, chosen.sum(0), (weights * entropies + torch.special.entr(weights)).sum(0)


def _entries(values: Tensor, tokens: Tensor, share: VocabularyShare | None) -> Tensor:
    """Return (n,) the tokens' entries in (n, v) ``values``, zero where another rank has them."""
    if share is None:
        return values.gather(1, tokens[:, None])[:, 0]
    if values.shape[1] == 0:
        return values.new_zeros(values.shape[0])
    places, is_here = _places(tokens, values.shape[1], share)
    return torch.where(is_here, values.gather(1, places[:, None])[:, 0], 0.0)


def _add_to_entries(values: Tensor, tokens: Tensor, added: Tensor, share: VocabularyShare | None) -> None:
    """Add (n,) ``added`` to the tokens' entries in (n, v) ``values``, where this rank has them."""
    if share is not None:
        if values.shape[1] == 0:
            return
        tokens, is_here = _places(tokens, values.shape[1], share)
        added = torch.where(is_here, added, 0.0)
    values.scatter_add_(1, tokens[:, None], added[:, None])


def _places(tokens: Tensor, width: int, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Return where the tokens are among this rank's columns, any place for those of others, and whether they are."""
    places = tokens - share.first_token
    return places.clamp(0, width - 1), (places >= 0) & (places < width)


def chunks(logits: Tensor) -> list[slice]:
    """Return slices over the rows of (N, V) ``logits`` that hold ``CHUNK_ELEMENTS`` at most, or one row."""
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(begin, begin + step) for begin in range(0, logits.shape[0], step)]
