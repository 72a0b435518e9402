"""Log-probabilities of chosen tokens, without a second copy of the logits in fp32.

A softmax over the whole vocabulary takes tokens x V x 4 bytes. The backward pass of the plain formula takes three times
as much. Here both passes process one chunk of tokens at a time and keep two numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_realloc.runtime.forward.tiled_logits import LogitReader, read_logits
from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabShard


@dataclass(frozen=True, slots=True, eq=False)
class TokenStatistics:
    """Statistics of a pack's tokens under a model."""

    logprobs: Tensor
    """(N,) fp32 log-probabilities."""
    entropy: Tensor | None = None
    """(N,) fp32 entropy in nats of the distribution of each token; None if not requested."""
    collision: Tensor | None = None
    """(N,) fp32 ``log(sum(p^2))``: log-probability that two draws are equal, no gradient; None if not requested."""


def selected_logprobs(
    logits: Tensor, tokens: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> TokenStatistics:
    """Return for each row of ``logits`` (N, V) the log-probability of its entry in ``tokens`` (N,).

    Computed in fp32 from ``log p = z[token] - logsumexp(z)`` with ``z = logits / temperature``. The entropy is
    ``-sum(p * log p)``, where 0 * log 0 is 0. Both are differentiable once. For `VocabParallelLogits` every rank
    reads its own columns. Ranks exchange three numbers per row, and none in the backward pass. `DeferredLogits` are
    computed one tile at a time, in both passes.
    """
    reader = read_logits(logits)
    logprobs, entropy = _SelectedLogprobs.apply(reader, tokens, temperature, with_entropy, *reader.inputs)
    return TokenStatistics(logprobs, entropy if with_entropy else None)


@torch.no_grad()
def collision_logprobs(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return (N,) ``log(sum(p^2)) = logsumexp(2z) - 2 logsumexp(z)`` of every row of (N, V) logits, in fp32."""
    reader = read_logits(logits)
    sums = torch.empty(2, reader.num_rows, dtype=torch.float32, device=logits.device)
    for rows, values in reader.pieces():
        scaled = values.float() / temperature
        sums[0, rows], sums[1, rows] = scaled.logsumexp(-1), (2.0 * scaled).logsumexp(-1)
    once, twice = gather_shards(sums, reader.shard).logsumexp(0)
    collision: Tensor = twice - 2.0 * once
    return collision


def gather_shards(values: Tensor, shard: VocabShard | None) -> Tensor:
    """Return the values of all ranks, stacked along a new first dim of size R; R is 1 without a shard."""
    return values[None] if shard is None else shard.gather(values)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reader: LogitReader, tokens: Tensor, temperature: float, with_entropy: bool, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        stats = torch.zeros(3, reader.num_rows, dtype=torch.float32, device=tokens.device)
        for rows, values in reader.pieces():
            scaled = values.float() / temperature
            _fill_stats(stats[:, rows], scaled, tokens[rows], reader.shard, with_entropy=with_entropy)
        normaliser, chosen, entropy = _combine_shards(gather_shards(stats, reader.shard))
        ctx.save_for_backward(tokens, normaliser, entropy, *inputs)
        ctx.reader, ctx.temperature, ctx.with_entropy = reader, temperature, with_entropy
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        tokens, normaliser, entropy, *inputs = ctx.saved_tensors

        def slope(rows: slice, values: Tensor) -> Tensor:
            p = (values.float() / ctx.temperature).sub_(normaliser[rows, None]).exp_()
            entropy_grads = (entropy[rows], grad_entropy[rows]) if ctx.with_entropy else None
            return _slope(p, tokens[rows], grad_logprobs[rows], entropy_grads, ctx.reader.shard).div_(ctx.temperature)

        return None, None, None, None, *ctx.reader.gradients(inputs, slope)


def _fill_stats(stats: Tensor, scaled: Tensor, tokens: Tensor, shard: VocabShard | None, *, with_entropy: bool) -> None:
    """Fill (3, n) ``stats`` with normaliser, chosen logit and entropy of (n, v) ``scaled``, which is overwritten."""
    stats[0] = normaliser = scaled.logsumexp(-1)
    stats[1] = _entries(scaled, tokens, shard)
    if with_entropy:
        # A shard without a finite logit has entropy 0; subtracting minus infinity from itself would give NaN.
        base = torch.where(normaliser == -torch.inf, 0.0, normaliser)
        p = scaled.sub_(base[:, None]).exp_()
        stats[2] = torch.special.entr(p, out=p).sum(-1)


def _slope(
    p: Tensor,
    tokens: Tensor,
    grad_logprobs: Tensor,
    entropy_grads: tuple[Tensor, Tensor] | None,
    shard: VocabShard | None,
) -> Tensor:
    """Return the gradient by scaled logits from their (n, v) probabilities ``p``, which are overwritten.

    The derivative is ``onehot - p`` for log p[token], and ``-p * (log p + entropy)`` for the entropy.
    ``entropy_grads`` holds the entropy and its upstream gradient; None means that the entropy is not used.
    """
    weights = grad_logprobs
    if entropy_grads is not None:
        entropy, grad_entropy = entropy_grads
        weights = grad_logprobs + grad_entropy * entropy
    slope = p * -weights[:, None]
    if entropy_grads is not None:
        slope.addcmul_(torch.special.entr(p, out=p), grad_entropy[:, None])
    _add_to_entries(slope, tokens, grad_logprobs, shard)
    return slope


def _combine_shards(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the (R, 3, N) statistics of R shards; return normaliser, chosen logit and entropy, each (N,).

    The entropy is the mean of the shards' entropies, weighted by their probabilities, plus the entropy of these
    probabilities. This sum of non-negative terms avoids cancellation.
    """
    normalisers, chosen, entropies = stats.unbind(1)
    normaliser = normalisers.logsumexp(0)
    weights = (normalisers - normaliser).exp()
    return normaliser, chosen.sum(0), (weights * entropies + torch.special.entr(weights)).sum(0)


def _entries(values: Tensor, tokens: Tensor, shard: VocabShard | None) -> Tensor:
    """Return the (n,) entries of the tokens in (n, v) ``values``; zero where another rank holds them."""
    if shard is None:
        return values.gather(1, tokens[:, None])[:, 0]
    if values.shape[1] == 0:
        return values.new_zeros(values.shape[0])
    columns, is_local = _local_columns(tokens, values.shape[1], shard)
    return torch.where(is_local, values.gather(1, columns[:, None])[:, 0], 0.0)


def _add_to_entries(values: Tensor, tokens: Tensor, added: Tensor, shard: VocabShard | None) -> None:
    """Add (n,) ``added`` to the entries of the tokens in (n, v) ``values``, where this rank holds them."""
    if shard is not None:
        if values.shape[1] == 0:
            return
        tokens, is_local = _local_columns(tokens, values.shape[1], shard)
        added = torch.where(is_local, added, 0.0)
    values.scatter_add_(1, tokens[:, None], added[:, None])


def _local_columns(tokens: Tensor, width: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the tokens' columns on this rank, clamped for tokens of other ranks, and whether they are local."""
    columns = tokens - shard.first_token
    return columns.clamp(0, width - 1), (columns >= 0) & (columns < width)
