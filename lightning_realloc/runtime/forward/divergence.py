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

from lightning_realloc.runtime.forward.token_logprobs import chunks, of_all_ranks
from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabularyShare, share_of

VocabularyDivergence = Literal["forward_kl", "reverse_kl", "js"]


class TeacherHead:
    """Another model's head, in the dtype it is used in. The host keeps all of it, a device what it was last asked for.

    Under tensor parallelism that is a rank's share of the vocabulary. Under the next plan it may be another one, which
    is why the host lets go of nothing.

    Args:
        weight: (V', D).
        bias: (V',).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._whole = tuple(None if part is None else part.detach().cpu() for part in (weight, bias))
        self._asked: tuple[object, ...] = ()
        self._part: tuple[Tensor | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        """V', how many tokens it knows."""
        weight, _ = self._whole
        assert weight is not None, "a head has a weight"
        return len(weight)

    def of_tokens(self, columns: slice, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (v, D) and (v,) of some tokens, on the device and in the dtype of ``like``."""
        asked = columns.start, columns.stop, like.device, like.dtype
        if self._asked != asked:
            self._asked, self._part = asked, ()  # let go first: there may be room for one alone
            self._whole = tuple(None if part is None else part.to(like.dtype) for part in self._whole)
            self._part = tuple(None if part is None else part[columns].to(like.device) for part in self._whole)
        weight, bias = self._part
        assert weight is not None, "a head has a weight"
        return weight, bias


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTokens:
    """What is needed of another model's distributions."""

    states: Tensor
    """(N, D) its last hidden states."""
    head: TeacherHead

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Return (n, v) the logits of some rows, for some tokens of the vocabulary."""
        return torch.nn.functional.linear(self.states[rows], *self.head.of_tokens(columns, self.states))


def vocabulary_divergence(
    logits: Tensor, teacher: TeacherTokens, *, divergence: VocabularyDivergence, mix: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return (N,) fp32 how far the student's (N, V) ``logits`` are from the teacher; differentiable in them, once.

    With S and T the two distributions: ``forward_kl`` is KL(T || S), ``reverse_kl`` KL(S || T), and ``js`` is
    ``mix * KL(T || M) + (1 - mix) * KL(S || M)`` with ``M = mix * T + (1 - mix) * S``. Where one vocabulary was padded
    further than the other, entries beyond the shorter one are left out. Of `SharedLogits` every rank looks at its own
    columns, for which alone it makes the teacher's; ranks exchange a few numbers per row, in the backward pass none.

    Source: Agarwal et al., arXiv:2306.13649, eq. 1.
    """
    assert 0.0 < mix < 1.0, "at 0 and 1 the mixture is one of the two, and says nothing about the other"
    values, share = share_of(logits)
    divergences: Tensor = _VocabularyDivergence.apply(  # type: ignore[no-untyped-call]
        values, teacher, share, divergence, mix, temperature
    )
    return divergences


class _VocabularyDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher_tokens: TeacherTokens, share: VocabularyShare | None,
        divergence: VocabularyDivergence, mix: float, temperature: float,
    ) -> Tensor:  # fmt: skip
        pair = _Pair(logits, teacher_tokens, share, temperature)
        normalisers, terms = torch.zeros(2, 2, logits.shape[0], dtype=torch.float32, device=logits.device)
        for rows in chunks(logits):
            both = pair.scaled(rows)
            sums = torch.stack([scaled.logsumexp(-1) for scaled in both])
            normalisers[:, rows] = of_all_ranks(sums, share).logsumexp(0)
            student, teacher = _normalised(both, normalisers[:, rows])
            terms[0, rows], terms[1, rows] = _terms(student, teacher, divergence, mix)
        terms = of_all_ranks(terms, share).sum(0)
        ctx.save_for_backward(logits, normalisers, terms[0])
        ctx.settings = teacher_tokens, share, divergence, mix, temperature
        return terms.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalisers, own_terms = ctx.saved_tensors
        teacher_tokens, share, divergence, mix, temperature = ctx.settings
        pair = _Pair(logits, teacher_tokens, share, temperature)
        result = torch.zeros_like(logits)
        for rows in chunks(logits):
            student, teacher = _normalised(pair.scaled(rows), normalisers[:, rows])
            part = _slope(student, teacher, own_terms[rows], divergence, mix) * (gradient[rows, None] / temperature)
            result[rows, : part.shape[1]] = part.to(result.dtype)
        return result, *[None] * 5


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """The student's logits and the teacher's, in the columns that this rank has and both vocabularies."""

    student: Tensor
    teacher: TeacherTokens
    share: VocabularyShare | None
    temperature: float

    def scaled(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return (n, v) logits of both in fp32, divided by the temperature."""
        width, limit = self.student.shape[1], self.teacher.head.num_tokens
        columns = slice(0, min(width, limit)) if self.share is None else self.share.columns(width, limit)
        student = self.student[rows, : columns.stop - columns.start]
        return student.float() / self.temperature, self.teacher.logits(rows, columns).float() / self.temperature


def _normalised(both: tuple[Tensor, Tensor], normalisers: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into log-probabilities, in place."""
    return both[0].sub_(normalisers[0, :, None]), both[1].sub_(normalisers[1, :, None])


def _terms(
    student: Tensor, teacher: Tensor, divergence: VocabularyDivergence, mix: float
) -> tuple[Tensor | float, Tensor | float]:
    """Return the terms of the divergence that the student's probabilities weigh, and those that the teacher's do."""
    if divergence == "forward_kl":
        return 0.0, _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, teacher), 0.0
    mixture = _mixture(student, teacher, mix)
    return (1.0 - mix) * _kl(student, mixture), mix * _kl(teacher, mixture)


def _slope(student: Tensor, teacher: Tensor, own_terms: Tensor, divergence: VocabularyDivergence, mix: float) -> Tensor:
    """Return the derivative by the student's logits: ``S * (g - sum(S * g))`` with g the derivative by S.

    The sum, over all ranks' columns, is that of the terms that the student's probabilities weigh.
    """
    if divergence == "forward_kl":  # g = -T / S
        return student.exp() - teacher.exp()
    if divergence == "reverse_kl":
        slope = student - teacher
    else:  # the terms of the mixture's own derivative cancel
        slope = (1.0 - mix) * (student - _mixture(student, teacher, mix))
    p = student.exp()
    return torch.where(p > 0, p * slope, 0.0) - p * own_terms[:, None]


def _mixture(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    log_mix = torch.tensor([mix, 1.0 - mix], device=student.device).log()
    return torch.logaddexp(teacher + log_mix[0], student + log_mix[1])


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return what some columns add to KL(p || q) of rows of log-probabilities; 0 * log 0 is 0."""
    return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)
