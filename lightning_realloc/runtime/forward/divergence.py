"""Divergence between the next-token distributions of a student and a teacher, one chunk of tokens at a time.

The student's logits exist, or are computed in tiles. The teacher's logits are recomputed in both passes from its last
hidden states and its head, and are never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_outputs import BaseModelOutputWithPast

from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.forward.tiled_logits import (
    DeferredLogits,
    LogitReader,
    LogitStep,
    deferred_head,
    read_logits,
    replaced_forward,
)
from lightning_realloc.runtime.forward.token_logprobs import gather_shards
from lightning_realloc.runtime.forward.vocab_parallel_logits import VocabShard
from lightning_realloc.runtime.model.structure import transformers_model

VocabularyDivergence = Literal["forward_kl", "reverse_kl", "js"]


class TeacherHead:
    """A teacher's head: all of it in host memory, and the columns in use on the device.

    Under tensor parallelism a rank uses its own columns of the vocabulary. The next plan may assign it others, so the
    host keeps the whole head.

    Args:
        weight: (V', D), with V' the teacher's vocabulary.
        bias: (V',), or None.
        steps: Operations that follow the head, such as a soft cap; see `steps_after_head`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, steps: Sequence[LogitStep] = ()) -> None:
        self.steps = tuple(steps)
        self._weight = weight.detach().cpu()
        self._bias = None if bias is None else bias.detach().cpu()
        self._cache_key: tuple[object, ...] = ()
        self._cached: tuple[Tensor, Tensor | None] | None = None

    @property
    def num_tokens(self) -> int:
        """V', the size of the teacher's vocabulary."""
        return len(self._weight)

    def select(self, columns: slice, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the (v, D) weight and (v,) bias of some tokens, with the device and dtype of ``like``."""
        key = columns.start, columns.stop, like.device, like.dtype
        if self._cached is None or self._cache_key != key:
            self._cached = None  # free the old columns first: the device may have room for only one
            self._weight = self._weight.to(like.dtype)
            self._bias = None if self._bias is None else self._bias.to(like.dtype)
            bias = None if self._bias is None else self._bias[columns].to(like.device)
            self._cache_key, self._cached = key, (self._weight[columns].to(like.device), bias)
        return self._cached


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTokens:
    """Inputs from which a teacher's next-token logits are computed."""

    states: Tensor
    """(N, D) last hidden states."""
    head: TeacherHead

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Return (n, v) logits of some rows, for some tokens of the vocabulary."""
        logits = torch.nn.functional.linear(self.states[rows], *self.head.select(columns, self.states))
        for step in self.head.steps:
            logits = step(logits)
        return logits


def vocabulary_divergence(
    logits: Tensor,
    teacher: TeacherTokens,
    *,
    divergence: VocabularyDivergence,
    mix: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Return the (N,) fp32 divergence of the student's (N, V) ``logits`` from the teacher; differentiable once.

    With S and T the two distributions, ``forward_kl`` is KL(T || S) and ``reverse_kl`` is KL(S || T). ``js`` is
    ``mix * KL(T || M) + (1 - mix) * KL(S || M)`` with ``M = mix * T + (1 - mix) * S``. If one vocabulary is padded
    further than the other, entries beyond the shorter one are ignored. For `VocabParallelLogits` every rank computes
    both models' logits of its own columns only. Ranks exchange a few numbers per row, and none in the backward pass.

    Source: Agarwal et al., arXiv:2306.13649, eq. 1.
    """
    assert 0.0 < mix < 1.0, "at mix=0 or mix=1 one of the two terms vanishes"
    reader = read_logits(logits)
    found = _VocabularyDivergence.apply(reader, teacher, divergence, mix, temperature, *reader.inputs)
    return cast(Tensor, found)


class _VocabularyDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        reader: LogitReader,
        teacher_tokens: TeacherTokens,
        divergence: VocabularyDivergence,
        mix: float,
        temperature: float,
        *inputs: Tensor,
    ) -> Tensor:
        pair, device = _Pair(teacher_tokens, reader.shard, temperature), teacher_tokens.states.device
        normalisers, terms = torch.zeros(2, 2, reader.num_rows, dtype=torch.float32, device=device)
        for rows, values in reader.pieces():
            both = pair.scaled(rows, values)
            sums = torch.stack([scaled.logsumexp(-1) for scaled in both])
            normalisers[:, rows] = gather_shards(sums, reader.shard).logsumexp(0)
            student, teacher = _normalised(both, normalisers[:, rows])
            terms[0, rows], terms[1, rows] = _terms(student, teacher, divergence, mix)
        terms = gather_shards(terms, reader.shard).sum(0)
        ctx.save_for_backward(normalisers, terms[0], *inputs)
        ctx.settings = reader, pair, divergence, mix
        return terms.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalisers, student_terms, *inputs = ctx.saved_tensors
        reader, pair, divergence, mix = ctx.settings

        def slope(rows: slice, values: Tensor) -> Tensor:
            student, teacher = _normalised(pair.scaled(rows, values), normalisers[:, rows])
            found = _slope(student, teacher, student_terms[rows], divergence, mix)
            found = found * (gradient[rows, None] / pair.temperature)
            return torch.nn.functional.pad(found, (0, values.shape[1] - found.shape[1]))

        return *[None] * 5, *reader.gradients(inputs, slope)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """Logits of student and teacher, in the columns that this rank holds and both vocabularies contain."""

    teacher: TeacherTokens
    shard: VocabShard | None
    temperature: float

    def scaled(self, rows: slice, student: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n, v) logits of both in fp32, divided by the temperature, from the student's (n, v')."""
        width, limit = student.shape[1], self.teacher.head.num_tokens
        columns = slice(0, min(width, limit)) if self.shard is None else self.shard.columns(width, limit)
        student = student[:, : columns.stop - columns.start]
        return student.float() / self.temperature, self.teacher.logits(rows, columns).float() / self.temperature


def _normalised(both: tuple[Tensor, Tensor], normalisers: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into log-probabilities, in place."""
    return both[0].sub_(normalisers[0, :, None]), both[1].sub_(normalisers[1, :, None])


