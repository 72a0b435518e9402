"""Training options, the return type of a loss, and the plan of optimizer steps for a training call.

Losses are additive: the values of all micro-batches on all data-parallel ranks sum to the loss of the mini-batch,
because each is divided by the mini-batch's totals. Plans are pure and the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.samples import EXPERTS, PROMPT_KEY, RECORD, Ragged, Samples, extra_columns
from lightning_realloc.batch.shares import (
    Integers,
    MicroBatch,
    MicroBatchPlan,
    group_lengths,
    group_name,
    micro_batch_plan,
)
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.layout.dims import is_count
from lightning_realloc.limits import DEFAULT_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS
from lightning_realloc.setting_hints import TRAIN_OPTIONS_HINTS, suggest_settings


@dataclass(frozen=True, slots=True)
class Average:
    """Weighted mean that can still be merged with the means of other ranks and micro-batches."""

    total: Tensor
    """Weighted sum, a scalar."""
    weight: Tensor | float
    """Sum of the weights, a scalar, for example the number of tokens."""
    times: Average | None = None
    """Mean that the merged mean is multiplied with; None: none."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Contribution of one micro-batch to the loss of its mini-batch."""

    value: Tensor
    """Scalar for ``backward``; the values of all micro-batches sum to the mini-batch's loss."""
    metrics: Mapping[str, Average] = field(default_factory=dict)
    """Metrics to log, merged over micro-batches and ranks; every micro-batch must give the same names."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Size of a mini-batch over all its micro-batches and ranks, the denominators of losses."""

    num_sequences: int
    """Number of sequences."""
    num_tokens: int
    """Number of response tokens that count in the loss: those that the model chose, in samples without a NaN in a
    column of the algorithm's ``excluded_by``."""
    group_size: int = 1
    """Number of adjacent sequences that stay together; 2 for pairwise losses."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Column name -> sum over the mini-batch, for the columns that the algorithm lists in ``totals_of``."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise DataError(
                f"a mini-batch needs at least one response token; its {self.num_sequences} sequences have none: "
                f"remove samples with empty responses, or lower num_minibatches"
            )

    @property
    def num_groups(self) -> int:
        """Number of groups of sequences, the denominator of a pairwise loss."""
        return self.num_sequences // self.group_size


def num_counted_tokens(samples: Samples, excluded_by: Sequence[str]) -> int:
    """Return the number of response tokens that the model chose and that no column excludes by a NaN.

    Args:
        samples: Samples with responses.
        excluded_by: Columns of one value per sample or per response token.
    """
    responses = samples.ragged("response_ids")
    counted = torch.ones(responses.num_tokens, dtype=torch.bool)
    if "model_mask" in samples:
        counted &= samples.ragged("model_mask").values.cpu()
    for name in excluded_by:
        column = samples[name]
        assert not isinstance(column, tuple), "python objects have no NaN"
        missing = (column.values if isinstance(column, Ragged) else column).isnan().cpu()
        counted &= ~(missing if isinstance(column, Ragged) else missing.repeat_interleave(responses.lengths))
    return int(counted.sum())


@suggest_settings(TRAIN_OPTIONS_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a training call.

    Args:
        num_epochs: Passes over the samples of one iteration.
        num_minibatches: Optimizer steps per pass. Groups of samples, such as pairs, are never split.
        micro_batch_tokens: Maximum number of tokens packed into one forward pass; None: 8192, and 2048 on CPU.
        max_grad_norm: Global norm to which gradients are clipped; None disables clipping.
        max_skipped_steps: Number of consecutive skipped steps of one role that ends the run. A step is skipped if its
            gradient norm is not finite. None sets no limit.
        stop_above: Metric -> limit. If the mean of a metric over a mini-batch exceeds its limit, this mini-batch and
            all later ones of the iteration are skipped.
        router_aux_loss_coef: Weight of the loss that balances a mixture of experts, by transformers' formula for the
            model; 0: none; None: ``router_aux_loss_coef`` of a config with ``output_router_logits=True``, else none.
        router_bias_update_rate: Step of the biases by which tokens choose experts, after each optimizer step: up for
            experts with fewer tokens than the mean, down for others, as in DeepSeek-V3; 0: they stay.
        compile: Backend of ``torch.compile`` for the model's blocks in training, such as ``"inductor"``; None does not
            compile. Inference never does; generation as ``GenerationOptions(compile=...)`` says.

    Example:
        >>> options = TrainOptions(num_epochs=2, num_minibatches=4, stop_above={"kl": 0.1})
        >>> options.exceeded({"kl": 0.3})
        'kl'
    """

    num_epochs: int = 1
    num_minibatches: int = 1
    micro_batch_tokens: int | None = None
    max_grad_norm: float | None = 1.0
    max_skipped_steps: int | None = 10
    stop_above: Mapping[str, float] = field(default_factory=dict)
    router_aux_loss_coef: float | None = None
    router_bias_update_rate: float = 0.0
    compile: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "num_minibatches"):
            if not is_count(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number, at least 1")
        if self.micro_batch_tokens is not None and not is_count(self.micro_batch_tokens):
            raise ConfigError(
                f"micro_batch_tokens={self.micro_batch_tokens!r} must be a whole number, at least 1; or leave it out"
            )
        norm, skipped = self.max_grad_norm, self.max_skipped_steps
        if norm is not None and not (is_number(norm) and norm > 0):
            raise ConfigError(f"max_grad_norm={norm!r} must be a positive number; use None to leave gradients alone")
        if skipped is not None and not is_count(skipped):
            raise ConfigError(
                f"max_skipped_steps={skipped!r} must be a whole number, at least 1; use None to never stop the run"
            )
        coefficient = self.router_aux_loss_coef
        if coefficient is not None and not (is_number(coefficient) and 0 <= coefficient < math.inf):
            raise ConfigError(
                f"router_aux_loss_coef={coefficient!r} must be a number, at least 0; leave it out for the config's"
            )
        rate = self.router_bias_update_rate
        if not (is_number(rate) and 0 <= rate < math.inf):
            raise ConfigError(f"router_bias_update_rate={rate!r} must be a number, at least 0, such as 0.001")
        if self.compile is not None:
            check_compile_backend(self.compile)
        for metric, limit in self.stop_above.items():
            if not math.isfinite(limit):
                raise ConfigError(f"stop_above[{metric!r}]={limit} must be a finite number; leave it out to never stop")

    def micro_batch_tokens_on(self, device_type: str) -> int:
        """Return the maximum number of tokens of a forward pass on devices of this type."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS.get(device_type, DEFAULT_MICRO_BATCH_TOKENS)

    def exceeded(self, metrics: Mapping[str, float]) -> str | None:
        """Return the first metric of a mini-batch that is above its limit or NaN; None if all are within limits.

        Raises:
            ConfigError: for a limit on a metric that the loss does not return.
        """
        for metric, limit in self.stop_above.items():
            if metric not in metrics:
                raise ConfigError(
                    f"stop_above names {metric!r}, which this loss does not measure; it measures "
                    f"{', '.join(sorted(metrics)) or 'nothing'}: name one of its metrics, or leave {metric!r} out"
                )
            if not metrics[metric] <= limit:
                return metric
        return None


def pack_columns(samples: Samples, device: torch.device, *, share_prompts: bool = False) -> PackedBatch:
    """Pack the samples with their tensors and sequences, records apart, into one row on ``device``.

    Prompts are shared on CPU only: the CUDA kernel for packed sequences does not support it, and running without that
    kernel costs more.
    """
    inputs = {"prompt_ids", "response_ids", PROMPT_KEY, EXPERTS, *extra_columns(samples)}
    columns = [name for name in samples.columns if name not in inputs and not name.startswith(RECORD)]
    share_prompts = share_prompts and device.type == "cpu"
    return pack(samples, columns=columns, share_prompts=share_prompts).to(device)


def halved(micro_batches: Sequence[MicroBatch], times: int, group_size: int = 1) -> tuple[MicroBatch, ...]:
    """Return the same samples in smaller micro-batches: each is cut in half between groups, ``times`` times.

    A micro-batch of one group stays whole.
    """
    found = tuple(micro_batches)
    for _ in range(times):
        found = tuple(
            MicroBatch(part, micro.counts)
            for micro in found
            for middle in [len(micro.positions) // group_size // 2 * group_size]
            for part in (micro.positions[:middle], micro.positions[middle:])
            if part
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class TrainStep:
    """One optimizer step of a training call."""

    positions: Integers
    """(N,) positions of the mini-batch's samples, over all ranks."""
    shares: MicroBatchPlan
    """Micro-batches of each data-parallel rank."""

    def reindexed(self, positions: Integers) -> TrainStep:
        """Return the step with every position ``p`` replaced by ``positions[p]``."""
        return TrainStep(positions[self.positions], self.shares.reindexed(positions))


def train_steps(
    lengths: Integers,
    options: TrainOptions,
    num_shares: int,
    *,
    max_tokens: int,
    equal_counts: bool,
    order_seeds: Sequence[int],
    call: str,
    group_size: int = 1,
) -> tuple[TrainStep, ...]:
    """Return the optimizer steps of a training call, one per mini-batch and epoch, the same on every rank.

    ``order_seeds`` holds one shuffling seed per epoch; see `micro_batch_plan` for the other arguments.
    """
    steps = []
    for epoch in range(options.num_epochs):
        minibatches = minibatch_positions(
            len(lengths), options.num_minibatches, seed=order_seeds[epoch], group_size=group_size
        )
        for positions in minibatches:
            shares = micro_batch_plan(
                lengths[positions],
                num_shares,
                max_tokens=max_tokens,
                equal_counts=equal_counts,
                group_size=group_size,
                call=call,
            )
            steps.append(TrainStep(positions, shares.reindexed(positions)))
    return tuple(steps)


def minibatch_positions(
    num_samples: int, num_minibatches: int, *, seed: int, group_size: int = 1
) -> tuple[Integers, ...]:
    """Return a shuffled partition of the positions into equal mini-batches, one per optimizer step.

    Consecutive groups of ``group_size`` positions stay together.

    Raises:
        ConfigError: if there are fewer groups than mini-batches.
        DataError: for an incomplete group.
    """
    num_groups = len(group_lengths(np.zeros(num_samples), group_size))
    if num_groups < num_minibatches:
        raise ConfigError(
            f"num_minibatches={num_minibatches} needs as many {group_name(group_size, 'sample')}s in an iteration, "
            f"there are {num_groups}; lower num_minibatches or raise the batch size"
        )
    if num_minibatches == 1:
        return (np.arange(num_samples),)
    order = torch.randperm(num_groups, generator=torch.Generator().manual_seed(seed)).numpy()
    bounds = [num_groups * part // num_minibatches for part in range(num_minibatches + 1)]
    members = np.arange(num_samples).reshape(num_groups, group_size)
    return tuple(members[np.sort(order[a:b])].ravel() for a, b in pairwise(bounds))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a setting is a real number, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_compile_backend(backend: str) -> None:
    """Raise ConfigError for an unknown backend of ``torch.compile``."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile={backend!r} must be a backend of torch.compile: {', '.join(known)}")
