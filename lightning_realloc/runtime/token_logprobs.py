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
    ``-sum(p * log p)``, where 0 * log 0 is 0. Both are differentiable, once.
    """
    logprobs, entropy = _SelectedLogprobs.apply(logits, tokens, temperature, with_entropy)  # type: ignore[no-untyped-call]
    return TokenStatistics(logprobs, entropy if with_entropy else None)


@torch.no_grad()
def collision_logprobs(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return (N,) ``log(sum(p^2)) = logsumexp(2z) - 2 logsumexp(z)`` of every row of (N, V) logits, in fp32."""
    found = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for rows in chunks(logits):
        scaled = logits[rows].float() / temperature
        found[rows] = (2.0 * scaled).logsumexp(-1) - 2.0 * scaled.logsumexp(-1)
    return found


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        num_rows = logits.shape[0]
        normaliser, logprobs, entropy = (
            torch.zeros(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        for rows in chunks(logits):
            scaled = logits[rows].float() / temperature
            normaliser[rows] = scaled.logsumexp(-1)
            logprobs[rows] = scaled.gather(1, tokens[rows, None])[:, 0] - normaliser[rows]
            if with_entropy:
                entropy[rows] = torch.special.entr((scaled - normaliser[rows, None]).exp_()).sum(-1)
        ctx.save_for_backward(logits, tokens, normaliser, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        logits, tokens, normaliser, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in chunks(logits):
            p = (logits[rows].float() / ctx.temperature).sub_(normaliser[rows, None]).exp_()
            # d log p[token] / dz = onehot - p  and  d entropy / dz = -p * (log p + entropy)
            part = p * -grad_logprobs[rows, None]
            part.scatter_add_(1, tokens[rows, None], grad_logprobs[rows, None].to(part.dtype))
            if ctx.with_entropy:
                part += grad_entropy[rows, None] * (torch.special.entr(p) - p * entropy[rows, None])
            gradient[rows] = part.div_(ctx.temperature).to(gradient.dtype)
        return gradient, None, None, None


def chunks(logits: Tensor) -> list[slice]:
    """Return slices over the rows of (N, V) ``logits`` that hold ``CHUNK_ELEMENTS`` at most, or one row."""
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(begin, begin + step) for begin in range(0, logits.shape[0], step)]
