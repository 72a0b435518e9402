"""What an algorithm's loss gives back, and how a training call's samples become optimizer steps.

Losses are additive: the values of all micro-batches on all data-parallel ranks sum to the loss of the whole
mini-batch, because each is divided by the mini-batch's totals. The arithmetic is pure and the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from lightning_realloc.batch.packing import PackedBatch, micro_batches, pack
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.shares import balanced_shares
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.setting_hints import TRAIN_OPTIONS_HINTS, suggest_settings


@dataclass(frozen=True, slots=True)
class Average:
    """A mean that can still be merged with other ranks' and micro-batches' means."""

    total: Tensor
    """Scalar: the weighted sum."""
    weight: Tensor | float
    """Scalar: the sum of the weights, e.g. the number of tokens."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One micro-batch's part of a mini-batch's loss."""

    value: Tensor
    """Scalar that backward starts from; the parts of a mini-batch add up to its loss."""
    metrics: Mapping[str, Average] = field(default_factory=dict)
    """What to log, merged over micro-batches and ranks; every micro-batch has the same names."""


@dataclass(frozen=True, slots=True)
class Totals:
    """How much a whole mini-batch holds, over all micro-batches and ranks: what losses divide by."""

    num_sequences: int
    """Sequences."""
    num_tokens: int
    """Response tokens that the model chose, the ones that count in the loss."""
    group_size: int = 1
    """Sequences that stay together: 2 where losses are of pairs."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Of the batch's columns that the algorithm names in ``totals_of``: their sums."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise DataError(
                f"a mini-batch has {self.num_sequences} sequences without a single response token to learn from; "
                f"leave samples with empty responses out, or lower num_minibatches"
            )

    @property
    def num_groups(self) -> int:
        """Groups of sequences that stay together: what the mean of a pairwise loss divides by."""
        return self.num_sequences // self.group_size


@suggest_settings(TRAIN_OPTIONS_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a training call goes through its samples.

    Args:
        num_epochs: Passes over the samples of one iteration.
        num_minibatches: Optimizer steps per pass; groups of samples that belong together, as pairs, are never split.
        micro_batch_tokens: Most tokens that are packed into one forward pass.
        max_grad_norm: The global norm that gradients are clipped to; None leaves them.
        max_skipped_steps: A step whose gradient norm is not finite is skipped; so many in a row of one role end the
            run. None: any number of them may be skipped.
        stop_above: Metric -> limit. A mini-batch whose mean of a metric, over all its samples, exceeds the limit is not
            learnt from, nor is any after it in the same iteration.
        compile: The backend of ``torch.compile`` that runs the model's blocks, ``"inductor"``; None: they run as they
            are. Inference and generation always do.
    """

    num_epochs: int = 1
    num_minibatches: int = 1
    micro_batch_tokens: int = 8192
    max_grad_norm: float | None = 1.0
    max_skipped_steps: int | None = 10
    stop_above: Mapping[str, float] = field(default_factory=dict)
    compile: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "num_minibatches", "micro_batch_tokens"):
            if not _is_count(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number, at least 1")
        norm, skipped = self.max_grad_norm, self.max_skipped_steps
        if norm is not None and (isinstance(norm, bool) or not isinstance(norm, Real) or not norm > 0):
            raise ConfigError(f"max_grad_norm={norm!r} must be a positive number; use None to leave gradients alone")
        if skipped is not None and not _is_count(skipped):
            raise ConfigError(
                f"max_skipped_steps={skipped!r} must be a whole number, at least 1; use None to never stop the run"
            )
        if self.compile is not None:
            _check_compile_backend(self.compile)
        for metric, limit in self.stop_above.items():
            if not math.isfinite(limit):
                raise ConfigError(f"stop_above[{metric!r}]={limit} must be a finite number; leave it out to never stop")

    def exceeded(self, metrics: Mapping[str, float]) -> str | None:
        """Return the first metric of a mini-batch that is above its limit (or NaN), None when all are within.

        Raises:
            ConfigError: for a limit of a metric that the loss does not measure.
        """
        for metric, limit in self.stop_above.items():
            if metric not in metrics:
                raise ConfigError(
                    f"stop_above names {metric!r}, which this loss does not measure; it measures "
                    f"{', '.join(sorted(metrics))}"
                )
            if not metrics[metric] <= limit:
                return metric
        return None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Positions that one rank packs into one forward pass."""

    positions: tuple[int, ...]
    """Of the samples that the call works on."""
    counts: bool
    """False: a repetition that only keeps collective forward passes in step; its loss and gradients are zeroed."""


def pack_columns(samples: Samples, device: torch.device, *, share_prompts: bool = False) -> PackedBatch:
    """Return the samples in one pack on ``device``, with every column of numbers that they have.

    Prompts are shared on CPU alone: the CUDA kernel for packed sequences cannot, and doing without it costs more.
    """
    beside = [name for name in samples.columns if name not in ("prompt_ids", "response_ids")]
    share_prompts = share_prompts and device.type == "cpu"
    return pack(samples, columns=beside, share_prompts=share_prompts).to(device)


def micro_batch_plan(
    lengths: Sequence[int], num_shares: int, *, max_tokens: int, equal_counts: bool, group_size: int = 1
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Return for every data-parallel rank the micro-batches it runs: its balanced share, packed.

    ``equal_counts`` gives every rank as many micro-batches as the busiest one, which sharded weights need: each of
    their forward passes is a collective. Every rank has at least one, so that it takes part in reducing gradients. The
    shares are the same whether or not it is set.

    Each ``group_size`` positions in a row, from the first, go into one micro-batch, next to each other and in order.
    """
    sizes = _group_lengths(lengths, group_size)
    plans: list[list[MicroBatch]] = []
    for share in balanced_shares(sizes, num_shares):
        packs = micro_batches([sizes[group] for group in share], max_tokens, what=group_name(group_size))
        plans.append([MicroBatch(_members([share[row] for row in pack], group_size), True) for pack in packs])
    filler = MicroBatch(_members([min(range(len(sizes)), key=sizes.__getitem__)], group_size), False)
    least = max(len(plan) for plan in plans) if equal_counts else 1
    return tuple(tuple(plan + [filler] * (least - len(plan))) for plan in plans)


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimizer step of a training call."""

    positions: tuple[int, ...]
    """The mini-batch, over all ranks."""
    shares: tuple[tuple[MicroBatch, ...], ...]
    """Every data-parallel rank's micro-batches."""

    def at(self, positions: Sequence[int]) -> TrainStep:
        """Return the same step of the samples at ``positions``, where this one counts through them."""

        def placed(rows: Sequence[int]) -> tuple[int, ...]:
            return tuple(positions[row] for row in rows)

        shares = tuple(tuple(MicroBatch(placed(m.positions), m.counts) for m in share) for share in self.shares)
        return TrainStep(placed(self.positions), shares)


def train_steps(
    lengths: Sequence[int],
    options: TrainOptions,
    num_shares: int,
    *,
    max_tokens: int,
    equal_counts: bool,
    order_seeds: Sequence[int],
    group_size: int = 1,
) -> tuple[TrainStep, ...]:
    """Return the optimizer steps of a training call: one per mini-batch and epoch, the same on every rank.

    ``order_seeds`` shuffle the epochs, one each; see `micro_batch_plan` for the rest.
    """
    steps = []
    for epoch in range(options.num_epochs):
        parts = minibatch_positions(
            len(lengths), options.num_minibatches, seed=order_seeds[epoch], group_size=group_size
        )
        for positions in parts:
            plans = micro_batch_plan(
                [lengths[position] for position in positions], num_shares, max_tokens=max_tokens,
                equal_counts=equal_counts, group_size=group_size,
            )  # fmt: skip
            steps.append(TrainStep(tuple(range(len(positions))), plans).at(positions))
    return tuple(steps)


def minibatch_positions(
    num_samples: int, num_minibatches: int, *, seed: int, group_size: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return a shuffled partition of the positions into equal mini-batches, one per optimizer step.

    Each ``group_size`` positions in a row, from the first, stay together.

    Raises:
        ConfigError: when there are fewer groups than mini-batches.
    """
    num_groups = len(_group_lengths(range(num_samples), group_size))
    if num_groups < num_minibatches:
        raise ConfigError(
            f"num_minibatches={num_minibatches} needs as many {group_name(group_size, 'sample')}s in an iteration, "
            f"there are {num_groups}; lower num_minibatches or raise the batch size"
        )
    if num_minibatches == 1:
        return (tuple(range(num_samples)),)
    order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = [num_groups * part // num_minibatches for part in range(num_minibatches + 1)]
    return tuple(_members(sorted(order[a:b]), group_size) for a, b in pairwise(bounds))


def group_name(group_size: int, one: str = "sequence") -> str:
    """Return what error messages call ``group_size`` samples that stay together."""
    return {1: one, 2: "pair"}.get(group_size, f"group of {group_size} {one}s")


def _group_lengths(lengths: Sequence[int], group_size: int) -> list[int]:
    """Return the summed lengths of each group of neighbours."""
    if len(lengths) % group_size:
        raise DataError(
            f"samples that stay together come in groups of {group_size}, and there are {len(lengths)}; "
            f"leave no sample of a group out"
        )
    return [sum(lengths[first : first + group_size]) for first in range(0, len(lengths), group_size)]


def _members(groups: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Return the positions of the groups, group by group."""
    return tuple(group * group_size + place for group in groups for place in range(group_size))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_compile_backend(backend: str) -> None:
    """Raise ConfigError for what is no backend of ``torch.compile``."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile={backend!r} must be a backend of torch.compile: {', '.join(known)}")
