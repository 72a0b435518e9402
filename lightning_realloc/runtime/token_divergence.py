"""How far are two models' next-token distributions apart, over the whole vocabulary? A chunk of tokens at a time.

One model's logits are there, since it is trained through them. The other's are made from its last hidden states and its
head when they are needed, and forgotten: they never exist for more than a chunk, in either direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_realloc.runtime.token_logprobs import chunks

VocabularyDivergence = Literal["forward_kl", "reverse_kl", "js"]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTokens:
    """What is needed of another model's distributions."""

    states: Tensor
    """(N, D) its last hidden states."""
    weight: Tensor
    """(V', D) of its head."""
    bias: Tensor | None = None
    """(V',) of its head."""

    def log_softmax(self, rows: slice, num_tokens: int, temperature: float) -> Tensor:
        """Return (n, num_tokens) fp32 log-probabilities of the first ``num_tokens`` entries of the vocabulary."""
        bias = None if self.bias is None else self.bias[:num_tokens]
        logits = torch.nn.functional.linear(self.states[rows], self.weight[:num_tokens], bias)
        return (logits.float() / temperature).log_softmax(-1)


def vocabulary_divergence(
    logits: Tensor, teacher: TeacherTokens, *, divergence: VocabularyDivergence, mix: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return (N,) fp32 how far the student's (N, V) ``logits`` are from the teacher; differentiable in them, once.

    With S and T the two distributions: ``forward_kl`` is KL(T || S), ``reverse_kl`` KL(S || T), and ``js`` is
    ``mix * KL(T || M) + (1 - mix) * KL(S || M)`` with ``M = mix * T + (1 - mix) * S``. Where one vocabulary was padded
    further than the other, entries beyond the shorter one are left out.

    Source: Agarwal et al., arXiv:2306.13649, eq. 1.
    """
    assert 0.0 < mix < 1.0, "at 0 and 1 the mixture is one of the two, and says nothing about the other"
    divergences: Tensor = _VocabularyDivergence.apply(  # type: ignore[no-untyped-call]
        logits, teacher.states, teacher.weight, teacher.bias, divergence, mix, temperature
    )
    return divergences


class _VocabularyDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None,
        divergence: VocabularyDivergence, mix: float, temperature: float,
    ) -> Tensor:  # fmt: skip
        values = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            student, teacher = _pair(logits, TeacherTokens(states, weight, bias), rows, temperature)
            values[rows] = _values(student, teacher, divergence, mix)
        ctx.save_for_backward(logits, states, weight, bias)
        ctx.settings = divergence, mix, temperature
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, states, weight, bias = ctx.saved_tensors
        divergence, mix, temperature = ctx.settings
        result = torch.zeros_like(logits)
        for rows in chunks(logits):
            student, teacher = _pair(logits, TeacherTokens(states, weight, bias), rows, temperature)
            part = _slope(student, teacher, divergence, mix) * (gradient[rows, None] / temperature)
            result[rows, : part.shape[1]] = part.to(result.dtype)
        return result, None, None, None, None, None, None


def _pair(logits: Tensor, teacher: TeacherTokens, rows: slice, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the (n, V) log-probabilities of student and teacher."""
    num_tokens = min(logits.shape[1], teacher.weight.shape[0])
    student = (logits[rows, :num_tokens].float() / temperature).log_softmax(-1)
    return student, teacher.log_softmax(rows, num_tokens, temperature)


def _values(student: Tensor, teacher: Tensor, divergence: VocabularyDivergence, mix: float) -> Tensor:
    if divergence == "forward_kl":
        return _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, teacher)
    mixture = _mixture(student, teacher, mix)
    return mix * _kl(teacher, mixture) + (1.0 - mix) * _kl(student, mixture)


def _slope(student: Tensor, teacher: Tensor, divergence: VocabularyDivergence, mix: float) -> Tensor:
    """Return the derivative by the student's logits: ``S * (g - sum(S * g))`` with g the derivative by S."""
    if divergence == "forward_kl":  # g = -T / S
        return student.exp() - teacher.exp()
    if divergence == "reverse_kl":
        slope = student - teacher
    else:  # the terms of the mixture's own derivative cancel
        slope = (1.0 - mix) * (student - _mixture(student, teacher, mix))
    p = student.exp()
    weighted = torch.where(p > 0, p * slope, 0.0)
    return weighted - p * weighted.sum(-1, keepdim=True)


def _mixture(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    log_mix = torch.tensor([mix, 1.0 - mix], device=student.device).log()
    return torch.logaddexp(teacher + log_mix[0], student + log_mix[1])


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of rows of log-probabilities; 0 * log 0 is 0."""
    return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)