def _terms(
    student: Tensor, teacher: Tensor, divergence: VocabularyDivergence, mix: float
) -> tuple[Tensor | float, Tensor | float]:
    """Return the terms of the divergence weighted by the student's probabilities, and those by the teacher's."""
    if divergence == "forward_kl":
        return 0.0, _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, teacher), 0.0
    mixture = _mixture(student, teacher, mix)
    return (1.0 - mix) * _kl(student, mixture), mix * _kl(teacher, mixture)


def _slope(
    student: Tensor, teacher: Tensor, student_terms: Tensor, divergence: VocabularyDivergence, mix: float
) -> Tensor:
    """Return the derivative by the student's logits: ``S * (g - sum(S * g))`` with g the derivative by S.

    The sum runs over all ranks' columns and equals ``student_terms``.
    """
    if divergence == "forward_kl":  # g = -T / S
        return student.exp() - teacher.exp()
    if divergence == "reverse_kl":
        slope = student - teacher
    else:  # the terms of the mixture's own derivative cancel
        slope = (1.0 - mix) * (student - _mixture(student, teacher, mix))
    p = student.exp()
    return torch.where(p > 0, p * slope, 0.0) - p * student_terms[:, None]


def _mixture(student: Tensor, teacher: Tensor, mix: float) -> Tensor:
    log_mix = torch.tensor([mix, 1.0 - mix], device=student.device).log()
    return torch.logaddexp(teacher + log_mix[0], student + log_mix[1])


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the contribution of some columns to KL(p || q), from rows of log-probabilities; 0 * log 0 is 0."""
    return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)


def steps_after_head(model: nn.Module) -> tuple[LogitStep, ...]:
    """Return the scales, soft caps and casts between a model's head and its logits, in order.

    The model's own forward runs, with zeros in place of its last hidden states and with no product of its head. So
    weights are not read, and may be on any device.

    Raises:
        ConfigError: for a model without a linear head, and for one that follows it by other operations.
    """
    hf_model = transformers_model(model)
    head = hf_model.get_output_embeddings()
    logits = _logits_of_zeros(hf_model, head) if isinstance(head, nn.Linear) else None
    if not isinstance(logits, DeferredLogits) or not logits.is_deferred:
        raise ConfigError(
            f"{type(hf_model).__name__} does not compute its logits as the product of a linear head, followed by "
            f"scales, tanh and casts alone; use log-probabilities of sampled tokens (divergence='sampled')"
        )
    return logits.steps


def _logits_of_zeros(model: Any, head: nn.Linear) -> Any:
    states = torch.zeros(1, 1, head.in_features)
    outputs, no_product = _LastStates(last_hidden_state=states), states.new_zeros(1, 1, head.out_features)

    def product(_: Tensor) -> Tensor:
        return no_product  # of a model with another operation, which is refused

    with (
        torch.no_grad(),
        replaced_forward(model.base_model, lambda *args, **kwargs: outputs),
        deferred_head(head, product, num_columns=head.out_features),
    ):
        return model(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits


class _LastStates(BaseModelOutputWithPast):
    """The last hidden states of a model; its further outputs, such as logits of routers, are None."""

    def __getattr__(self, name: str) -> None:
        return None
